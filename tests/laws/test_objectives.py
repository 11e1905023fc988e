"""What must hold for every objective, whoever writes it."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from conftest import assert_close, everything, federation, fit, net, shortened
from hardy import papers
from hardy.attacks.gradient import pgd
from hardy.core.net import Net
from hardy.core.protocols import Batch
from hardy.core.training import Training
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.papers.oat import OnceForAll, conditional
from hardy.parts.adversarial import adversarial, by_kind, free, mart, trades
from hardy.parts.example_privacy import DpSgd
from hardy.parts.norms import batch, dual, group
from hardy.parts.objectives import cross_entropy, distilled, masked_cross_entropy, ramped
from hardy.registry import PARTS

SPECIAL = {
    "by_kind": lambda: by_kind(AT=adversarial(), ST=cross_entropy()),
    "ramped": lambda: ramped(inner=adversarial(), number="mix", start=0.2, last=2, levels=1),
}
VECTORISED = EngineChoice(name="vectorised", device="cpu", precision="float64", lane=3)


@pytest.fixture(params=sorted(PARTS["objective"]))
def objective(request):
    return SPECIAL.get(request.param, PARTS["objective"][request.param])()


def mixed_kinds():
    data = federation()
    kinds = ("AT", "ST", "AT", "ST")
    return dataclasses.replace(
        data, clients=tuple(dataclasses.replace(c, kind=k) for c, k in zip(data.clients, kinds, strict=True))
    )


def test_engines_agree(objective):
    norm = dual() if "adversarial" in objective.branches else batch()
    norm = conditional() if isinstance(objective, OnceForAll) else norm
    norm = group() if isinstance(objective, DpSgd) else norm
    method = papers.fedavg(norm=norm, objective=shortened(objective))
    data = mixed_kinds() if "kind" in objective.consumes else federation()
    options = {"data": data, "rounds": 2, "training": Training(rate=0.05, batch=4, replays=2)}
    one, many = fit(method, **options), fit(method, engine=VECTORISED, **options)
    assert_close(everything(one), everything(many), 1e-9)


def test_kinds_train_with_their_own_objective():
    """With nobody of kind AT, by_kind is its ST objective, and the other way round. Not told is AT."""
    both = by_kind(AT=adversarial(), ST=cross_entropy())
    data = mixed_kinds()
    for kind, alone in (("AT", adversarial()), ("ST", cross_entropy()), ("", adversarial())):
        same = dataclasses.replace(data, clients=tuple(dataclasses.replace(c, kind=kind) for c in data.clients))
        runs = (fit(papers.fedavg(objective=o), data=d, rounds=1) for o, d in ((both, same), (alone, federation())))
        assert_close(*(run.state.shared for run in runs), 0)


def one_net(norm):
    objective = adversarial(branch="adversarial") if "adversarial" in norm.branches else cross_entropy()
    plan = papers.fedavg(norm=norm, objective=objective).bind(net, (1, 8, 8))
    start = {n: t.double() if t.is_floating_point() else t for n, t in plan.start.items()}
    plan.model.double()
    made = Net(plan.model, {n: start[n] for n in plan.trained}, {n: start[n] for n in plan.buffers})
    x = torch.rand(6, 1, 8, 8, dtype=torch.float64)
    return made, Batch(x, torch.arange(6) % 3, torch.full((3,), 2.0, dtype=x.dtype)), torch.tensor(5)


def test_branches_keep_their_own_statistics():
    """Clean images move the clean statistics only, attacked ones the adversarial only, the attack none."""
    made, given, key = one_net(dual())
    before = dict(made.buffers)
    cross_entropy().loss(made, {}, given, key)
    moved = {n for n in before if not torch.equal(before[n], made.buffers[n])}
    assert moved and all(".clean." in n for n in moved)
    made.buffers = dict(before)
    adversarial(mix=1.0, branch="adversarial").loss(made, {}, given, key)
    moved = {n for n in before if not torch.equal(before[n], made.buffers[n])}
    assert moved and all(".adversarial." in n for n in moved)
    made.buffers = dict(before)
    adversarial(branch="adversarial").craft(made, given, key)
    assert all(made.buffers[n] is before[n] for n in before)


def test_an_objective_without_its_branch_is_refused():
    with pytest.raises(HardyError, match="branch 'adversarial', but norm 'BatchNormalisation' keeps only clean"):
        papers.fedavg(norm=batch(), objective=adversarial(branch="adversarial")).bind(net, (1, 8, 8))


def test_without_a_budget_the_attack_changes_nothing():
    """At ε = 0 adversarial training sees the clean batch twice, TRADES has no KL, MART is its boosted CE."""
    made, given, key = one_net(batch())
    none = pgd(epsilon=0.0, steps=1)
    logits = made(given.x, statistics="batch")
    clean = F.cross_entropy(logits, given.y)
    torch.testing.assert_close(adversarial(attack=none).loss(made, {}, given, key), clean)
    torch.testing.assert_close(trades(attack=none).loss(made, {}, given, key), clean)
    p = logits.softmax(-1)
    rival = p.masked_fill(F.one_hot(given.y, 3).bool(), 0).amax(-1)
    torch.testing.assert_close(mart(attack=none).loss(made, {}, given, key), clean - (1.0001 - rival).log().mean())


def test_absent_classes_get_no_gradient():
    made, given, key = one_net(batch())
    two = given._replace(y=given.y % 2)

    def bias_gradient(objective):
        bias = next(n for n in reversed(made.trained) if n.endswith("bias"))

        def loss(value):
            return objective.loss(Net(made.model, {**made.trained, bias: value}, made.buffers), {}, two, key)

        return torch.func.grad(loss)(made.trained[bias])

    assert bias_gradient(masked_cross_entropy())[2] == 0
    assert bias_gradient(masked_cross_entropy(as_published=True))[2] == 0
    assert bias_gradient(cross_entropy())[2] != 0


def test_free_change_stays_in_its_ball():
    run = fit(papers.fedavg(objective=free(epsilon=0.1)), training=Training(batch=4, replays=3), rounds=2)
    change = run.engine.store["free.change"]
    assert 0 < change.abs().max() <= 0.1


def test_a_number_moves_from_round_to_round():
    inner = by_kind(AT=adversarial(mix=1.0), ST=cross_entropy(label_smoothing=0.1))
    moving = ramped(inner=inner, number="AT.mix", start=0.5, first=2, last=6, levels=2)
    assert [moving.for_client("AT", at).mix for at in range(7)] == [0.5, 0.5, 0.5, 0.75, 0.75, 1.0, 1.0]
    assert moving.for_client("ST", 0) == inner.ST and moving.alone() == inner
    radius = ramped(inner=adversarial(), number="attack.epsilon", last=2)
    assert radius.for_client("", 0).attack == pgd(epsilon=0.0) and radius.for_client("", 1) == adversarial()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ramped(inner=cross_entropy(), number="mix", last=3), "has no such number"),
        (lambda: ramped(inner=adversarial(), number="attack", last=3), "has no such number"),
        (lambda: ramped(inner=adversarial(), number="mix", start=0.5, last=3), "no effect"),
        (lambda: ramped(inner=adversarial(), number="mix", start=0.0, last=3), "it must be in"),
        (lambda: ramped(inner=adversarial(), number="mix", start=0.1, last=1), "1 <= first < last"),
        (lambda: distilled(strength=0.0), "above 0"),
    ],
)
def test_objectives_that_would_not_work_are_refused(make, words):
    with pytest.raises(HardyError, match=words):
        make()


def test_distillation_holds_to_what_was_received():
    """Nothing at the weights received; elsewhere softmax(own / T) − softmax(received / T), times strength · T, per
    image: the gradient of a KL to the logits, which the last bias adds to."""
    made, given, key = one_net(batch())
    bias = next(n for n in reversed(made.trained) if n.endswith("bias"))
    plain = cross_entropy().gradient(cross_entropy(), made, {}, given, key, made.trained)
    wrapped = distilled(strength=0.5, temperature=2.0)
    kept = wrapped.gradient(wrapped, made, {}, given, key, made.trained)
    assert_close(kept.gradient, plain.gradient, 1e-12)
    received = {**made.trained, bias: made.trained[bias] + torch.tensor([1.0, -1.0, 0.5])}
    buffers = dict(made.buffers)
    logits = made(given.x)
    apart = (logits / 2).softmax(-1) - ((logits + received[bias] - made.trained[bias]) / 2).softmax(-1)
    found = wrapped.gradient(wrapped, made, {}, given, key, received)
    torch.testing.assert_close(found.gradient[bias], plain_bias(made, buffers, given, key, bias) + apart.mean(0))
    torch.testing.assert_close(found.loss, plain.loss)


def plain_bias(made, buffers, given, key, bias):
    fresh = Net(made.model, made.trained, buffers)
    return cross_entropy().gradient(cross_entropy(), fresh, {}, given, key, made.trained).gradient[bias]
