"""DP-SGD: its gradient beside a loop over examples, its account by hand, and what it refuses."""

import dataclasses
from math import inf

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import hardy
from conftest import assert_close, everything, experiment, federation, fit, net
from hardy import papers
from hardy.attacks.gradient import pgd
from hardy.core.account import Mechanism, epsilon_of
from hardy.core.net import Net
from hardy.core.protocols import Batch
from hardy.core.spending import privacy_spent
from hardy.core.training import Training
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.papers.calfat import prior_calibrated
from hardy.papers.fedavg import proximal
from hardy.papers.sfat import slack
from hardy.parts.adversarial import adversarial, by_kind, free
from hardy.parts.aggregators.base import pipeline
from hardy.parts.example_privacy import dp_sgd
from hardy.parts.norms import group
from hardy.parts.objectives import cross_entropy, masked_cross_entropy, ramped
from hardy.runs.prepare import prepare

VECTORISED = EngineChoice(name="vectorised", device="cpu", precision="float64", lane=3)


def one_step(objective, seed=0):
    """A network, a batch of six, and the gradient that the objective gives of it."""
    torch.manual_seed(seed)
    plan = papers.fedavg(norm=group()).bind(lambda norm: net(norm, width=1.0), (1, 8, 8))
    plan.model.double()
    start = {name: plan.start[name].double() for name in plan.trained}
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(6, 1, 8, 8, dtype=torch.float64, generator=draw)
    batch = Batch(x, torch.arange(6) % 3, torch.full((3,), 2.0))
    found = objective.gradient(objective, Net(plan.model, start, {}), {}, batch, torch.tensor(5), {})
    return plan.model, start, batch, found


@pytest.mark.parametrize("clip", [0.3, 100.0])
def test_gradients_are_clipped_one_by_one(clip):
    model, start, batch, found = one_step(dp_sgd(clip=clip, noise=0.0))
    weights = {name: w.clone().requires_grad_() for name, w in start.items()}
    total = {name: torch.zeros_like(w) for name, w in weights.items()}
    cut = 0
    for x, y in zip(batch.x, batch.y, strict=True):
        loss = F.cross_entropy(torch.func.functional_call(model, weights, x[None]), y[None])
        own = torch.autograd.grad(loss, list(weights.values()))
        length = torch.cat([g.flatten() for g in own]).norm()
        cut += bool(length > clip)
        for name, g in zip(total, own, strict=True):
            total[name] += g * min(1.0, clip / length.item()) / 6
    assert cut == (6 if clip == 0.3 else 0)
    for name, expected in total.items():
        torch.testing.assert_close(found.gradient[name], expected, rtol=1e-9, atol=1e-12)
    if clip == 100.0:  # nothing is cut: the gradient of the batch
        plain = one_step(cross_entropy())[-1]
        assert_close(found.gradient, plain.gradient, 1e-9)
        torch.testing.assert_close(found.loss, plain.loss)


def test_the_noise_is_as_large_as_said():
    def noise_of(entropy):
        loud = one_step(dp_sgd(clip=0.3, noise=2.0, entropy=entropy))[-1].gradient
        still = one_step(dp_sgd(clip=0.3, noise=0.0))[-1].gradient
        return torch.cat([(loud[name] - g).flatten() for name, g in still.items()])

    seeded = noise_of("seed")
    assert seeded.std().item() == pytest.approx(2.0 * 0.3 / 6, rel=0.05) and len(seeded) > 2000
    assert torch.equal(seeded, noise_of("seed"))
    assert noise_of("system").std().item() == pytest.approx(0.1, rel=0.05)
    assert not torch.equal(noise_of("system"), noise_of("system"))


@pytest.mark.parametrize(
    "objective",
    [
        proximal(inner=dp_sgd(clip=0.5, delta=0.01), strength=0.1),
        dp_sgd(inner=adversarial(attack=pgd(steps=2)), clip=0.5, delta=0.01),
    ],
    ids=["proximal outside", "adversarial inside"],
)
def test_it_nests_and_engines_agree(objective):
    method = papers.fedavg(norm=group(), objective=objective)
    one, many = (fit(method, rounds=2, **engine) for engine in ({}, {"engine": VECTORISED}))
    assert_close(everything(one), everything(many), 1e-9)
    quiet = papers.fedavg(norm=group(), objective=dp_sgd(clip=0.5, noise=0.0, delta=0.01))
    assert not torch.equal(fit(quiet, rounds=2).state.shared["fc.weight"], one.state.shared["fc.weight"])


def test_resuming_is_exact(tmp_path):
    method, data = papers.fedavg(norm=group(), objective=dp_sgd(delta=0.01)), federation()
    whole = fit(method, data=data)
    fit(method, data=data, rounds=2, out=tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 4"))
    bound = whole.engine.plan.method
    resumed = hardy.resume(tmp_path / "run", method=bound, model=net, data=data, quiet=True)
    assert_close(everything(whole), everything(resumed), 0)


BY_HAND = {
    "epochs": (Training(batch=4, epochs=3), [(0.5, 1.0, 3 * 4)]),
    "wrap": (Training(batch=4, epochs=3, remainder="wrap"), [(0.5, 1.0, 6 * 4)]),
    "few steps": (Training(batch=2, steps=2), [(0.5, 1.0, 1 * 4)]),
    "many steps": (Training(batch=2, steps=5), [(0.5, 1.0, 4 * 4)]),
    "whole batches": (Training(batch=1, steps=12), [(0.5, 1.0, 3 * 4)]),
    "independent": (Training(batch=2, steps=5, independent=True), [(0.5, 2 / 5, 5 * 4), (0.5, 2 / 12, 5 * 4)]),
    "replays": (Training(batch=2, steps=5, independent=True, replays=4), [(0.25, 2 / 5, 5 * 4)]),
}
"""training -> (deviation / sensitivity, share, times) after 4 rounds of clients of 10, 7, 12 and 5 rows"""


@pytest.mark.parametrize("name", BY_HAND)
def test_the_account_of_each_way_of_drawing_batches(name):
    training, rows = BY_HAND[name]
    method = papers.fedavg(norm=group(), objective=dp_sgd(noise=1.0, delta=0.01))
    run = fit(method, training=training)
    (spent,) = run.summary()["privacy"]
    by_hand = [Mechanism(what="", unit="example", noise=z, share=q, times=t) for z, q, t in rows]
    assert spent["epsilon"] == max(epsilon_of([one], 0.01) for one in by_hand)
    assert spent["unit"] == "example" and spent["adjacency"] == "one example replaced by another"
    assert run.last_line["example_epsilon"] == spent["epsilon"]


def test_a_batch_may_hold_a_row_twice():
    """Five rows in batches of two: the third begins in the first pass and ends in the second. A row that is in it twice
    moves that sum by twice as much, which is worth four times, and the account says so."""
    rows, worst = np.arange(5), 0
    for seed in range(200):
        batches = Training(batch=2, steps=5).batches(rows, np.random.default_rng(seed), 0)
        worst = max(worst, *(sum((batch == row).sum() ** 2 for batch in batches) for row in rows))
    assert worst == 4
    method = papers.fedavg(norm=group(), objective=dp_sgd(noise=1.0, delta=0.01))
    run = prepare(
        experiment(training=Training(batch=2, steps=5)), method=method, model=net, data=federation(sizes=(5,) * 4)
    )
    (spent,) = privacy_spent(run.server, 1)
    assert [one["times"] for one in spent["mechanisms"]] == [worst]


def test_every_network_of_a_client_is_counted():
    """Split-Mix has a client train several: an example is in the gradients of all of them."""
    method = papers.split_mix().replace(norm=group(), objective=dp_sgd(noise=1.0, delta=0.01))
    run = prepare(experiment(), method=method, model=net, data=federation())
    (spent,) = privacy_spent(run.server, 3)
    asked = run.server.networks_asked(3)
    slots = [slot for at in range(3) for slot in run.server.ask(at).slots]
    assert asked == [sum(slot.client == client for slot in slots) for client in range(4)] and max(asked) > 3
    assert [one["times"] for one in spent["mechanisms"]] == [2 * max(asked)]  # of two epochs
    assert run.server.networks_asked(1) == [count // 3 for count in asked]


def test_independent_steps_draw_anew():
    rows, rng = np.arange(10), np.random.default_rng(0)
    drawn = Training(batch=4, steps=50, independent=True).batches(rows, rng, 0)
    assert all(len(set(batch)) == 4 for batch in drawn)
    seen = np.bincount(np.concatenate(drawn), minlength=10)
    assert seen.sum() == 200 and seen.min() > 8 and len(set(drawn[0]) & set(drawn[1]) | set(drawn[1]) & set(drawn[2]))
    dealt = Training(batch=5, steps=2).batches(rows, rng, 0)
    assert sorted(np.concatenate(dealt)) == list(rows)


def with_kinds():
    data = federation()
    kinds = zip(data.clients, ("AT", "ST") * 2, strict=True)
    return dataclasses.replace(data, clients=tuple(dataclasses.replace(client, kind=kind) for client, kind in kinds))


DELTA = {"delta": 0.01}
REFUSED = {
    "in a batch norm examples mix": (papers.fedavg(objective=dp_sgd(**DELTA)), {}),
    "looks at several examples together": (papers.fedavg(norm=group(), objective=dp_sgd(inner=free(), **DELTA)), {}),
    "around MaskedCrossEntropy": (
        papers.fedavg(norm=group(), objective=dp_sgd(inner=masked_cross_entropy(), **DELTA)),
        {},
    ),
    "it weighs by losses": (
        papers.fedavg(norm=group(), objective=dp_sgd(**DELTA)).replace(aggregator=pipeline(pre=(slack(),))),
        {},
    ),
    "client 1 has 1 row": (
        papers.fedavg(norm=group(), objective=dp_sgd(**DELTA)),
        {"data": federation(sizes=(8, 1, 8))},
    ),
    "by_kind, or in each": (
        papers.fedavg(norm=group(), objective=by_kind(AT=dp_sgd(**DELTA), ST=cross_entropy())),
        {"data": with_kinds()},
    ),
    "ramped moves noise of dp_sgd": (
        papers.fedavg(norm=group(), objective=ramped(inner=dp_sgd(**DELTA), number="noise", last=3)),
        {},
    ),
    "lets the gradient of one example hang on the client's others": (
        papers.fedavg(norm=group(), objective=prior_calibrated(inner=dp_sgd(**DELTA))),
        {},
    ),
    "it must be below 0.083": (papers.fedavg(norm=group(), objective=dp_sgd(delta=0.1)), {}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_would_leak_is_refused(why):
    method, changes = REFUSED[why]
    with pytest.raises(HardyError, match=why):
        prepare(experiment(), method=method, model=net, data=changes.get("data") or federation())


@pytest.mark.parametrize("options", [{"clip": inf}, {"noise": -1.0}, {"delta": 0.0}])
def test_values_outside_their_limits_are_refused(options):
    with pytest.raises(HardyError, match="dp_sgd"):
        dp_sgd(**options)


def test_independent_needs_steps():
    with pytest.raises(HardyError, match=r"it needs training\.steps"):
        Training(independent=True)
