"""The baselines of federated adversarial training: each does what its paper says, and is FedAvg where it should be."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.func import grad

from conftest import assert_close, everything, fit, net
from hardy import config, papers
from hardy.attacks.gradient import pgd
from hardy.core.cohort import Cohort
from hardy.core.messages import Slot, Updates
from hardy.core.net import Net
from hardy.core.partition import Role
from hardy.core.protocols import Batch, RoundContext
from hardy.core.training import Training
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.papers.afl import agnostic, onto_simplex
from hardy.papers.fat import where_affordable
from hardy.papers.fed_soft_better import soft_better
from hardy.papers.per_fedavg import halves, meta
from hardy.papers.scaffold import control_mean
from hardy.parts.adversarial import adversarial, by_kind, free
from hardy.parts.aggregators.base import by_role, mean, pipeline
from hardy.parts.norms import dual
from hardy.parts.objectives import cross_entropy

VECTORISED = EngineChoice(name="vectorised", device="cpu", precision="float64", lane=3)


def updates(losses, clients=None, weights=None) -> Updates:
    clients = range(len(losses)) if clients is None else clients
    count = len(losses)
    return Updates(
        slots=[Slot(c) for c in clients],
        shared={"w": torch.arange(count, dtype=torch.float64)[:, None] ** 2},
        reported={},
        weights=torch.ones(count).double() if weights is None else torch.tensor(weights).double(),
        steps=torch.full((count,), 3),
        loss=torch.tensor(losses).double(),
    )


def context(clients: int) -> RoundContext:
    return RoundContext(shared={"w": torch.zeros(1, 1).double()}, roles={"w": Role.WEIGHT}, bases=1, clients=clients)


# federated adversarial training


def test_fat_methods_are_the_methods_on_an_adversarial_objective():
    attack = pgd(steps=2)
    objective = where_affordable(adversarial(attack=attack, mix=1.0))
    pairs = [
        (papers.fatavg, papers.fedavg(objective=objective)),
        (papers.fatprox, papers.fedprox(objective=objective)),
        (papers.fatbn, papers.fedbn(objective=objective)),
        (papers.fatscaffold, papers.scaffold(objective=objective)),
        (papers.fatmeta, papers.per_fedavg(objective=objective)),
    ]
    for factory, same in pairs:
        made = factory(attack=attack, mix=1.0)
        assert made.name == factory.__name__
        assert made == same.replace(name=made.name)
    assert papers.fatavg().objective == by_kind(AT=adversarial(), ST=cross_entropy())
    assert papers.fatfree().objective.for_client("", 0) == free()
    assert papers.fatprox(strength=3.0).objective.strength == 3.0


def test_dual_norm_averages_statistics_of_attacked_images_apart():
    run = fit(papers.fatavg_dbn(attack=pgd(steps=1)), rounds=1)
    means = {n: t for n, t in run.state.shared.items() if run.engine.plan.roles[n] is Role.NORM_MEAN}
    clean = {n: t for n, t in means.items() if ".clean." in n}
    assert clean
    for name, value in clean.items():
        attacked = means[name.replace(".clean.", ".adversarial.")]
        assert attacked.abs().sum() > 0 and not torch.equal(value, attacked)
    assert papers.fatavg_dbn().norm == dual()


# FedDynAT


def test_epochs_shrink_by_hand():
    """E₀ = 8, γ = 1/2, F = 2: 8, 5.66, 4, 2.83, 2, 1.41, 1, 0.71, ... rounded, never below 1."""
    training = Training(epochs=8, epochs_decay=0.5, epochs_every=2, batch=5)
    assert [training.epochs_at(t) for t in range(10)] == [8, 6, 4, 3, 2, 1, 1, 1, 1, 1]
    rows = np.arange(10)
    lengths = [len(training.batches(rows, np.random.default_rng(0), t)) for t in range(4)]
    assert lengths == [16, 12, 8, 6]
    assert [training.examples(10, t) for t in range(4)] == [80, 60, 40, 30]
    assert [Training(epochs=3).epochs_at(t) for t in (0, 1000)] == [3, 3]


def test_shrinking_epochs_agree_on_all_engines_and_report_the_last_epoch():
    training = Training(rate=0.1, batch=4, epochs=3, epochs_decay=0.5)
    runs = [fit(papers.afl(step=0.1), training=training, rounds=3, **o) for o in ({}, {"engine": VECTORISED})]
    assert_close(everything(runs[0]), everything(runs[1]), 1e-9)  # λ sees the reported losses
    assert [runs[0].engine.loss_window(t, 3 * e) for t, e in enumerate((3, 2, 1))] == [3, 3, 3]


@pytest.mark.parametrize("wrong", [{"epochs_decay": 0.0}, {"epochs_decay": 1.5}, {"epochs_every": 0}])
def test_bad_schedules_are_refused(wrong):
    with pytest.raises(HardyError, match=rf"training\.{next(iter(wrong))} is .*; it must be"):
        Training(**wrong)


# AFL


def test_projection_onto_the_simplex():
    draw = torch.Generator().manual_seed(0)
    for mass in (0.0, 0.3, 1.0):
        point = torch.randn(6, generator=draw, dtype=torch.float64)
        near = onto_simplex(point, torch.tensor(mass).double())
        assert near.min() >= 0
        torch.testing.assert_close(near.sum(), torch.tensor(mass).double())
        torch.testing.assert_close(onto_simplex(near, near.sum()), near)
        for _ in range(20):  # no other point of the simplex is nearer
            other = mass * torch.rand(6, generator=draw, dtype=torch.float64).log().neg()
            other = other * mass / other.sum().clamp_min(1e-30)
            assert (near - point).norm() <= (other - point).norm() + 1e-12


def test_afl_moves_towards_high_losses_and_stays_on_the_simplex():
    rule = pipeline(pre=(agnostic(step=0.05),))
    memory = rule.memory(context(4))
    assert memory["0.mixture"].tolist() == [[0.25] * 4]
    given = updates([0.5, 1.0, 2.0, 1.0])
    shared, after = rule.finish(rule.fold(None, given, context(4)), context(4), memory)
    torch.testing.assert_close(shared["w"][0], given.shared["w"].mean(0))  # both players move at once
    torch.testing.assert_close(after["0.mixture"][0], 0.25 + 0.05 * (given.loss - given.loss.mean()))
    for _ in range(100):
        shared, after = rule.finish(rule.fold(None, given, context(4)), context(4), after)
    torch.testing.assert_close(after["0.mixture"][0], torch.tensor([0.0, 0.0, 1.0, 0.0]).double())
    torch.testing.assert_close(shared["w"][0], given.shared["w"][2])


def test_afl_leaves_clients_outside_the_cohort_as_they_are():
    rule = pipeline(pre=(agnostic(step=0.1),))
    memory = {"0.mixture": torch.tensor([[0.4, 0.3, 0.2, 0.1]]).double()}
    given = updates([1.0, 3.0], clients=[2, 0])
    shared, after = rule.finish(rule.fold(None, given, context(4)), context(4), memory)
    torch.testing.assert_close(after["0.mixture"], torch.tensor([[0.5, 0.3, 0.1, 0.1]]).double())
    torch.testing.assert_close(shared["w"][0], torch.tensor([0.4 / 0.6]).double())
    run = fit(papers.afl(step=0.2), cohort=Cohort(fraction=0.5), rounds=6)
    mixture = run.state.memory["0.mixture"]
    assert mixture.shape == (1, 4) and mixture.min() >= 0 and not torch.allclose(mixture, mixture.mean())
    torch.testing.assert_close(mixture.sum(), torch.tensor(1.0).double())


def test_afl_without_a_step_is_fedavg_with_its_first_mixture():
    uniform = papers.fedavg().replace(aggregator=mean(weigh="uniform"))
    assert_close(fit(papers.afl(step=0.0)).state.shared, fit(uniform).state.shared, 1e-12)


def test_afl_keeps_a_mixture_for_each_base():
    rule = pipeline(pre=(agnostic(step=0.1),))
    two = dataclasses.replace(context(2), shared={"w": torch.zeros(2, 1).double()}, bases=2)
    given = dataclasses.replace(updates([1.0, 2.0]), slots=[Slot(0, 1), Slot(1, 1)])
    shared, after = rule.finish(rule.fold(None, given, two), two, rule.memory(two))
    torch.testing.assert_close(after["0.mixture"], torch.tensor([[0.5, 0.5], [0.45, 0.55]]).double())
    assert shared["w"].flatten().tolist() == [0.0, 0.5]


# FedSoftBetter


def test_soft_better_prefers_small_losses():
    given = updates([0.5, 1.5, 0.5], weights=[1.0, 1.0, 2.0])
    weighed, _ = soft_better(temperature=2.0).apply(given, context(3), {})
    share = weighed.weights / weighed.weights.sum()
    by_hand = given.weights * torch.exp(-given.loss / 2.0)
    torch.testing.assert_close(share, by_hand / by_hand.sum())
    torch.testing.assert_close(share.sum(), torch.tensor(1.0).double())
    best, _ = soft_better(temperature=1e-3).apply(given, context(3), {})
    torch.testing.assert_close(best.weights, torch.tensor([1.0, 0.0, 2.0]).double())


def test_soft_better_gains_nothing_from_losses_below_zero():
    honest, lying = (
        soft_better().apply(updates(losses), context(2), {})[0].weights for losses in ([0.0, 1.0], [-1e9, 1.0])
    )
    assert torch.equal(honest, lying)


def test_soft_better_at_infinite_temperature_is_fedavg():
    hot = papers.fed_soft_better(temperature=float("inf"))
    assert_close(fit(hot).state.shared, fit(papers.fedavg()).state.shared, 1e-12)


# chains


def test_stages_follow_one_another():
    """AFL's first mixture takes the place of the sample counts; the softmax then tilts it."""
    rule = pipeline(pre=(agnostic(step=0.0), soft_better()))
    given = updates([0.0, 1.0], weights=[5.0, 1.0])
    shared, _ = rule.finish(rule.fold(None, given, context(2)), context(2), rule.memory(context(2)))
    torch.testing.assert_close(shared["w"][0, 0], torch.sigmoid(torch.tensor(-1.0)).double())


@pytest.mark.parametrize(
    "rule", [mean(weigh="uniform"), control_mean(), by_role(control=control_mean())], ids=lambda r: type(r).__name__
)
def test_a_rule_without_weighted_form_is_refused_after_a_stage(rule):
    with pytest.raises(
        HardyError, match=r"stage 'SoftBetter' weighs the updates, but the rule .* has no weighted form"
    ):
        pipeline(pre=(soft_better(),), rule=rule)
    assert pipeline(rule=rule).rule == rule  # nothing to ignore


def test_chains_and_baselines_are_written_in_toml():
    text = """
    [method]
    name = "fatavg"
    mix = 1.0
    attack = { name = "pgd", steps = 3 }
    aggregator = { name = "pipeline", pre = [{ name = "agnostic", step = 0.1 }, "soft_better"], rule = "mean" }
    [training]
    epochs = 4
    epochs_decay = 0.5
    epochs_every = 10
    """
    made = config.method(config.parse(text))
    assert made.aggregator == pipeline(pre=(agnostic(step=0.1), soft_better()), rule=mean())
    assert made.objective == where_affordable(adversarial(attack=pgd(steps=3), mix=1.0))


# Per-FedAvg


def meta_setting(size=6):
    plan = papers.fedavg().bind(net, (1, 8, 8))
    plan.model.double()
    start = {n: t.double() for n, t in plan.start.items()}
    trained, kept = {n: start[n] for n in plan.trained}, {n: start[n] for n in plan.buffers}
    x = torch.rand(size, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def gradient(objective, given, at=trained):
        return grad(lambda w: objective.loss(Net(plan.model, w, kept), {}, given, torch.tensor(5)))(at)

    return trained, Batch(x, torch.arange(size) % 3, torch.ones(3)), gradient


def half(given, part):
    return given._replace(x=given.x[part], y=given.y[part])


def test_meta_without_a_virtual_step_is_the_inner_objective_on_the_second_half():
    _, given, gradient = meta_setting()
    second = half(given, slice(3, None))
    assert_close(gradient(meta(rate=0.0), given), gradient(cross_entropy(), second), 0)


def test_meta_takes_the_gradient_at_the_virtual_point_to_first_order():
    trained, given, gradient = meta_setting()
    ahead = gradient(cross_entropy(), half(given, slice(3)))
    there = {n: w - 0.3 * ahead[n] for n, w in trained.items()}
    by_hand = gradient(cross_entropy(), half(given, slice(3, None)), there)
    assert_close(gradient(meta(rate=0.3), given), by_hand, 1e-12)


def test_meta_looks_ahead_under_attack_too():
    _, given, gradient = meta_setting()
    inner = adversarial(attack=pgd(steps=2, start="none"), mix=1.0)
    moved = gradient(meta(inner=inner, rate=0.3), given)
    assert any(not torch.equal(g, moved[n]) for n, g in gradient(meta(inner=inner, rate=0.0), given).items())


@pytest.mark.parametrize(("size", "first", "second"), [(1, 1, 1), (2, 2, 2), (3, 2, 2), (4, 2, 2), (5, 2, 3)])
def test_halves_of_small_batches_hold_two_examples(size, first, second):
    _, given, _ = meta_setting(size)
    d, d2 = halves(given)
    assert (len(d.x), len(d2.x)) == (first, second)
    assert torch.equal(d2.x[-1], given.x[-1]) and torch.equal(d.y, given.y[: len(d.y)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: agnostic(step=-1.0), "agnostic step"),
        (lambda: soft_better(temperature=0.0), "soft_better temperature"),
        (lambda: meta(rate=float("inf")), "meta rate"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(HardyError, match=rf"{message} \(.\) is .*; it must be"):
        make()
