"""Server optimisers by hand and beside BatchNorm; the average of the weights that is served."""

import pytest
import torch

import hardy
from conftest import assert_close, federation, fit, net, shortened
from hardy import papers
from hardy.core.partition import Role
from hardy.errors import HardyError
from hardy.parts.aggregators.base import by_role, mean, pipeline
from hardy.parts.aggregators.server_updates import (
    server_adagrad,
    server_adam,
    server_momentum,
    server_yogi,
    weight_average,
)
from hardy.parts.norms import batch
from hardy.registry import PARTS

OPTIMISERS = [server_momentum(), server_adam(), server_yogi(), server_adagrad()]


def step(update, memory, before, after):
    shared, memory = update.apply({"w": torch.tensor([before])}, {"w": torch.tensor([after])}, memory)
    return float(shared["w"]), memory


def test_momentum_by_hand():
    update = server_momentum(rate=1.0, momentum=0.9)
    x, memory = step(update, {"v.w": torch.tensor([1.0])}, 1.0, 1.5)
    assert x == pytest.approx(2.4)
    x, _ = step(update, memory, x, x - 1.0)
    assert x == pytest.approx(2.4 + 0.9 * 1.4 - 1.0)


@pytest.mark.parametrize(
    ("update", "second"),
    [
        (server_adam(rate=0.1, beta1=0.5, beta2=0.9, adaptivity=0.01), 0.9 * 1e-4 + 0.1 * 0.25),
        (server_yogi(rate=0.1, beta1=0.5, beta2=0.9, adaptivity=0.01), 1e-4 + 0.1 * 0.25),
        (server_adagrad(rate=0.1, beta1=0.5, adaptivity=0.01), 1e-4 + 0.25),
    ],
    ids=["adam", "yogi", "adagrad"],
)
def test_adaptive_by_hand(update, second):
    """x = 1, Δ = 0.5: m = 0.25 and v as the rule says, from v = τ²."""
    x, memory = step(update, update.memory({"w": torch.tensor([1.0])}), 1.0, 1.5)
    assert float(memory["v.w"]) == pytest.approx(second)
    assert x == pytest.approx(1 + 0.1 * 0.25 / (second**0.5 + 0.01))


def test_momentum_0_is_fedavg():
    plain = fit(papers.fedavg())
    same = fit(papers.fedavg().replace(aggregator=pipeline(post=(server_momentum(momentum=0.0),))))
    assert_close(plain.state.shared, same.state.shared, 1e-12)


@pytest.mark.parametrize("update", OPTIMISERS, ids=lambda u: type(u).__name__)
def test_statistics_are_left_to_the_rule(update):
    """Elsewhere Adam on running variances makes them negative: here they are the plain mean of the clients'."""
    method = papers.fedavg().replace(aggregator=pipeline(post=(update,)))
    plain, moved = fit(papers.fedavg(), rounds=1), fit(method, rounds=1)
    roles = plain.engine.plan.roles
    for name, value in plain.state.shared.items():
        is_statistic = roles[name] in (Role.NORM_MEAN, Role.NORM_VAR)
        if is_statistic:
            assert torch.equal(value, moved.state.shared[name]), name
    assert any(not torch.equal(plain.state.shared[n], t) for n, t in moved.state.shared.items())
    long = fit(method, rounds=8)
    variances = [t for n, t in long.state.shared.items() if roles[n] is Role.NORM_VAR]
    assert all((v > 0).all() for v in variances)
    assert all(t.isfinite().all() for t in long.state.shared.values())


def test_they_combine_with_papers_and_rules():
    for name in ("fedrbn", "scaffold", "split_mix", "fbn"):
        made = shortened(PARTS["method"][name]())
        inner = made.aggregator
        fit(made.replace(aggregator=pipeline(rule=inner, post=(server_adam(),))), rounds=2)


def averaged(decay, **options):
    return papers.fedavg(**options).replace(aggregator=pipeline(post=(weight_average(decay=decay),)))


def test_the_average_is_served_and_training_goes_on_without_it():
    plain, run = fit(papers.fedavg(), rounds=3), fit(averaged(0.5), rounds=3)
    assert_close(plain.state.shared, run.state.shared, 0)
    rounds = [fit(papers.fedavg(), rounds=n).state.shared for n in (1, 2, 3)]
    served = run.engine.plan.aggregator.served(run.state.shared, run.state.memory)
    for name in (n for n, role in run.engine.plan.roles.items() if role is not Role.COUNTER):
        by_hand = 0.5 * (0.5 * rounds[0][name] + 0.5 * rounds[1][name]) + 0.5 * rounds[2][name]
        torch.testing.assert_close(served[name], by_hand)
    predictor = run.customise()
    weight = dict(predictor.named_parameters())["bases.0.fc.weight"]
    torch.testing.assert_close(weight.double(), served["fc.weight"][0])


def test_an_average_of_weights_needs_statistics_of_its_own(tmp_path):
    averaging = pipeline(post=(weight_average(),))
    with pytest.raises(HardyError, match="keeps statistics of the others"):
        fit(papers.fedbn().replace(aggregator=averaging))
    with pytest.raises(HardyError, match="keeps statistics of the others"):
        fit(papers.fedavg().replace(aggregator=by_role(weight=averaging, default=mean())))
    fit(averaged(0.9, norm=batch(inference_statistics="recomputed")), rounds=1)
    lagging = pipeline(post=(weight_average(own_statistics=True),))
    fit(papers.fedbn().replace(aggregator=lagging), rounds=1)
    with pytest.raises(HardyError, match="own_statistics = true, but norm 'BatchNormalisation' keeps none"):
        fit(papers.fedavg().replace(aggregator=lagging))


def test_resuming_keeps_the_memory(tmp_path):
    method = papers.fedavg().replace(aggregator=pipeline(post=(server_adam(), weight_average())))
    data = federation()
    whole = fit(method, data=data, rounds=3)
    fit(method, data=data, rounds=2, out=tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 3"))
    resumed = hardy.resume(tmp_path / "run", method=_with(method), model=net, data=data, quiet=True)
    assert_close(whole.state.memory, resumed.state.memory, 0)


def _with(method):
    from conftest import with_momentum

    return with_momentum(method)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: server_adam(rate=0.0), "rate"),
        (lambda: server_adam(beta2=1.0), "beta2"),
        (lambda: server_momentum(momentum=-0.1), "momentum"),
        (lambda: weight_average(decay=1.0), "decay"),
    ],
)
def test_mistakes_are_refused(make, words):
    with pytest.raises(HardyError, match=words):
        make()
