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
from hardy.parts.objectives import cross_entropy, masked_cross_entropy
from hardy.registry import PARTS

SPECIAL = {"by_kind": lambda: by_kind(AT=adversarial(), ST=cross_entropy())}
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
    return made, Batch(x, torch.arange(6) % 3), torch.tensor(5)


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
    two = Batch(given.x, given.y % 2)

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
