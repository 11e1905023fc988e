"""HeteroFL: corners of one network, every entry averaged over those who hold it."""

import dataclasses
from collections import OrderedDict
from math import prod

import pytest
import torch

import hardy
from conftest import assert_close, federation, fit, net, with_momentum
from hardy import papers
from hardy.core.messages import Slot, Updates
from hardy.core.partition import Role, tags
from hardy.core.protocols import RoundContext
from hardy.core.tensors import shapes
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.models import MODELS
from hardy.models.count import macs
from hardy.parts.norms import batch
from hardy.parts.subnetworks import Axes, ChannelSubmodels, channel_axes, held_mean

WIDTHS = (0.25, 0.5, 1.0)


def unlike(capacities=(1.0, 0.25, 0.5, 1.0)):
    data = federation()
    clients = (dataclasses.replace(c, capacity=own) for c, own in zip(data.clients, capacities, strict=True))
    return dataclasses.replace(data, clients=tuple(clients))


def of(model):
    state = model.state_dict()
    return {name: tuple(state[name].shape) for name in tags(model)}


def corners(model, shape):
    return ChannelSubmodels(model, shape, WIDTHS)


@pytest.mark.parametrize("name", ["digits_cnn", "alexnet", "preresnet18", "mlp", "tiny_cnn"])
@pytest.mark.parametrize("width", [0.125, 0.3])
def test_a_corner_has_the_shapes_of_the_narrow_network(name, width):
    shape = (3, 64, 64) if name == "alexnet" else (3, 32, 32)
    whole, narrow = (MODELS[name](shape=shape, width=w) for w in (1.0, width))
    assert corners(whole, shape).shapes(width) == of(narrow)


def test_layers_are_found_by_what_feeds_them_not_by_name():
    """A network whose first layer is written last, under a name that sorts anywhere."""

    class Shuffled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.zz_last = torch.nn.Linear(8, 3)
            self.middle = torch.nn.Linear(16 * 4, 8)
            self.a_first = torch.nn.Conv2d(1, 16, 3, padding=1)

        def forward(self, x):
            pooled = torch.nn.functional.adaptive_avg_pool2d(self.a_first(x), 2)
            return self.zz_last(self.middle(pooled.flatten(1)).relu())

    axes = channel_axes(Shuffled(), (1, 8, 8))
    assert axes["a_first.weight"] == Axes(True, 0)
    assert axes["middle.weight"] == Axes(True, 4)
    assert axes["zz_last.weight"] == Axes(False, 1)


def test_macs_of_a_corner_are_those_of_the_narrow_network():
    whole, narrow = (MODELS["digits_cnn"](shape=(3, 28, 28), width=w) for w in (1.0, 0.25))
    assert macs(whole, (3, 28, 28), corners(whole, (3, 28, 28)).shapes(0.25)) == macs(narrow, (3, 28, 28))


@pytest.mark.parametrize("method", [papers.heterofl(), papers.sheterofl(widths=(1.0,))], ids=lambda m: m.name)
def test_all_x1_is_fedavg(method):
    assert_close(fit(papers.fedavg()).state.shared, fit(method).state.shared, 1e-9)


@pytest.mark.parametrize("factory", [papers.heterofl, papers.sheterofl])
def test_engines_agree_and_entries_nobody_holds_stay(factory):
    method, data = factory(widths=WIDTHS), unlike((0.5, 0.25, 0.5, 0.5))
    one = fit(method, data=data, rounds=2)
    many = fit(method, data=data, rounds=2, engine=EngineChoice(name="vectorised", device="cpu", precision="float64"))
    assert_close(one.state.shared, many.state.shared, 1e-9)
    start = one.server.start().shared
    corner = one.engine.plan.submodels.shapes(0.5)
    for name, value in one.state.shared.items():
        inside = (slice(None), *map(slice, corner[name]))
        outside = torch.ones_like(value, dtype=torch.bool)
        outside[inside] = False
        assert torch.equal(value[outside], start[name].to(value)[outside]), name
        assert not torch.equal(value[inside], start[name].to(value)[inside]), name


def test_each_client_counts_once_for_each_entry_it_holds():
    shared = {"a.weight": torch.zeros(1, 4, 2), "b.weight": torch.zeros(1, 3, 4)}
    layers = {"a": torch.nn.Linear(2, 4, bias=False), "b": torch.nn.Linear(4, 3, bias=False)}
    submodels = ChannelSubmodels(torch.nn.Sequential(OrderedDict(layers)), (2,), WIDTHS)
    context = RoundContext(
        shared=shared,
        roles=dict.fromkeys(shared, Role.WEIGHT),
        bases=1,
        clients=3,
        capacities=(0.25, 0.5, 1.0),
        submodels=submodels,
    )
    values = torch.tensor([1.0, 2.0, 6.0])
    updates = Updates(
        slots=[Slot(0), Slot(1), Slot(2)],
        shared={n: values.view(3, 1, 1) * torch.ones_like(t) for n, t in shared.items()},
        reported={},
        weights=torch.tensor([1.0, 1.0, 2.0]),
        steps=torch.ones(3),
        loss=torch.ones(3),
    )
    rule = held_mean()
    whole, _ = rule.finish(rule.fold(None, updates, context), context, {})
    rows = torch.tensor([15 / 4, 14 / 3, 6.0, 6.0])  # held by all, by two, by the last
    torch.testing.assert_close(whole["a.weight"][0], rows[:, None].expand(4, 2))
    torch.testing.assert_close(whole["b.weight"][0], rows.expand(3, 4))
    parts = None
    for keep in ([True, False, False], [False, True, True]):
        parts = rule.fold(parts, updates.where(torch.tensor(keep)), context)
    assert_close(rule.finish(parts, context, {})[0], whole, 1e-6)


def test_a_width_is_served_by_its_corner_and_its_figures_are_of_it():
    run = fit(papers.heterofl(widths=WIDTHS, norm=batch(inference_statistics="recomputed")), data=unlike(), rounds=1)
    plan = run.engine.plan
    served = plan.method.budget.serve(run.state.shared, 0.5, plan.submodels)[0]
    whole = {n: t[0] for n, t in run.state.shared.items()}
    corner = {n: s for n, s in plan.submodels.shapes(0.5).items() if n in whole}
    assert shapes(served) == corner
    assert_close(served, {n: t[tuple(map(slice, corner[n]))] for n, t in whole.items()}, 0)
    numbers = [sum(prod(s) for n, s in plan.submodels.shapes(w).items() if n in whole) for w in (1.0, 0.25, 0.5, 1.0)]
    assert run.figures.bytes_down == run.figures.bytes_up == 8 * sum(numbers)
    with pytest.raises(HardyError, match=r"width.*0\.3.*0\.25, 0\.5, 1"):
        plan.method.budget.serve(run.state.shared, 0.3, plan.submodels)


def test_a_run_that_was_loaded_serves_the_same_corners(tmp_path):
    method, data = papers.heterofl(widths=WIDTHS), unlike()
    run = fit(method, data=data, rounds=1, out=tmp_path / "run")
    x = torch.rand(4, 1, 8, 8, dtype=torch.float64)
    loaded = hardy.load(run.folder, method=with_momentum(method), model=net, data=data)
    for width in WIDTHS:
        assert torch.equal(run.customise(width=width)(x), loaded.customise(width=width)(x))
    assert torch.equal(loaded.network_for_new_client("average")(x), run.customise()(x))


def test_a_client_too_poor_for_any_width_is_refused():
    with pytest.raises(HardyError, match=r"client 1 can train a width of 0\.25"):
        fit(papers.heterofl(widths=(0.5, 1.0)), data=unlike(), model=net)
