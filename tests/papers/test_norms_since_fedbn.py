"""SiloBN, HBN, FedWon and synchronised BatchNorm."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hardy
from conftest import SHAPE, assert_close, everything, experiment, federation, fit, net
from hardy import papers
from hardy.attacks.gradient import pgd
from hardy.core.layers import calling
from hardy.core.partition import Placement, Role
from hardy.core.training import Training
from hardy.deploy.plain_module import plain_module
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.papers.fbn import federated
from hardy.papers.fedwon import StandardisedConv2d, adaptive_clip, standardised_weights
from hardy.papers.hbn import hybrid
from hardy.papers.synchronised import synchronised
from hardy.parts.adversarial import adversarial, trades
from hardy.parts.aggregators.base import mean
from hardy.parts.norms import dual
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd

VECTORISED = EngineChoice(name="vectorised", device="cpu", precision="float64")
ONE_STEP = Training(rate=0.1, batch=5, steps=1)
UNIFORM = mean(weigh="uniform")


def test_silobn_keeps_statistics_alone():
    plan = papers.silobn().bind(net, SHAPE)
    assert {plan.tags[name].role for name in plan.names(Placement.PRIVATE)} == {Role.NORM_MEAN, Role.NORM_VAR}
    assert Role.NORM_AFFINE in {plan.tags[name].role for name in plan.names(Placement.SHARED)}


# HBN


def test_hbn_measures_as_federated_batchnorm_before_any_step():
    """After a round of many steps the statistics are those of federated BatchNorm after one: w had not moved."""
    batch = Training(rate=0.1, batch=100, steps=3)  # a client's every batch is all of its rows
    many = fit(papers.hbn(), rounds=1, training=batch)
    one = fit(papers.fedavg(norm=federated()), rounds=1, training=batch.with_steps(1))
    names = [n for n, tag in one.engine.plan.tags.items() if tag.role in (Role.NORM_MEAN, Role.NORM_VAR)]
    first = min(names)  # of the first layer: what deeper ones see depends on how it normalises
    for name in (first, first.replace("mean", "var")):
        torch.testing.assert_close(many.state.shared[name], one.state.shared[name], rtol=0, atol=1e-12)


def test_hbn_under_attack_pools_clean_and_attacked_images():
    """Both are images of the first step, so what is served must hold both, as with federated BatchNorm."""
    batch = Training(rate=0.1, batch=100, steps=2)
    objective = adversarial(attack=pgd(steps=1))
    many = fit(papers.hbn(objective=objective), rounds=1, training=batch.with_steps(1))
    one = fit(papers.fedavg(norm=federated(), objective=objective), rounds=1, training=batch.with_steps(1))
    first = min(n for n, tag in one.engine.plan.tags.items() if tag.role is Role.NORM_MEAN)
    clean = fit(papers.hbn(), rounds=1, training=batch)
    for name in (first, first.replace("mean", "var")):
        torch.testing.assert_close(many.state.shared[name], one.state.shared[name], rtol=0, atol=1e-12)
        assert not torch.allclose(many.state.shared[name], clean.state.shared[name], atol=1e-6)
    loop = fit(papers.hbn(objective=objective), rounds=2)
    assert_close(everything(loop), everything(fit(papers.hbn(objective=objective), rounds=2, engine=VECTORISED)), 1e-9)


@pytest.mark.parametrize("mix, like", [(-40.0, "sent"), (40.0, "batch")])
def test_hbn_lies_between_the_sent_statistics_and_those_of_the_batch(mix, like):
    layer, x = hybrid().layer(4), 3 * torch.randn(8, 4, 5, 5) + 1
    nn.init.constant_(layer.clean.mix, mix)
    layer.clean.sent_mean, layer.clean.sent_var = torch.full((4,), 0.5), torch.full((4,), 2.0)
    with calling(branch="clean", statistics="batch", key=None):
        out = layer(x)
    wanted = F.batch_norm(x, layer.clean.sent_mean, layer.clean.sent_var) if like == "sent" else None
    wanted = F.batch_norm(x, None, None, training=True) if wanted is None else wanted
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


def test_hbn_learns_shares_that_stay_at_home():
    run = fit(papers.hbn())
    shares = {n: t for n, t in run.engine.store.items() if run.engine.plan.tags[n].role is Role.NORM_MIX}
    assert shares and shares.keys() == run.engine.store.keys()
    for share in shares.values():
        assert share.abs().min() > 0 and not torch.equal(share[0], share[1])


def test_hbn_in_both_branches_of_a_dual_norm():
    method = papers.fatavg_dbn().replace(norm=dual(clean=hybrid(), adversarial=hybrid()))
    runs = [fit(method, rounds=1, engine=engine) for engine in (VECTORISED, replace(VECTORISED, name="sequential"))]
    assert_close(everything(runs[0]), everything(runs[1]), 1e-9)


def test_hbn_refuses_noise():
    with pytest.raises(HardyError, match="measured once a round"):
        hybrid(noise=0.1)


# FedWon


def test_standardised_convolution_keeps_mean_and_variance():
    """Of inputs of mean 0 and variance 1 each output has mean 0 and variance γ² whatever the weights."""
    layer = nn.Conv2d(16, 8, 3, bias=False)
    nn.init.normal_(layer.weight, 5.0, 3.0)
    gain = standardised_weights().gain
    standardised_weights().prepare(layer)
    assert type(layer) is StandardisedConv2d
    out = layer(torch.randn(64, 16, 12, 12))
    torch.testing.assert_close(out.var(), torch.tensor(gain**2), rtol=0.1, atol=0)
    held = torch.relu(torch.randn(1_000_000)) * gain
    torch.testing.assert_close(held.var(), torch.tensor(1.0), rtol=0.01, atol=0)
    moved = nn.Conv2d(16, 8, 3, bias=False)
    moved.weight.data = 2 * layer.weight.data + 1  # neither scale nor shift of the weights counts
    standardised_weights().prepare(moved)
    x = torch.randn(2, 16, 5, 5)
    torch.testing.assert_close(moved(x), layer(x), rtol=1e-4, atol=1e-4)


def test_standardised_convolution_and_adaptive_clip_are_those_of_timm():
    timm = pytest.importorskip("timm")
    from timm.utils.agc import adaptive_clip_grad

    theirs = timm.layers.ScaledStdConv2d(6, 8, 3, gamma=standardised_weights().gain, groups=2, eps=1e-12)
    ours = nn.Conv2d(6, 8, 3, groups=2)
    ours.load_state_dict(theirs.state_dict(), strict=False)
    standardised_weights().prepare(ours)
    x = torch.randn(3, 6, 9, 9)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    (3 * theirs(x).square()).sum().backward()
    params = {name: p for name, p in theirs.named_parameters() if name != "gain"}
    gradient = {name: p.grad.clone() for name, p in params.items()}
    found, _ = adaptive_clip(threshold=0.02).update(gradient, {}, params, {}, torch.tensor(1.0), torch.tensor(0))
    adaptive_clip_grad(params.values(), clip_factor=0.02, eps=1e-3)
    for name in ("weight", "bias"):
        torch.testing.assert_close(found[name], params[name].grad, rtol=1e-5, atol=1e-7)


def test_fedwon_has_no_norm_and_counts_as_many_macs():
    from hardy.models.count import macs

    model = papers.fedwon().bind(net, SHAPE).model
    assert not any(isinstance(layer, hardy.models.BatchNorm) for layer in model.modules())
    assert sum(isinstance(layer, StandardisedConv2d) for layer in model.modules()) == 2
    assert macs(model, SHAPE) == macs(papers.fedavg().bind(net, SHAPE).model, SHAPE)


def test_fedwon_refuses_a_network_without_convolutions():
    def mlp(norm):
        return hardy.models.mlp(norm=norm, shape=SHAPE, classes=3)

    with pytest.raises(HardyError, match="has no convolution"):
        papers.fedwon().bind(mlp, SHAPE)


def test_adaptive_clip_is_a_share_of_each_channels_weights():
    params = {"w": torch.tensor([[3.0, 4.0], [0.6, 0.8]]), "b": torch.zeros(2)}
    gradient = {"w": torch.tensor([[30.0, 40.0], [0.03, 0.04]]), "b": torch.tensor([3.0, 4.0])}
    found, _ = adaptive_clip(threshold=0.1).update(gradient, {}, params, {}, torch.tensor(1.0), torch.tensor(0))
    torch.testing.assert_close(found["w"], torch.tensor([[0.3, 0.4], [0.03, 0.04]]))
    torch.testing.assert_close(found["b"].norm(), torch.tensor(1e-4))


# Synchronised BatchNorm


def test_synchronised_is_one_machine_that_sees_all_batches():
    """A step of equal batches: weights, affine and statistics after three rounds are the centralised ones."""
    data = federation(sizes=(8, 8, 8, 8))
    tied = papers.fedavg(norm=synchronised(), optimiser=sgd()).replace(aggregator=UNIFORM)
    one = hardy.fit(
        experiment(rounds=3, training=Training(rate=0.1, batch=8, steps=1), engine=VECTORISED),
        method=tied,
        model=net,
        data=data,
        quiet=True,
    )
    other = hardy.fit(
        experiment(rounds=3, training=Training(rate=0.1, batch=32, steps=1), engine=VECTORISED),
        method=papers.centralised(optimiser=sgd()),
        model=net,
        data=data,
        quiet=True,
    )
    assert_close(one.state.shared, other.state.shared, 1e-9)


def test_synchronised_trains_many_steps_and_resumes(tmp_path):
    method, training = papers.fedavg(norm=synchronised()), Training(rate=0.1, batch=5, steps=3)
    options = {"training": training, "engine": VECTORISED}
    whole = fit(method, rounds=4, **options)
    half = fit(method, out=tmp_path / "half", rounds=2, **options)
    config = tmp_path / "half" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 4"))
    again = hardy.resume(tmp_path / "half", method=method, model=net, data=half.engine.data, quiet=True)
    assert_close(everything(whole), everything(again), 0)
    plain = fit(papers.fedavg(), rounds=4, **options)
    assert any(not torch.equal(t, plain.state.shared[n]) for n, t in whole.state.shared.items())


@pytest.mark.parametrize("name", ["silobn", "hbn", "fedwon"])
@pytest.mark.parametrize("objective", [cross_entropy(), trades(attack=pgd(steps=1))], ids=["clean", "trades"])
def test_they_combine_with_attacks_and_are_served_as_a_plain_module(name, objective):
    run = fit(getattr(papers, name)(objective=objective), rounds=1)
    predictor, x = run.customise(client=0), torch.rand(5, *SHAPE)
    module = plain_module(predictor)  # in the type of what was trained
    wanted = predictor(x).double()
    torch.testing.assert_close(module.double()(x.double()), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"engine": EngineChoice(name="sequential", device="cpu")}, "all clients of a step in one call"),
        ({"engine": EngineChoice(name="vectorised", device="cpu", lane=2)}, "engine.lane 2"),
        ({"training": Training(batch=5)}, "Set training.steps"),
        ({"training": Training(batch=6, steps=1)}, "batch of at most 5"),
    ],
)
def test_synchronised_refuses_what_would_untie_the_clients(options, said):
    given = {"training": ONE_STEP, "engine": VECTORISED, **options}
    with pytest.raises(HardyError, match=said):
        fit(papers.fedavg(norm=synchronised()), rounds=1, **given)


def test_synchronised_refuses_several_kinds_of_clients():
    data = federation()
    kinds = tuple(replace(c, kind="AT" if n % 2 else "ST") for n, c in enumerate(data.clients))
    method = papers.fatavg().replace(norm=synchronised())
    with pytest.raises(HardyError, match="2 objectives"):
        fit(method, data=replace(data, clients=kinds), rounds=1, training=ONE_STEP, engine=VECTORISED)


def test_synchronised_under_attack_runs_in_one_lane():
    method = papers.fatavg().replace(norm=synchronised())
    run = fit(method, rounds=1, training=ONE_STEP, engine=VECTORISED)
    assert all(tensor.isfinite().all() for tensor in run.state.shared.values())
