"""Federated BatchNorm equals BatchNorm of one machine that sees all batches."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hardy
from hardy.core.federation import Client, Federation
from hardy.core.messages import Slot, Updates
from hardy.core.protocols import RoundContext
from hardy.engines import EngineChoice
from hardy.papers.fbn import federated
from hardy.parts.aggregators.base import mean
from hardy.registry import PARTS

SIZES = (20, 20, 20)


def federation(sizes=SIZES):
    """Clients whose images differ in brightness: the means of their batches lie apart."""
    rng = np.random.default_rng(0)
    total = sum(sizes)
    x, y = rng.integers(0, 100, (total, 3, 8, 8), dtype=np.uint8), rng.integers(0, 4, total)
    bounds = np.cumsum((0, *sizes))
    rows = [np.arange(a, b) for a, b in pairwise(bounds)]
    for number, r in enumerate(rows):
        x[r] += np.uint8(50 * number)
    clients = tuple(Client(domain="d", train=r, validation=r[:0], test=r[:2]) for r in rows)
    return Federation(name="toy", classes=tuple("abcd"), x_train=x, y_train=y, x_test=x, y_test=y, clients=clients)


def net(norm):
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), norm(5), nn.ReLU(), nn.Flatten(), nn.Linear(180, 6), norm(6), nn.Linear(6, 4)
    )


def experiment(rounds=1, engine="vectorised", batch=20, **training):
    chosen = hardy.Training(**{"batch": batch, "rate": 0.1, "steps": 1, **training})
    return hardy.Experiment(rounds=rounds, training=chosen, engine=EngineChoice(name=engine, precision="float64"))


def run(method, **options):
    sizes = options.pop("sizes", SIZES)
    return hardy.fit(experiment(**options), method=method, model=net, data=federation(sizes), quiet=True)


class Central(nn.Module):
    """BatchNorm on one machine that normalises by its running statistics before it moves them."""

    def __init__(self, features):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("var", torch.ones(features))

    def forward(self, x):
        out = F.batch_norm(x, self.mean, self.var, self.weight, self.bias, False, 0.0, 1e-5)
        over = [axis for axis in range(x.dim()) if axis != 1]
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(over)
        self.var = 0.9 * self.var + 0.1 * x.detach().var(over, correction=1)
        return out


@pytest.mark.parametrize("sizes", [SIZES, (20, 8, 13)], ids=["equal", "unequal"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_training_equals_one_machine_on_the_pooled_batches(engine, sizes):
    """Statistics and weights, after one step and after many; unequal batches are weighted by their size."""
    rounds, rule = 12, mean(weigh="samples")
    made = run(hardy.papers.fbn(momentum=0.9, aggregator=rule), engine=engine, rounds=rounds, sizes=sizes)
    data = federation(sizes)
    assert_one_machine(made, data.x_train, data.y_train, rounds)


def test_batches_weigh_by_what_they_saw_and_not_by_what_clients_hold():
    """A client of 60 equal rows shows 20 a step, one of 8 all: as one machine with 20 rows and the other's 8."""
    data = federation((60, 8))
    for client in data.clients:
        data.x_train[client.train], data.y_train[client.train] = data.x_train[client.train[0]], client.train[0] % 4
    method = hardy.papers.fbn(momentum=0.9, aggregator=mean(weigh="seen"))
    made = hardy.fit(experiment(rounds=3), method=method, model=net, data=data, quiet=True)
    assert_one_machine(made, data.x_train[40:], data.y_train[40:], 3)


def assert_one_machine(made, images, labels, rounds):
    torch.manual_seed(0)
    central = net(Central).double()
    momenta = [torch.zeros_like(w) for w in central.parameters()]
    x, y = torch.from_numpy(images).double() / 255, torch.from_numpy(labels)
    for _ in range(rounds):  # every client shows all its rows in each batch, so their order is of no account
        gradients = torch.autograd.grad(F.cross_entropy(central(x), y), list(central.parameters()))
        for w, m, g in zip(central.parameters(), momenta, gradients, strict=True):
            m.mul_(0.9).add_(0.1 * g)
            w.data -= 0.1 * m
    shared = made.state.shared
    for ours, theirs in (("1.clean.mean", "1.mean"), ("1.clean.var", "1.var"), ("5.clean.var", "5.var")):
        torch.testing.assert_close(shared[ours][0], central.state_dict()[theirs], rtol=0, atol=1e-12)
    for name, w in central.named_parameters():
        torch.testing.assert_close(shared[name][0], w.detach(), rtol=0, atol=1e-9)


def test_plain_averages_are_biased_where_clients_differ():
    """What the correction is for: the same statistics without it fall short."""
    norms = federated(), PARTS["norm"]["batch"]()
    exact, naive = (run(hardy.papers.dsgd(norm=n), rounds=60, rate=0.0).state.shared["1.clean.var"] for n in norms)
    assert (naive < 0.95 * exact).any() and (naive < exact).all()


def test_several_steps_pool_all_batches_of_the_round():
    """One full batch and the same rows in four steps give the same statistics while the weights stand still."""
    methods = [hardy.papers.fedavg(norm=federated()) for _ in range(2)]
    whole = run(methods[0], rate=0.0, rounds=3).state.shared
    parts = run(methods[1], rate=0.0, rounds=3, batch=5, steps=None, epochs=1).state.shared
    for name in ("1.clean.mean", "1.clean.var", "5.clean.mean", "5.clean.var"):
        torch.testing.assert_close(whole[name], parts[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("spread", ["rule", "mean"])
@pytest.mark.parametrize("name", ["mean", "coordinate_median", "trimmed_mean", "krum"])
def test_variances_stay_positive_whatever_a_client_sends(name, spread):
    rule = PARTS["aggregator"][name](**({"f": 1} if name in ("trimmed_mean", "krum") else {}))
    method = hardy.papers.fbn(aggregator=rule).replace(norm=federated(spread=spread))
    plan = method.bind(net, (3, 8, 8))
    shared = {n: t[None].clone() for n, t in plan.start.items() if not n.startswith("m.")}
    context = RoundContext(shared=shared, roles=plan.roles, bases=1, clients=7)
    memory = plan.aggregator.memory(context)
    sent = {n: t.expand(7, *t.shape[1:]).clone() for n, t in shared.items()}
    for n, t in sent.items():
        t[:1] = -1e6 if n.endswith("var") else 1e3
    ones = torch.ones(7)
    updates = Updates(slots=[Slot(i) for i in range(7)], shared=sent, reported={}, weights=ones, steps=ones, loss=ones)
    after, _ = plan.aggregator.finish(plan.aggregator.fold(None, updates, context), context, memory)
    assert all((t > 0).all() for n, t in after.items() if n.endswith("var"))
    if name != "mean" and spread == "rule":
        assert all((t < 2).all() for n, t in after.items() if n.endswith("var"))


def test_fixbn_stops_the_statistics_and_goes_on_training():
    at_switch, later = (run(hardy.papers.fixbn(after=3), rounds=n).state.shared for n in (3, 6))
    for name in ("1.clean.mean", "1.clean.var"):  # up to the rounding of a mean of equal values
        torch.testing.assert_close(at_switch[name], later[name], rtol=1e-14, atol=0)
    assert not torch.equal(at_switch["0.weight"], later["0.weight"])
    before = run(hardy.papers.fixbn(after=100), rounds=2).state.shared
    assert not torch.equal(before["1.clean.mean"], at_switch["1.clean.mean"])


def test_dsgd_keeps_its_momentum_from_round_to_round():
    still, moved = (run(hardy.papers.dsgd(momentum=m), rounds=2).engine.store for m in (0.0, 0.9))
    assert all(not torch.equal(still[n], moved[n]) for n in still)


@pytest.mark.parametrize("wrong", [0.0, 1.5])
def test_momentum_outside_its_range_is_refused(wrong):
    with pytest.raises(hardy.HardyError, match="momentum"):
        replace(federated(), momentum=wrong)


def test_a_dual_norm_of_two_federated_branches_is_exact_too():
    """Clean and attacked images have statistics of their own, each pooled with its own momentum."""
    norm = PARTS["norm"]["dual"](clean=federated(momentum=0.3), adversarial=federated())
    both = run(hardy.papers.fatavg_dbn().replace(norm=norm), rounds=2, rate=0.0).state.shared
    one = run(hardy.papers.fedavg(norm=federated(momentum=0.3)), rounds=2, rate=0.0).state.shared
    torch.testing.assert_close(both["1.clean.var"], one["1.clean.var"], rtol=0, atol=1e-12)
    assert not torch.equal(both["1.adversarial.mean"], both["1.clean.mean"])
    assert not both["1.clean.count"].any() and not both["1.adversarial.count"].any()  # each branch has been pooled
