"""FedRBN: what is propagated, what calibration leaves alone, and when it is FedBN."""

import dataclasses
from math import inf

import numpy as np
import pytest
import torch
from torch.func import grad
from torch.nn import functional as F

import hardy
from conftest import assert_close, everything, federation, fit, net, with_momentum
from hardy import papers
from hardy.attacks.gradient import pgd
from hardy.core import random
from hardy.core.cohort import Cohort
from hardy.core.federation import Client
from hardy.core.net import Net
from hardy.core.partition import Placement, Role, Tag
from hardy.core.protocols import Batch
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.papers.fedbn import local
from hardy.papers.fedrbn import pnc, propagated
from hardy.parts.adversarial import adversarial
from hardy.parts.norms import batch, dual, group
from hardy.parts.objectives import cross_entropy

VECTORISED = EngineChoice(name="vectorised", device="cpu", precision="float64", lane=3)
SHORT = pgd(steps=2)


def of_kinds(*kinds, **options):
    data = federation(**options)
    clients = (dataclasses.replace(c, kind=k) for c, k in zip(data.clients, kinds, strict=True))
    return dataclasses.replace(data, clients=tuple(clients))


MIXED = of_kinds("AT", "ST", "AT", "ST")

# propagation


def profiles(*kinds):
    nothing = np.zeros(0, dtype=np.int64)
    return [Client(domain="d", train=nothing, validation=nothing, test=nothing, kind=kind) for kind in kinds]


def statistics(clients, bases=2, features=(5, 3), seed=0):
    """Reported statistics of two layers, and their tags."""
    draw = torch.Generator().manual_seed(seed)
    found, tags = {}, {}
    for layer, width in enumerate(features):
        for branch in ("clean", "adversarial"):
            for word, role in (("mean", Role.NORM_MEAN), ("var", Role.NORM_VAR)):
                name = f"norm{layer}.{branch}.{word}"
                found[name] = torch.rand(clients, bases, width, generator=draw, dtype=torch.float64) + 0.1
                tags[name] = Tag(role, branch=branch)
        found[f"norm{layer}.adversarial.batches"] = torch.ones(clients, bases, dtype=torch.int64)
        tags[f"norm{layer}.adversarial.batches"] = Tag(Role.COUNTER, branch="adversarial")
    return found, tags


def own(values):
    return {n: t for n, t in values.items() if "adversarial" in n and t.is_floating_point()}


def test_propagation_by_hand():
    """Eq. 3 and 4, client by client, layer by layer and base by base."""
    values, tags = statistics(4)
    norm = dual(clean=local(statistics=Placement.REPORTED), adversarial=propagated(temperature=0.1))
    after = norm.exchange(values, tags, profiles("AT", "ST", "AT", "ST"))
    for k in (1, 3):
        for b in (0, 1):
            likeness = []
            for j in (0, 2):
                layers = [
                    sum(
                        F.cosine_similarity(
                            values[f"norm{layer}.clean.{w}"][k, b], values[f"norm{layer}.clean.{w}"][j, b], 0
                        )
                        for w in ("mean", "var")
                    )
                    / 2
                    for layer in (0, 1)
                ]
                likeness.append(sum(layers) / 2)
            alpha = (torch.stack(likeness) / 0.1).softmax(0)
            torch.testing.assert_close(alpha.sum(), torch.tensor(1.0).double())
            for name in own(values):
                torch.testing.assert_close(
                    after[name][k, b], alpha[0] * values[name][0, b] + alpha[1] * values[name][2, b]
                )
    for name, value in values.items():
        who = [0, 2] if name in own(values) else [0, 1, 2, 3]
        assert torch.equal(after[name][who], value[who])


def test_one_source_is_copied_and_a_twin_counts_most():
    values, tags = statistics(4)
    copied = propagated().exchange(values, tags, profiles("ST", "AT", "ST", "ST"))
    for name, value in own(values).items():
        assert torch.equal(copied[name], value[1].expand_as(value))
    clean = [t.clone() for n, t in values.items() if "clean" in n]
    for t in clean:
        t[3] = t[1]
    gives = torch.tensor([True, True, True, False])[:, None].expand(4, 2)
    alpha = propagated().weights(clean, gives)
    torch.testing.assert_close(alpha.sum(1), torch.ones(4, 2).double())
    assert (alpha[3].argmax(0) == 1).all() and (alpha[:, 3] == 0).all()
    uniform = propagated(temperature=inf).weights(clean, gives)
    torch.testing.assert_close(uniform[:, :3], torch.full((4, 3, 2), 1 / 3).double())


def test_clients_that_were_not_heard_give_nothing():
    values, tags = statistics(3)
    for counter in (t for n, t in values.items() if n.endswith(".batches")):
        counter[0] = 0  # nobody has trained this one yet
        counter[1, 1] = 0  # and of this one only the first base
    after = propagated().exchange(values, tags, profiles("AT", "AT", "ST"))
    for name, value in own(values).items():
        assert torch.equal(after[name][2, 0], value[1, 0])
        assert torch.equal(after[name][2, 1], value[2, 1])


@pytest.mark.parametrize("kinds", [("ST", "ST", "ST"), ("AT", "AT", "AT"), ("", "", "")])
def test_without_sources_or_targets_nothing_is_written(kinds):
    values, tags = statistics(3)
    after = propagated().exchange(values, tags, profiles(*kinds))
    assert all(torch.equal(after[name], value) for name, value in values.items())


def test_each_branch_is_written_by_its_own_norm():
    """The norm of the adversarial branch sees the clean statistics; what it does to them is left aside."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Doubled(type(local())):
        def exchange(self, reported, tags, clients):
            return {n: 2 * t for n, t in reported.items()}

    values, tags = statistics(2)
    after = dual(clean=local(), adversarial=Doubled()).exchange(values, tags, profiles("AT", "ST"))
    for name, value in values.items():
        assert torch.equal(after[name], 2 * value if ".adversarial." in name else value)


def test_private_clean_statistics_cannot_be_compared():
    with pytest.raises(HardyError, match="compares clients by their clean statistics, but 'Local' keeps these private"):
        dual(clean=local(), adversarial=propagated())
    assert dual(clean=local(), adversarial=propagated(temperature=inf)).adversarial.reads == set()
    assert "clean" in dual(adversarial=propagated()).adversarial.reads  # averaged ones are one and the same


# calibration


def one_net(norm=None, given=True):
    torch.manual_seed(0)
    norm = norm or dual(clean=local(statistics=Placement.REPORTED), adversarial=propagated())
    plan = papers.fedavg(norm=norm, objective=adversarial(branch="adversarial")).bind(net, (1, 8, 8))
    plan.model.double()
    draw = torch.Generator().manual_seed(3)
    start = {n: t.double() if t.is_floating_point() else t + given for n, t in plan.start.items()}
    for n in (n for n, tag in plan.tags.items() if given and tag.branch == "adversarial"):
        if start[n].is_floating_point():
            start[n] = torch.rand(start[n].shape, generator=draw, dtype=torch.float64) + 0.2
    x = torch.rand(6, 1, 8, 8, generator=draw, dtype=torch.float64)
    made = Net(plan.model, {n: start[n] for n in plan.trained}, {n: start[n] for n in plan.buffers})
    return made, Batch(x, torch.arange(6) % 3, torch.full((3,), 2.0)), torch.tensor(5)


def gradient(objective, made, given, key):
    return grad(lambda w: objective.loss(Net(made.model, w, made.buffers), {}, given, key))(made.trained)


def test_calibration_is_equation_five_and_leaves_the_frozen_branch_alone():
    made, given, key = one_net()
    before = dict(made.buffers)
    clean, frozen = (
        F.cross_entropy(Net(made.model, made.trained, made.buffers)(given.x, branch=b, statistics=s), given.y)
        for b, s in (("clean", "batch"), ("adversarial", "running"))
    )
    torch.testing.assert_close(pnc(weight=0.3).loss(made, {}, given, key), 0.7 * clean + 0.3 * frozen)
    for clip in (inf, 1e9):
        slower = pnc(weight=0.3, rate=0.5, clip=clip).loss(made, {}, given, key)
        torch.testing.assert_close(slower, 0.7 * clean + 0.15 * frozen)
    moved = {n for n in before if not torch.equal(before[n], made.buffers[n])}
    assert moved and all(".clean." in n for n in moved)


def test_the_second_gradient_is_clipped():
    """Algorithm 3: g = (1 − λ) ∂CE(BNc) + CLAMP(λ ∂CE(BNa)); the loss itself is reported as it is."""
    made, given, key = one_net()
    part = {w: gradient(pnc(weight=w), made, given, key) for w in (0.5, 1.0)}
    second = {n: 0.5 * g for n, g in part[1.0].items()}
    length = torch.stack([g.square().sum() for g in second.values()]).sum().sqrt()
    for clip in (0.1 * length.item(), 10 * length.item()):
        scale = min(1.0, clip / length.item())
        by_hand = {n: g - second[n] + scale * second[n] for n, g in part[0.5].items()}
        assert_close(gradient(pnc(clip=clip), made, given, key), by_hand, 1e-12)
        losses = (pnc(clip=c).loss(Net(made.model, made.trained, made.buffers), {}, given, key) for c in (clip, inf))
        torch.testing.assert_close(*losses)


def test_calibration_waits_for_statistics_and_for_its_warm_up():
    made, given, key = one_net(given=False)
    plain = gradient(cross_entropy(), made, given, key)
    for clip in (inf, 1.0):
        assert_close(gradient(pnc(clip=clip), made, given, key), plain, 1e-12)
    made, given, key = one_net()
    waiting = pnc(warm_up=3)
    assert_close(
        gradient(waiting.for_client("ST", 2), made, given, key), gradient(cross_entropy(), made, given, key), 0
    )
    assert waiting.for_client("ST", 3) == waiting and waiting.for_client("ST", 2).weight == 0


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_features_are_calibrated_through_averaged_statistics_too(engine):
    """Statistics that nobody counts, on rows that are no images."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(80, 6)).astype(np.float32)
    method = papers.fedrbn(attack=pgd(epsilon=0.3, step=0.1, steps=1)).replace(norm=dual(adversarial=batch()))
    short = ["rounds=1", "data.adversarial=0.5", f"engine.name={engine}", "evaluation.threats=[]"]
    y = (x[:, 0] > 0).astype(np.int64)
    run = hardy.fit("demo", short, method=method, model="mlp", data=(x[:60], y[:60], x[60:], y[60:]), quiet=True)
    assert {client.kind for client in run.engine.data.clients} == {"AT", "ST"}
    assert all(t.isfinite().all() for t in run.state.shared.values())


# the method


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_without_at_clients_it_is_fedbn(weight):
    data = of_kinds(*["ST"] * 4)
    run, plain = fit(papers.fedrbn(weight=weight), data=data), fit(papers.fedbn())
    assert_close(run.state.shared, plain.state.shared, 1e-12)
    assert_close(
        {n: {**run.engine.store, **run.state.reported}[n] for n in plain.engine.store}, plain.engine.store, 1e-12
    )


def test_mixed_kinds_agree_on_all_engines_and_resume_exactly(tmp_path):
    method = papers.fedrbn(attack=SHORT, clip=0.5, warm_up=1, dual_affine=True, noise=0.01)
    options = {"data": MIXED, "cohort": Cohort(fraction=0.75)}
    one, many = (fit(method, **options, **e) for e in ({}, {"engine": VECTORISED}))
    assert_close(everything(one), everything(many), 1e-9)
    half = tmp_path / "half"
    fit(method, out=half, **{**options, "rounds": 2})
    text = (half / "config.toml").read_text().replace("rounds = 2", "rounds = 4")
    (half / "config.toml").write_text(text)
    resumed = hardy.resume(half, method=with_momentum(method), model=net, data=MIXED, quiet=True)
    assert all(torch.equal(t, everything(resumed)[n]) for n, t in everything(one).items())


def test_st_clients_end_a_round_with_the_statistics_of_at_clients():
    run = fit(papers.fedrbn(attack=SHORT), data=of_kinds("ST", "AT", "ST", "ST"), rounds=2)
    tags = run.engine.plan.tags
    for name, value in run.state.reported.items():
        if tags[name].role is Role.COUNTER:
            assert (value > 0).all()  # all have been given statistics
        elif tags[name].branch == "adversarial":
            assert torch.equal(value, value[1].expand_as(value)) and value.abs().sum() > 0
        else:
            assert not torch.equal(value[0], value[1])


def test_affine_is_one_or_two_private_or_shared():
    for affine in (Placement.PRIVATE, Placement.SHARED):
        one = papers.fedrbn(affine=affine).bind(net, (1, 8, 8))
        two = papers.fedrbn(affine=affine, dual_affine=True).bind(net, (1, 8, 8))
        for plan, each in ((one, 1), (two, 2)):
            affines = [n for n, tag in plan.tags.items() if tag.role is Role.NORM_AFFINE]
            assert len(affines) == 4 * each and {plan.placement[n] for n in affines} == {affine}
    made, given, key = one_net(dual(dual_affine=True))
    found = gradient(cross_entropy(), made, given, key)
    used = {n for n, g in found.items() if g.abs().sum() > 0}
    assert "norm1.clean.weight" in used and "norm1.adversarial.weight" not in used


def test_an_adopted_network_gives_its_affine_to_both_branches():
    stock = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    torch.nn.init.uniform_(stock[0].weight)
    made = hardy.models.adopt(stock, dual(dual_affine=True).layer)
    for branch in (made[0].clean, made[0].adversarial):
        assert torch.equal(branch.weight, stock[0].weight) and torch.equal(branch.mean, stock[0].running_mean)


def test_noise_falls_on_the_statistics_only():
    """The deviation of what is kept is σ; the pass itself, and the gradient, are as without noise."""
    quiet, loud = (one_net(dual(clean=batch(noise=sigma)), given=False) for sigma in (0.0, 0.5))
    assert_close(*(gradient(cross_entropy(), *setting) for setting in (quiet, loud)), 0)
    drawn = []
    for seed in range(200):
        for setting in (quiet, loud):
            made, given, _ = setting
            here = Net(made.model, made.trained, made.buffers)
            here(given.x, statistics="batch", key=random.fold(torch.tensor(1), seed))
            drawn.append(here.buffers["norm1.clean.mean"])
    apart = torch.stack(drawn[1::2]) - torch.stack(drawn[::2])
    assert abs(apart.std().item() - 0.5) < 0.03 and abs(apart.mean().item()) < 0.05
    run = fit(papers.fedrbn(attack=SHORT, noise=5.0), rounds=1)
    assert all(t.min() >= 0 for n, t in run.state.reported.items() if n.endswith("var"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dual(clean=group()), "a branch of norm dual is 'Group', not a norm with one set of statistics"),
        (lambda: propagated(temperature=0.0), r"propagated temperature \(T\) is 0.0; it must be above 0"),
        (lambda: pnc(weight=1.5), r"pnc weight \(λ\) is 1.5; it must be in \[0, 1\]"),
        (lambda: pnc(clip=0.0), "it got 0.0, 0 and 1.0"),
        (lambda: fit(papers.fedavg(norm=group(), objective=pnc()), rounds=1), "but norm 'Group' keeps none"),
    ],
)
def test_bad_options_of_fedrbn_are_refused(make, message):
    with pytest.raises(HardyError, match=message):
        make()
