"""Calibrated, reweighted, contrasted and distilled training against formulas written out in plain torch and numpy."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.func import functional_call

from conftest import assert_close, everything, federation, fit, shortened
from hardy import papers
from hardy.attacks.gradient import fgsm, pgd
from hardy.core import random
from hardy.core.cohort import Cohort
from hardy.core.net import Net
from hardy.core.protocols import Batch
from hardy.core.training import Training
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.models import mlp
from hardy.papers.calfat import prior_calibrated
from hardy.papers.dbfat import boundary_aware
from hardy.papers.fedlc import margin_calibrated
from hardy.papers.gairat import geometry_aware
from hardy.papers.moon import contrastive
from hardy.papers.sfat import slack
from hardy.parts.adversarial import adversarial, by_kind, mart, trades
from hardy.parts.aggregators.base import pipeline
from hardy.parts.example_privacy import dp_sgd
from hardy.parts.norms import absent, dual
from hardy.parts.objectives import cross_entropy, distilled

SHAPE = (1, 4, 4)
COUNTS = torch.tensor([90.0, 7.0, 0.0], dtype=torch.float64)
KEY = torch.tensor(5)
RADIUS, STEP = 0.15, 0.03


def perceptron(norm):
    return mlp(hidden=(6,), norm=norm, classes=3, shape=SHAPE, scale=None)


class Case:
    """A small network, one that was sent, one of the round before, and a batch of eight."""

    def __init__(self, seed=0):
        draw = torch.Generator().manual_seed(seed)
        plan = papers.fedavg(norm=absent()).bind(perceptron, SHAPE)
        self.model = plan.model.double()

        def weights():
            return {n: torch.randn(plan.start[n].shape, generator=draw, dtype=torch.float64) for n in plan.trained}

        self.own, self.sent, self.last = weights(), weights(), weights()
        self.x = torch.rand(8, *SHAPE, generator=draw, dtype=torch.float64)
        guessed = self.logits(self.own, self.x).argmax(-1)
        self.y = torch.cat([guessed[:7], (guessed[7:] + 1) % 3])  # the last one is wrong from the start
        self.batch = Batch(self.x, self.y, COUNTS)

    def net(self):
        return Net(self.model, dict(self.own), {})

    def logits(self, weights, x):
        return functional_call(self.model, weights, x)

    def features(self, weights, x):
        """What the last layer is given, by hand."""
        first = next(n for n in weights if n.endswith("hidden1.fc.weight"))
        return torch.relu(x.flatten(1) @ weights[first].T + weights[first.replace("weight", "bias")])

    def step(self, objective, private=None):
        """What a step finds: loss and gradient."""
        return objective.gradient(objective, self.net(), private or {}, self.batch, KEY, self.sent)

    def check(self, objective, loss, added=None, private=None):
        """Loss and gradient are those of functions of the weights; `added` is minimised and not reported."""
        own = {n: w.clone().requires_grad_() for n, w in self.own.items()}
        total = loss(own)
        found = self.step(objective, private)
        torch.testing.assert_close(found.loss, total.detach(), rtol=1e-10, atol=1e-10)
        whole = total if added is None else total + added(own)
        expected = dict(zip(own, torch.autograd.grad(whole, list(own.values())), strict=True))
        assert_close(found.gradient, expected, 1e-10)


@pytest.fixture
def case():
    return Case()


def log_softmax(z):
    return z - torch.log(torch.exp(z).sum(-1, keepdim=True))


def kl(p, q):
    """KL(softmax(p) ‖ softmax(q)), [N]."""
    a, b = log_softmax(p), log_softmax(q)
    return (a.exp() * (a - b)).sum(-1)


def ce(z, y):
    return -log_softmax(z)[torch.arange(len(y)), y]


def climb(case, steps, offset, start, gain):
    """PGD by hand on logits moved by an offset: the attacked images, and how often each was still right."""
    x, y, key = case.x, case.y, random.fold(random.fold(KEY, "attack"), 0)
    noise = random.normal(key, x.shape, x.dtype) * 0.001
    uniform = (2 * random.uniform(key, x.shape, x.dtype) - 1) * RADIUS

    def clip(z):
        return torch.minimum(torch.maximum(z, x - RADIUS), x + RADIUS).clamp(0, 1)

    z, right = clip(x + (noise if start == "normal" else uniform)), torch.zeros(len(x), dtype=torch.float64)
    for _ in range(steps):
        z = z.detach().requires_grad_()
        out = case.logits(case.own, z) + offset
        right += out.argmax(-1) == y
        clean = (case.logits(case.own, x) + offset).detach()
        (slope,) = torch.autograd.grad((kl(clean, out) if gain == "kl" else ce(out, y)).sum(), z)
        z = clip(z.detach() + STEP * slope.sign())
    return z.detach(), right


def ladder(steps=6, **options):
    return pgd(epsilon=RADIUS, step=STEP, steps=steps, **options)


def margins(strength=1.0):
    """−τ n^(−1/4), in numpy."""
    return torch.from_numpy(-strength * np.maximum(COUNTS.numpy(), 1e-8) ** -0.25)


def priors(strength=1.0):
    """log π, in numpy."""
    n = COUNTS.numpy() + 1e-7
    return torch.from_numpy(strength * (np.log(n) - math.log(COUNTS.sum().item())))


# FedLC and CalFAT


def test_fedlc_is_its_formula(case):
    strength = 0.7
    case.check(
        margin_calibrated(strength=strength),
        lambda w: ce(case.logits(w, case.x) + margins(strength), case.y).mean(),
    )


def test_calfat_is_its_formulas(case):
    """The attack climbs the calibrated divergence, the loss is the calibrated cross-entropy of what it finds."""
    (calibrated,) = (papers.calfat(attack=ladder(loss="kl", start="normal")).objective.for_client("AT", 0),)
    attacked, _ = climb(case, 6, priors(), "normal", "kl")
    plain, _ = climb(case, 6, torch.zeros(3), "normal", "kl")
    assert not torch.equal(attacked, plain)
    case.check(calibrated, lambda w: ce(case.logits(w, attacked) + priors(), case.y).mean())


def parts_of(kind, z, robust, y):
    """What clean and attacked images cost, [N] each."""
    if kind == "pgd":
        return 0 * ce(z, y), ce(robust, y)
    if kind == "mix":
        return 0.7 * ce(z, y), 0.3 * ce(robust, y)
    if kind == "trades":
        return ce(z, y), 6.0 * kl(z, robust)
    p, own = log_softmax(robust).exp(), torch.arange(len(y))
    rival = p.clone()
    rival[own, y] = 0
    boosted = ce(robust, y) - torch.log(1.0001 - rival.max(-1).values)
    return 0 * boosted, boosted + 6.0 * kl(z, robust) * (1.0000001 - log_softmax(z).exp()[own, y])


TRAININGS = {
    "pgd": lambda: adversarial(attack=ladder(), mix=1.0),
    "mix": lambda: adversarial(attack=ladder(), mix=0.3),
    "trades": lambda: trades(attack=ladder(loss="kl", start="normal")),
    "mart": lambda: mart(attack=ladder(start="normal")),
}


@pytest.mark.parametrize("kind", TRAININGS)
@pytest.mark.parametrize(("around", "offset"), [(prior_calibrated, priors), (margin_calibrated, margins)])
def test_calibration_goes_around_every_adversarial_training(case, kind, around, offset):
    gain, start = ("kl" if kind == "trades" else "ce"), ("normal" if kind in ("trades", "mart") else "uniform")
    attacked, _ = climb(case, 6, offset(), start, gain)

    def loss(w):
        parts = parts_of(kind, case.logits(w, case.x) + offset(), case.logits(w, attacked) + offset(), case.y)
        return torch.stack(parts).sum(0).mean()

    case.check(around(inner=TRAININGS[kind]()), loss)


@pytest.mark.parametrize("make", [prior_calibrated, margin_calibrated])
def test_equal_label_counts_calibrate_nothing(case, make):
    """A constant on all logits: loss, attack and gradient are those of the inner objective."""
    case.batch = case.batch._replace(label_counts=torch.full((3,), 30.0, dtype=torch.float64))
    for inner in (cross_entropy(), trades(attack=ladder(loss="kl", start="normal"))):
        one, other = case.step(make(inner=inner)), case.step(inner)
        torch.testing.assert_close(one.loss, other.loss, rtol=1e-12, atol=1e-12)
        assert_close(one.gradient, other.gradient, 1e-12)


# FedGAIRAT and DBFAT


def weighted(weights, kind, z, robust, y):
    clean, attacked = parts_of(kind, z, robust, y)
    return (clean + weights / weights.mean() * attacked).mean()


@pytest.mark.parametrize("kind", TRAININGS)
def test_gairat_is_its_formula(case, kind):
    gain, start = ("kl" if kind == "trades" else "ce"), ("normal" if kind in ("trades", "mart") else "uniform")
    attacked, right = climb(case, 6, torch.zeros(3), start, gain)
    assert len(set(right.tolist())) > 2  # images do differ
    omega = torch.from_numpy((1 + np.tanh(-1 + 5 * (1 - 2 * right.numpy() / 6))) / 2)
    case.check(
        geometry_aware(inner=TRAININGS[kind]()),
        lambda w: weighted(omega, kind, case.logits(w, case.x), case.logits(w, attacked), case.y),
    )


@pytest.mark.parametrize("kind", TRAININGS)
def test_dbfat_is_its_formula(case, kind):
    gain, start = ("kl" if kind == "trades" else "ce"), ("normal" if kind in ("trades", "mart") else "uniform")
    attacked, right = climb(case, 6, torch.zeros(3), start, gain)
    rho = 1 - 0.8 * right / 6

    def loss(w):
        robust = case.logits(w, attacked)
        taught = case.logits(case.sent, case.x)
        return weighted(rho, kind, case.logits(w, case.x), robust, case.y) + 1.5 * kl(taught, robust).mean()

    case.check(boundary_aware(inner=TRAININGS[kind](), spread=0.8, strength=1.5), loss)


@pytest.mark.parametrize("kind", TRAININGS)
def test_equal_weights_are_plain_adversarial_training(case, kind):
    inner = TRAININGS[kind]()
    plain = case.step(inner)
    for same in (geometry_aware(inner=inner, shift=60.0), boundary_aware(inner=inner, spread=0.0, strength=0.0)):
        found = case.step(same)
        torch.testing.assert_close(found.loss, plain.loss, rtol=1e-12, atol=1e-12)
        assert_close(found.gradient, plain.gradient, 1e-12)


def test_steps_are_counted_until_an_image_falls():
    """An image that is wrong at once counts 0, one that no step fools counts them all; of restarts the fewest."""
    x, y = torch.tensor([[0.5], [0.5], [0.5]]), torch.tensor([0, 1, 0])

    def forward(z):  # the class is 1 above a bar of the image's own
        bar = torch.tensor([[0.55], [0.0], [2.0]])
        return torch.cat([bar - z, z - bar], 1)

    for restarts in (1, 3):
        attack = pgd(epsilon=0.1, step=0.02, steps=5, start="none", restarts=restarts)
        _, held = attack.climb(forward, x, y, KEY)
        assert held.tolist() == [3.0, 5.0, 5.0]
        assert pgd(epsilon=0.1, step=0.02, steps=5, start="none").climb(forward, x, 1 - y, KEY)[1][0] == 0


def test_gairat_warms_up():
    weighing = geometry_aware(inner=adversarial(mix=1.0), warm_up=3)
    assert weighing.for_client("AT", 2) == weighing.inner and weighing.for_client("AT", 3) == weighing


# MOON and FedGKD


def previous(case, rounds):
    return {f"previous.{n}": w for n, w in case.last.items()} | {"contrast.rounds": torch.tensor(rounds)}


@pytest.mark.parametrize("rounds", [0, 3])
def test_moon_is_its_formula(case, rounds):
    """In the first round there is no contrast."""

    def alike(w, other):
        a, b = case.features(w, case.x), case.features(other, case.x)
        return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)) / 0.5

    def contrast(w):
        near, far = alike(w, case.sent), alike(w, case.last)
        return 2.0 * (rounds > 0) * -torch.log(near.exp() / (near.exp() + far.exp())).mean()

    case.check(
        contrastive(strength=2.0, temperature=0.5),
        lambda w: ce(case.logits(w, case.x), case.y).mean(),
        contrast,
        previous(case, rounds),
    )


def test_fedgkd_is_its_formula(case):
    objective = papers.fedgkd(strength=0.4, temperature=2.0).objective
    case.check(
        objective,
        lambda w: ce(case.logits(w, case.x), case.y).mean(),
        lambda w: 0.2 * 4 * kl(case.logits(case.sent, case.x) / 2, case.logits(w, case.x) / 2).mean(),
    )


def test_moon_without_strength_is_fedavg():
    one, other = fit(papers.moon(strength=0.0)), fit(papers.fedavg())
    assert_close(one.state.shared, other.state.shared, 0)


def test_moon_keeps_the_network_of_its_last_round():
    """A client that was asked holds what it sent last; one that never was holds the first network, and no rounds."""
    run = fit(papers.moon(), rounds=3, cohort=Cohort(fraction=0.5))
    rounds = run.engine.store["contrast.rounds"][:, 0]
    assert rounds.sum() == 6
    alone = fit(papers.moon(), rounds=1)
    plan = alone.engine.plan
    for name in plan.model_names:
        held, first = alone.engine.store[f"previous.{name}"], plan.start[name].to(alone.state.shared[name].dtype)
        mean = (held[:, 0] * torch.tensor([10.0, 7, 12, 5]).view(-1, *[1] * first.dim())).sum(0) / 34
        torch.testing.assert_close(alone.state.shared[name][0], mean)  # what was averaged is what was kept


# Combinations


COMBINED = {
    "calfat, trades, dual": lambda: papers.fedavg(
        norm=dual(), objective=prior_calibrated(inner=trades(branch="adversarial"))
    ),
    "fedlc, gairat, mart": lambda: papers.fedlc(objective=geometry_aware(inner=mart())),
    "moon, dbfat, trades, dual": lambda: papers.moon(
        norm=dual(), objective=boundary_aware(inner=trades(branch="adversarial"))
    ),
    "fedgkd, calfat, by_kind": lambda: papers.fedgkd(
        objective=prior_calibrated(inner=by_kind(AT=geometry_aware(), ST=cross_entropy()))
    ),
    "slack, moon, fedlc": lambda: papers.moon(
        objective=margin_calibrated(inner=by_kind(AT=boundary_aware(), ST=cross_entropy()))
    ).replace(aggregator=pipeline(pre=(slack(),))),
    "fedrbn, calfat": lambda: papers.fedrbn().replace(objective=prior_calibrated(inner=papers.fedrbn().objective)),
    "dbfat in heterofl": lambda: papers.heterofl(objective=boundary_aware()),
    "meta, fedlc": lambda: papers.per_fedavg(objective=margin_calibrated()),
    "fedlc, meta": lambda: papers.fedlc(objective=papers.per_fedavg().objective),
}


@pytest.mark.parametrize("name", COMBINED)
def test_combinations_train_alike_on_all_engines(name):
    method, data = shortened(COMBINED[name]()), federation()
    kinds = any("kind" in part.consumes for part in method.parts())
    capacity = any("capacity" in part.consumes for part in method.parts())
    clients = tuple(
        dataclasses.replace(
            c, kind=("AT", "ST")[at % 2] if kinds else "", capacity=(1.0, 0.5)[at % 2] if capacity else 1.0
        )
        for at, c in enumerate(data.clients)
    )
    options = {
        "data": dataclasses.replace(data, clients=clients),
        "rounds": 2,
        "training": Training(rate=0.05, batch=4),
    }
    many = EngineChoice(name="vectorised", device="cpu", precision="float64", lane=3)
    one, other = fit(method, **options), fit(method, engine=many, **options)
    assert_close(everything(one), everything(other), 1e-9)
    assert all(t.isfinite().all() for t in everything(one).values() if t.is_floating_point())


def test_calibration_reaches_what_meta_moves(case):
    """fedlc around meta and meta around fedlc are the same: both steps are calibrated."""
    inside, outside = (
        papers.per_fedavg(objective=margin_calibrated()).objective,
        margin_calibrated(inner=papers.per_fedavg().objective),
    )
    one, other = case.step(inside), case.step(outside)
    assert_close(one.gradient, other.gradient, 1e-12)
    plain = case.step(papers.per_fedavg().objective)
    assert any(not torch.allclose(one.gradient[n], plain.gradient[n]) for n in one.gradient)


def test_clients_are_calibrated_by_their_own_rows():
    """Two clients of one class each: with FedLC neither unlearns the other's, since only one class is left in its
    softmax."""
    data = federation(sizes=(12, 12))
    y = data.y_train.copy()
    for label, client in enumerate(data.clients):
        y[client.train] = label
    options = {"data": dataclasses.replace(data, y_train=y), "rounds": 1, "training": Training(rate=0.1, batch=4)}
    for method, still in ((papers.fedlc(), True), (papers.fedavg(), False)):
        run = fit(method, **options)
        assert run.engine.label_counts([0, 1]).tolist() == [[12, 0, 0], [0, 12, 0]]
        moved = run.state.shared["fc.bias"][0] - run.server.start().shared["fc.bias"][0]
        assert (moved.abs().max() < 1e-9) == still


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fit(papers.centralised(objective=margin_calibrated())), "pools all rows"),
        (lambda: fit(papers.fedlc(objective=prior_calibrated())), "calibrates twice"),
        (lambda: papers.fedlc(strength=0.0), "no effect"),
        (lambda: papers.calfat(strength=0.0), "no effect"),
        (lambda: geometry_aware(inner=cross_entropy()), "counts the steps of an attack"),
        (lambda: geometry_aware(inner=adversarial(attack=fgsm())), "counts the steps of an attack"),
        (lambda: boundary_aware(inner=margin_calibrated(inner=adversarial())), "goes around it"),
        (lambda: geometry_aware(shift=math.inf), "all weights are the same"),
        (lambda: boundary_aware(spread=1.0), r"in \[0, 1\)"),
        (lambda: contrastive(temperature=0.0), "above 0"),
        (lambda: fit(papers.heterofl(objective=contrastive())), "compares whole networks"),
        (lambda: fit(papers.heterofl(objective=distilled())), "compares whole networks"),
        (lambda: fit(papers.fedavg(norm=absent(), objective=dp_sgd(inner=margin_calibrated()))), "several examples"),
        (lambda: fit(papers.fedavg(norm=absent(), objective=dp_sgd(inner=geometry_aware()))), "several examples"),
        (lambda: fit(papers.moon(norm=absent(), objective=dp_sgd())), "neither clipped nor covered"),
        (lambda: fit(papers.fedgkd(norm=absent(), objective=dp_sgd())), "neither clipped nor covered"),
    ],
)
def test_what_would_not_work_is_refused(make, words):
    with pytest.raises(HardyError, match=words):
        make()


def test_dp_sgd_goes_around_what_adds_rows():
    """Inside, the added term is clipped with the rest; and a penalty on weights alone may stand outside."""
    inside = papers.fedprox(norm=absent(), objective=dp_sgd(inner=distilled(), delta=1e-3))
    fit(inside, rounds=1)


def test_the_representation_is_what_the_classifier_is_given():
    """Of every network: the classifier of the features is the network."""
    from hardy.models import nin, resnet18, tiny_cnn, tiny_vit

    for build, size in ((tiny_cnn, 8), (resnet18, 8), (tiny_vit, 8), (nin, 8)):
        plan = papers.fedavg().bind(
            lambda norm, b=build: b(norm=norm, shape=(3, 8, 8), classes=3, width=0.25), (3, 8, 8)
        )
        start = {n: plan.start[n] for n in plan.trained}
        made = Net(plan.model, start, {n: plan.start[n] for n in plan.buffers})
        x = torch.rand(2, 3, size, size)
        features = made.features(x)
        path = vars(plan.model)["classifier"]
        layer = plan.model.get_submodule(path)
        weight, bias = start[f"{path}.weight"], start[f"{path}.bias"]
        if isinstance(layer, torch.nn.Conv2d):
            side = math.isqrt(features.shape[1] // weight.shape[1])
            out = torch.nn.functional.conv2d(features.view(2, -1, side, side), weight, bias).mean((2, 3))
        else:
            out = features @ weight.T + bias
        torch.testing.assert_close(out, made(x))
