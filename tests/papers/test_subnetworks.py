"""FedRolex, FIARSE and DepthFL: what is cut, who trains it, what serves; beside HeteroFL where the same must hold."""

import dataclasses
from collections import Counter
from math import ceil

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import hardy
from conftest import SHAPE, assert_close, everything, federation, fit, net, with_momentum
from hardy import papers
from hardy.attacks.gradient import pgd
from hardy.core.layers import calling
from hardy.core.net import Net
from hardy.core.protocols import Batch, Objective
from hardy.deploy import OnnxPredictor
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.models import MODELS
from hardy.models.count import macs
from hardy.models.early_exits import EarlyExits, all_exits, with_exits
from hardy.papers.depthfl import exits, mutual_divergence
from hardy.papers.fiarse import LargestEntries, keep_largest
from hardy.papers.heterofl import corners
from hardy.papers.per_fedavg import meta
from hardy.parts.adversarial import adversarial, mart, trades
from hardy.parts.example_privacy import dp_sgd
from hardy.parts.norms import absent, batch
from hardy.parts.subnetworks import ChannelSubmodels, HeldMean, held_mean

WIDTHS = (0.25, 0.5, 1.0)
UNLIKE = (1.0, 0.25, 0.5, 1.0)
FAMILIES = [papers.heterofl, papers.fedrolex, papers.fiarse, papers.depthfl]
VECTORISED = EngineChoice(name="vectorised", device="cpu", precision="float64")


def unlike(capacities=UNLIKE, kinds=("",) * 4):
    data = federation()
    given = zip(data.clients, capacities, kinds, strict=True)
    return dataclasses.replace(
        data, clients=tuple(dataclasses.replace(c, capacity=own, kind=kind) for c, own, kind in given)
    )


def images(count=6):
    return torch.rand(count, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# What is cut


@pytest.mark.parametrize("advance", [1, 3])
def test_windows_meet_every_channel_equally_often_in_a_cycle(advance):
    """By counting: over as many rounds as a layer has channels, whatever the width."""
    model = net(batch().layer)
    rolling = ChannelSubmodels(model, SHAPE, WIDTHS, advance=advance)
    shared = {n: t[None] for n, t in model.state_dict().items()}
    for width in WIDTHS:
        for name in ("conv1.bias", "norm2.weight"):  # of 4 and 8 channels
            channels = shared[name].shape[1]
            met = Counter()
            for number in range(channels):
                held = rolling.held(width, number, shared)[name]
                assert int(held.sum()) == ceil(width * channels)
                met.update(held.nonzero().flatten().tolist())
            assert set(met.values()) == {ceil(width * channels)} and len(met) == channels


@pytest.mark.parametrize("name", ["tiny_cnn", "preresnet18"])
def test_a_window_is_the_whole_network_without_the_other_channels(name):
    """The whole network whose entries outside the window are zero answers as the window does: so every layer's inputs
    are the channels that the layer before it has in the window, behind shortcuts too."""
    shape = (3, 32, 32)
    model = MODELS[name](shape=shape, width=1 / 16 if name == "preresnet18" else 0.5).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    rolling = ChannelSubmodels(model, shape, (0.5,), advance=1)
    whole = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    x = torch.rand(2, *shape, dtype=torch.float64)
    for number in (0, 3):
        held = rolling.held(0.5, number, {n: t[None] for n, t in whole.items()})
        zeroed = {n: t * held[n] if n in held and "norm" in n and t.dim() else t for n, t in whole.items()}
        zeroed |= {n: t * held[n] for n, t in whole.items() if n.endswith(("weight", "bias"))}
        part = rolling.cut(whole, 0.5, number, whole)
        assert sum(t.numel() for t in part.values()) < 0.5 * sum(t.numel() for t in whole.values())
        torch.testing.assert_close(functional_call(model, part, x), functional_call(model, zeroed, x))


def test_channels_that_are_put_together_are_refused():
    with pytest.raises(HardyError, match="inputs, which no layer before it gives"):
        ChannelSubmodels(MODELS["mini_inception"](width=0.125), (3, 32, 32), WIDTHS)


@pytest.mark.parametrize("scope", ["network", "layer"])
def test_the_mask_keeps_its_share_of_the_largest_entries(scope):
    model = net(batch().layer, width=1.0).double()
    largest = LargestEntries(model, (0.25, 0.5, 1.0), scope)
    shared = {n: t.detach()[None] for n, t in model.named_parameters()}
    layers = [n for n in shared if "norm" not in n]
    for width in (0.25, 0.5):
        held = largest.held(width, 0, shared)
        for group in [layers] if scope == "network" else [[n] for n in layers]:
            size = np.abs(np.concatenate([shared[n].numpy().ravel() for n in group]))
            mask = np.concatenate([held[n].numpy().ravel() for n in group])
            assert mask.sum() == max(1, int(width**2 * size.size))
            assert not mask.all() and size[mask].min() >= size[~mask].max()
        served = largest.cut({n: t[0] for n, t in shared.items()}, width, 0, {n: t[0] for n, t in shared.items()})
        assert all(torch.equal(served[n] != 0, held[n]) for n in layers)
        assert all(torch.equal(served[n], shared[n][0]) for n in shared if n not in layers)


def test_the_biased_gradient_is_that_of_the_mask_made_soft():
    """Where an entry is kept, M(θ) rises as (|θ| − τ) / (|θ| + τ) does: by numpy's differences."""
    rng = np.random.default_rng(0)
    theta, tau, slope = rng.normal(size=50), 0.4, rng.normal(size=50)
    kept = np.abs(theta) >= tau

    def soft(t, at):
        mask = 1 + (np.abs(t) - tau) / (np.abs(t) + tau) - (np.abs(at) - tau) / (np.abs(at) + tau)
        return t * mask

    step = 1e-6
    differences = kept * slope * (soft(theta + step, theta) - soft(theta - step, theta)) / (2 * step)
    values = torch.tensor(theta, requires_grad=True)
    out = keep_largest(values, torch.tensor(tau, dtype=torch.float64))
    np.testing.assert_allclose(out.detach().numpy(), theta * kept, atol=1e-15)
    out.backward(torch.tensor(slope))
    np.testing.assert_allclose(values.grad.numpy(), differences, rtol=1e-6, atol=1e-8)
    assert kept.any() and not kept.all()


def test_a_clients_step_follows_the_biased_gradient():
    """One step of one client against plain autograd on the masked weights."""
    data = unlike((0.5, 1.0, 1.0, 1.0))
    training = hardy.Training(rate=0.1, batch=32, steps=1)
    run = fit(papers.fiarse(widths=WIDTHS), data=data, rounds=1, training=training)
    plan, start = (
        run.engine.plan,
        {n: t[0].double() if t.is_floating_point() else t[0] for n, t in run.server.start().shared.items()},
    )
    state = dataclasses.replace(run.server.start(), shared={n: t[None] for n, t in start.items()})
    work = run.server._work(state, run.server.ask(0), 0.1)
    first = next(iter(run.engine.train(work)))
    layers = [n for n in plan.trained if "norm" not in n]
    sizes = np.sort(np.abs(np.concatenate([start[n].numpy().ravel() for n in layers])))[::-1]
    tau = sizes[int(0.25 * sizes.size) - 1]
    kept = {n: (start[n].abs() >= tau).double() if n in layers else torch.ones_like(start[n]) for n in plan.trained}
    weights = {n: (start[n] * kept[n]).requires_grad_() for n in plan.trained}
    rows = run.engine.batches(0, 0)[0]
    x = torch.from_numpy(data.x_train[rows]).double() / 255
    with calling(branch="clean", statistics="batch", key=None):
        logits = functional_call(plan.model, {**start, **weights}, x)
    F.cross_entropy(logits, torch.from_numpy(data.y_train[rows])).backward()
    for name in plan.trained:
        size = start[name].abs()
        factor = kept[name] * (1 + 2 * tau * size / (size + tau) ** 2) if name in layers else 1
        expected = weights[name].grad * factor
        moved = (start[name] - first.shared[name][0]) / 0.1
        torch.testing.assert_close(moved, expected, rtol=1e-8, atol=1e-10, msg=name)


# Who trains it


@pytest.mark.parametrize("factory", [papers.fedrolex, papers.fiarse])
def test_all_x1_is_fedavg(factory):
    assert_close(fit(papers.fedavg()).state.shared, fit(factory()).state.shared, 1e-9)


def trained_entries(family, name, value, width, number, whole):
    """Which entries of a tensor of tiny_cnn a client of this width trains, [...], by numpy alone."""
    if family is papers.fiarse:
        layers = np.concatenate(
            [np.abs(t).ravel() for n, t in whole.items() if n.split(".")[0] in ("conv1", "conv2", "fc")]
        )
        least = np.sort(layers)[::-1][int(width**2 * layers.size) - 1] if width < 1 else 0
        return np.abs(value) >= least if name.split(".")[0] in ("conv1", "conv2", "fc") else np.ones(value.shape, bool)
    if family is papers.depthfl:  # a block and an exit, then all
        first = name.startswith(("blocks.0.", "exits.0."))
        return np.full(value.shape, first or width > 0.25)
    channels = {"conv1": 4, "norm1": 4, "conv2": 8, "norm2": 8, "fc": 3}
    start = number if family is papers.fedrolex else 0
    layer = name.split(".")[0]
    outputs = (
        range(3) if layer == "fc" else [(start + i) % channels[layer] for i in range(ceil(width * channels[layer]))]
    )
    axes = [list(outputs)] if value.ndim else []
    if layer == "conv2" and value.ndim > 1:
        axes.append([(start + i) % 4 for i in range(ceil(width * 4))])
    if layer == "fc" and value.ndim > 1:  # four cells a channel
        axes.append([4 * ((start + i) % 8) + cell for i in range(ceil(width * 8)) for cell in range(4)])
    axes += [list(range(size)) for size in value.shape[len(axes) :]]
    found = np.zeros(value.shape, bool)
    found[np.ix_(*axes)] = True
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_entry_is_the_mean_over_exactly_those_who_trained_it(family, monkeypatch):
    folded = []
    fold = HeldMean.fold
    monkeypatch.setattr(HeldMean, "fold", lambda self, *given: folded.append(given) or fold(self, *given))
    run = fit(family(widths=WIDTHS), data=unlike(), rounds=3)
    last = [(updates, context) for _, updates, context in folded if context.round == 2]
    sent = {n: t[0].numpy() for n, t in last[0][1].shared.items()}
    for name, before in sent.items():
        total, weight = np.zeros(before.shape), np.zeros(before.shape)
        for updates, _ in last:
            for at, slot in enumerate(updates.slots):
                mask = trained_entries(family, name, before, UNLIKE[slot.client], 2, sent)
                own = len(run.engine.data.clients[slot.client].train)
                total += own * mask * updates.shared[name][at].numpy()
                weight += own * mask
        expected = np.where(weight > 0, total / np.maximum(weight, 1e-30), before)
        np.testing.assert_allclose(run.state.shared[name][0].numpy(), expected, rtol=1e-9, atol=1e-12, err_msg=name)
        assert len(np.unique(weight)) > 1 or "norm" in name or family is papers.depthfl or before.shape == (3,)


@pytest.mark.parametrize("family", [*FAMILIES, papers.sheterofl])
def test_engines_agree_and_adversarial_objectives_train(family):
    attack = {"steps": 2, "start": "normal"}
    objective = {
        papers.heterofl: adversarial(attack=pgd(steps=2)),
        papers.sheterofl: adversarial(attack=pgd(steps=2), mix=1.0),
        papers.fedrolex: trades(attack=pgd(loss="kl", **attack)),
        papers.fiarse: mart(attack=pgd(**attack)),
        papers.depthfl: trades(attack=pgd(loss="kl", **attack)),
    }[family]
    method = family(widths=WIDTHS, objective=objective)
    one, many = (fit(method, data=unlike(), rounds=2, **own) for own in ({}, {"engine": VECTORISED}))
    assert_close(everything(one), everything(many), 1e-9)
    start = one.server.start().shared
    assert any(not torch.equal(t, start[n].to(t)) for n, t in one.state.shared.items())


@pytest.mark.parametrize("family", [papers.fedrolex, papers.fiarse, papers.depthfl])
def test_a_run_that_was_killed_goes_on_with_the_same_sub_networks(family, tmp_path):
    method, data = with_momentum(family(widths=WIDTHS)), unlike()
    whole = fit(method, data=data, out=tmp_path / "whole")
    fit(method, data=data, out=tmp_path / "half", rounds=2)
    text = (tmp_path / "half/config.toml").read_text().replace("rounds = 2", "rounds = 4")
    (tmp_path / "half/config.toml").write_text(text)
    resumed = hardy.resume(tmp_path / "half", method=method, model=net, data=data, quiet=True)
    for name, tensor in everything(whole).items():
        assert torch.equal(tensor, everything(resumed)[name]), name


# What serves


@pytest.mark.parametrize("family", FAMILIES)
def test_served_evaluated_and_exported_are_one_network_at_every_width(family, tmp_path):
    onnx = pytest.importorskip("onnxruntime", reason="onnxruntime is an extra (export)")
    assert onnx
    method, data = with_momentum(family(widths=WIDTHS)), unlike()
    run = fit(method, data=data, rounds=3, out=tmp_path / "run")
    loaded = hardy.load(run.folder, method=method, model=net, data=data)
    settings = hardy.runs.evaluate.evaluate_settings(run)
    assert [row["width"] for row in settings] == list(WIDTHS)
    answers = set()
    for row in settings:
        width = row["width"]
        predictor, hits = run.customise(width=width), []
        for client in data.clients:
            x = torch.from_numpy(data.x_test[client.test]).double() / 255
            logits = predictor(x).detach()
            hits.append(float((logits.argmax(1).numpy() == data.y_test[client.test]).mean()))
            assert torch.equal(logits, loaded.customise(width=width)(x).detach())
        assert row["standard_accuracy"]["mean"] == pytest.approx(np.mean(hits))
        file = OnnxPredictor(run.export(tmp_path / f"{width}.onnx", width=width))
        np.testing.assert_allclose(file(x.float().numpy()), logits, atol=1e-4)
        answers.add(tuple(np.round(logits.numpy().ravel(), 6)))
    assert len(answers) == (2 if family is papers.depthfl else 3)  # tiny_cnn has two blocks


def test_a_shallow_network_is_measured_and_shown_under_attack(tmp_path):
    """Layers that do not run are not asked for what they see."""
    run = fit(papers.depthfl(widths=WIDTHS), data=unlike(), rounds=1, out=tmp_path / "run")
    found = hardy.evaluate(run, "pgd-1", width=0.25, quiet=True)
    assert 0 <= found["robust_accuracy"]["pgd-1"]["mean"] <= 1
    assert (tmp_path / "run/projections.json").exists()


def test_the_window_that_serves_is_that_of_the_last_round():
    run = fit(papers.fedrolex(widths=WIDTHS), data=unlike(), rounds=3)
    whole = {n: t[0] for n, t in run.state.shared.items()}
    (served,) = run.engine.plan.method.budget.serve(run.state.shared, 0.5, run.engine.plan.submodels, 3)
    rows = [(2 + i) % 8 for i in range(4)]
    inputs = [(2 + i) % 4 for i in range(2)]
    assert torch.equal(served["conv2.weight"], whole["conv2.weight"][rows][:, inputs])


def test_macs_and_parameters_of_each_width():
    shape, model = (3, 28, 28), MODELS["digits_cnn"](shape=(3, 28, 28), width=0.25)
    window = ChannelSubmodels(model, shape, WIDTHS, advance=1)
    narrow = MODELS["digits_cnn"](shape=shape, width=0.125)
    assert macs(model, shape, window.shapes(0.5)) == macs(narrow, shape)

    data = unlike()
    deep = fit(papers.depthfl(widths=WIDTHS), data=data, rounds=1)
    costs = [deep.customise(width=width).costs() for width in WIDTHS]
    first = 4 * 9 * 64 + 4 * 9 * 4 + 16 * 4 + 4 * 3  # conv1 on 8x8; the exit: depthwise on 2x2, pointwise, linear
    assert costs[0]["macs"] == first
    assert costs[1]["macs"] == costs[2]["macs"] == first + 8 * 4 * 9 * 16 + 32 * 3
    assert (
        costs[0]["parameters"] < costs[1]["parameters"] == sum(p.numel() for p in deep.engine.plan.model.parameters())
    )

    sparse = fit(papers.fiarse(widths=WIDTHS, scope="layer"), data=data, rounds=1)
    numbers = {"conv1.weight": (36, 64), "conv2.weight": (288, 16), "fc.weight": (96, 1)}  # entries, positions
    for width in (0.25, 0.5):
        expected = sum(int(width**2 * entries) * positions for entries, positions in numbers.values())
        assert sparse.customise(width=width).costs()["macs"] == expected
    spent = hardy.runs.costs.training_costs(sparse)["clients"]
    whole = hardy.runs.costs.training_costs(fit(papers.fedavg(), rounds=1))["clients"]
    assert spent[1]["macs"] == pytest.approx(whole[1]["macs"] / 16, rel=0.05)
    assert spent[0]["macs"] == whole[0]["macs"]
    kept = sum(entries for entries, _ in numbers.values()) + 4 + 8 + 3
    norms = 2 * (4 + 8)
    assert spent[1]["parameters"] == pytest.approx(kept / 16 + norms, abs=1)
    moves = fit(papers.depthfl(widths=WIDTHS, distillation=0.0), data=data, rounds=1)
    spent = hardy.runs.costs.training_costs(moves)["clients"]  # client 1 stops at the first exit
    share = spent[1]["macs"] / spent[0]["macs"] * 12 * 2 / (8 * 2)  # examples: 10 rows in 2 epochs, without left-overs
    assert 0 < share < costs[0]["macs"] / costs[2]["macs"] * 1.5


# DepthFL


class SummedExits(Objective):
    """Plain training on the summed losses of all exits."""

    def loss(self, net, private, given, key):
        with all_exits():
            logits = net(given.x, statistics="batch", key=key)
        return sum(F.cross_entropy(own, given.y) for own in logits.chunk(2, 1))


def test_full_depth_without_distillation_is_plain_training_on_the_summed_losses():
    deep = fit(papers.depthfl(widths=(0.5, 1.0), distillation=0.0))
    plain = fit(
        papers.fedavg(objective=SummedExits()),
        model=lambda norm: with_exits(net(norm), norm, SHAPE, 2, "ensemble"),
    )
    assert_close(deep.state.shared, plain.state.shared, 1e-9)
    assert deep.figures.latest == plain.figures.latest


def test_mutual_divergence_by_hand():
    logits = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    p = logits.detach().softmax(-1).numpy()
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    expected = sum((p[:, j] * np.log(p[:, j] / p[:, i])).sum(-1).mean() for i, j in pairs) / 2
    found = mutual_divergence(logits)
    assert float(found.detach()) == pytest.approx(expected)
    found.backward()  # of Σ KL(p_j ‖ p_i) to the logits of i, p_j held: Σ_j (p_i − p_j)
    slope = np.stack([sum(p[:, i] - p[:, j] for j in range(3) if j != i) for i in range(3)], 1) / 2 / 4
    np.testing.assert_allclose(logits.grad.numpy(), slope, atol=1e-12)


def test_exits_of_a_network_and_what_it_answers():
    model = with_exits(MODELS["preresnet18"](width=0.125), batch().layer, (3, 32, 32), 4, "ensemble").double()
    assert isinstance(model, EarlyExits) and len(model.blocks) == 4
    assert [len([m for m in block.modules() if type(m).__name__ == "_PreBlock"]) for block in model.blocks] == [2] * 4
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    with all_exits():
        each = model(x).unflatten(1, (4, 10))
    torch.testing.assert_close(model(x), each.mean(1))
    model.answer = "deepest"
    torch.testing.assert_close(model(x), each[:, -1])
    with pytest.raises(HardyError, match=r"take an nn\.Sequential of 3 or more layers"):
        fit(papers.depthfl(), model=lambda norm: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))


def test_distillation_grows_over_its_ramp_and_changes_training():
    budget = exits(distillation=2.0, ramp=4)
    assert [budget.weight_at(t) for t in (0, 2, 4, 9)] == pytest.approx([2 * np.exp(-5), 2 * np.exp(-1.25), 2, 2])
    alone, taught = (fit(papers.depthfl(distillation=own), rounds=1).state.shared for own in (0.0, 1.0))
    assert any(not torch.equal(alone[n], taught[n]) for n in alone)


# HeteroFL's options


def test_the_scaler_multiplies_what_layers_give_while_they_learn():
    """Against forward hooks on a network as narrow as the client's."""
    norm = absent()
    run = fit(papers.heterofl(widths=WIDTHS, scaler=True, norm=norm), data=unlike((0.5,) * 4), rounds=1)
    plan = run.engine.plan
    start = {n: t[0].double() for n, t in run.server.start().shared.items()}
    part = plan.submodels.cut(start, 0.5, 0, start)
    objective = plan.objective(run.engine.data.clients[0], 0)
    x, y = images(), torch.arange(6) % 3
    given = Batch(x, y, torch.ones(3))
    found = objective.gradient(objective, Net(plan.model, start, {}), {}, given, torch.tensor(0), start)
    narrow = net(norm.layer, width=0.125).double()
    narrow.load_state_dict({n: part[n] for n in narrow.state_dict() if n in part}, strict=False)
    for layer in (narrow.conv1, narrow.conv2):
        layer.register_forward_hook(lambda module, given, out: 2 * out)
    loss = F.cross_entropy(narrow(x), y)
    loss.backward()
    torch.testing.assert_close(found.loss, loss.detach())
    for name, parameter in narrow.named_parameters():
        size = tuple(map(slice, parameter.shape))
        torch.testing.assert_close(found.gradient[name][size], parameter.grad)
        assert found.gradient[name].abs().sum() == pytest.approx(float(parameter.grad.abs().sum()))


def test_missing_labels_take_no_part_in_the_loss():
    data = federation()
    only = np.concatenate([c.train for c in data.clients])
    rows = only[data.y_train[only] != 2]
    clients = tuple(dataclasses.replace(c, train=rows[n::4]) for n, c in enumerate(data.clients))
    data = dataclasses.replace(data, clients=clients)
    start = fit(papers.heterofl(missing_labels=False), data=data, rounds=1)
    after, before = start.state.shared, start.server.start().shared
    decayed = before["fc.bias"][0, 2] * (1 - 0.1 * 1e-3)
    assert abs(after["fc.bias"][0, 2] - before["fc.bias"][0, 2]) <= 40 * abs(decayed - before["fc.bias"][0, 2]) + 1e-9
    seen = fit(papers.heterofl(), data=data, rounds=1).state.shared
    assert seen["fc.bias"][0, 2] < after["fc.bias"][0, 2]  # pushed down where it takes part


# What is refused, and what goes together


def test_fedrbns_calibration_goes_with_depths_and_not_with_widths():
    method = papers.fedrbn(attack=pgd(steps=2))
    data = unlike(kinds=("AT", "ST", "ST", "AT"))
    deep = method.replace(budget=exits(widths=WIDTHS), aggregator=held_mean())
    one, many = (fit(deep, data=data, rounds=2, **own) for own in ({}, {"engine": VECTORISED}))
    assert_close(everything(one), everything(many), 1e-9)
    given = {n: t for n, t in one.state.reported.items() if ".adversarial.mean" in n and "blocks.0" in n}
    assert given and all(t[1].abs().sum() > 0 for t in given.values())  # the shallow client was given statistics
    for budget in (corners(widths=WIDTHS), papers.fedrolex(widths=WIDTHS).budget, papers.fiarse(widths=WIDTHS).budget):
        with pytest.raises(
            HardyError, match=r"capacity 1 to ST clients of capacity 0\.25.*gives these another network"
        ):
            fit(method.replace(budget=budget, aggregator=held_mean()), data=data, rounds=1)
    with pytest.raises(HardyError, match=r"capacity 0\.25 to ST clients of capacity 1"):
        fit(deep, data=unlike(kinds=("ST", "AT", "AT", "ST")), rounds=1)
    alike = unlike((0.5,) * 4, ("AT", "ST", "ST", "AT"))
    fit(method.replace(budget=corners(widths=(0.5, 1.0)), aggregator=held_mean()), data=alike, rounds=1)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: papers.fedrolex(advance=0), "advance of windows is 0"),
        (lambda: papers.depthfl(ramp=3, distillation=0.0), "it has no effect"),
        (lambda: papers.depthfl(distillation=-1.0), "distillation and a ramp of 0 or more"),
        (lambda: fit(papers.heterofl(scaler=True), rounds=1), "tracked in training are of values 1/r times"),
        (
            lambda: fit(
                papers.heterofl(
                    scaler=True,
                    norm=batch(inference_statistics="recomputed"),
                    objective=adversarial(attack=pgd(steps=1)),
                ),
                rounds=1,
            ),
            "or attacked",
        ),
        (lambda: papers.heterofl(widths=(0.5,)), "one must be 1"),
        (lambda: fit(papers.depthfl(objective=meta()), rounds=1), "exits of budget 'ExitBudget' share one pass"),
        (lambda: fit(papers.fedavg().replace(budget=papers.fiarse().budget), rounds=1), "aggregator held_mean"),
        (
            lambda: fit(papers.sheterofl(norm=absent(), objective=dp_sgd(noise=1.0, clip=1.0, delta=1e-5)), rounds=1),
            "one gradient a step",
        ),
        (lambda: fit(papers.fedavg(), data=unlike(), rounds=1), "no part of method 'fedavg' looks at a client's cap"),
    ],
)
def test_what_cannot_work_is_refused(make, match):
    with pytest.raises(HardyError, match=match):
        make()
