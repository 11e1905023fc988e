"""Sub-networks of one network as budgets: what several methods share.

A client trains the largest sub-network that it can afford; every entry is averaged over those who trained it, and each
width is served by its own sub-network. Width methods cut channels (`ChannelSubmodels`); others say in their own file
what they cut.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hardy.core import tensors
from hardy.core.layers import Call, Statistics
from hardy.core.messages import Updates
from hardy.core.method import Method
from hardy.core.net import Net
from hardy.core.partition import tags
from hardy.core.protocols import (
    Aggregator,
    Batch,
    Budget,
    Fact,
    Objective,
    RoundContext,
    Setting,
    Wrapper,
    name_part,
)
from hardy.core.ranks import Ranks
from hardy.core.submodels import Submodels
from hardy.core.tensors import ImageShape, Tensors
from hardy.errors import HardyError, unknown
from hardy.parts.aggregators.base import largest_counters
from hardy.registry import part

WIDTHS = (0.125, 0.25, 0.5, 1.0)
_Layer = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear
Shapes = dict[str, tuple[int, ...]]


def fitting(widths: Sequence[float], capacity: float) -> list[float]:
    """The widths that a client can afford, the widest last."""
    return [width for width in sorted(widths) if width <= capacity + 1e-9]


@dataclass(frozen=True, kw_only=True)
class SubnetworkBudget(Budget):
    """Every client trains the largest sub-network of the one network that it can afford."""

    widths: tuple[float, ...] = WIDTHS
    """trained and served"""

    def __post_init__(self) -> None:
        if not self.widths or not all(0 < width <= 1 for width in self.widths) or max(self.widths) < 1:
            raise HardyError(
                f"widths are {list(self.widths)}; each must be in (0, 1], and one must be 1, where a run is measured."
            )

    @property
    def consumes(self) -> frozenset[Fact]:
        return frozenset({"capacity"})

    def check(self, method: Method, setting: Setting) -> None:
        if not any(isinstance(part, HeldMean) for part in method.parts()):
            raise HardyError(
                f"budget {name_part(self)!r} trains parts of the network, but aggregator "
                f"{name_part(method.aggregator)!r} counts what a client did not train as its opinion. Usual fix: "
                "aggregator held_mean."
            )
        for number, client in enumerate(setting.sorts):
            if not fitting(self.widths, client.capacity):
                raise HardyError(
                    f"client {number} can train a width of {client.capacity:g}, below the least of "
                    f"{list(self.widths)}. Add a narrower one (method.widths), or raise its capacity (data.capacity)."
                )

    def shares_statistics(self, giver: float, taker: float) -> bool:
        return fitting(self.widths, giver) == fitting(self.widths, taker)

    def serve(self, held: Tensors, width: float, submodels: Submodels | None = None, rounds: int = 0) -> list[Tensors]:
        """Its sub-network as clients trained it last."""
        if width not in self.widths:
            raise unknown("width; it must be one that was trained", f"{width:g}", (f"{w:g}" for w in self.widths))
        assert submodels is not None
        whole = tensors.gather(held, 0)
        return [submodels.cut(whole, width, max(0, rounds - 1), whole)]


# Channels


class Axes(NamedTuple):
    """Which axes of a tensor are cut: the outputs, and the inputs in blocks of so many cells a channel (0: never)."""

    outputs: bool
    cells: int


def channel_axes(model: nn.Module, shape: ImageShape) -> dict[str, Axes]:
    """How each tensor of a model is cut, from one forward pass: by the type of its layer and what feeds it."""
    given = deepcopy(model).to("meta")  # nothing is computed, and the model stays as it is
    own = dict(zip(_layers(given), _layers(model), strict=True))
    order: list[_Layer] = []
    for layer in own:
        layer.register_forward_hook(lambda module, *_: order.append(own[module]))
    given(torch.empty(1, *shape, device="meta", dtype=next(given.parameters()).dtype))
    layers = list(dict.fromkeys(order))
    axes: dict[str, Axes] = {}
    before, sides = 0, {layers[0].weight.shape[1]}
    paths = {module: path for path, module in model.named_modules()}
    for layer in layers:
        inputs = layer.weight.shape[1]
        outputs = layer is not layers[-1]
        # a linear layer behind a grid has a block of inputs for each channel
        blocks = inputs // before if isinstance(layer, nn.Linear) and before and inputs % before == 0 else 1
        if inputs // blocks not in sides:
            raise HardyError(
                f"layer {paths[layer]!r} has {inputs} inputs, which no layer before it gives: channels that are put "
                "together, or groups of them, cannot be cut. Take another model, or a method that cuts no channels "
                "(split_mix, depthfl)."
            )
        axes[f"{paths[layer]}.weight"] = Axes(outputs, 0 if layer is layers[0] else blocks)
        axes[f"{paths[layer]}.bias"] = Axes(outputs, 0)
        before = layer.weight.shape[0]
        sides.add(before)
    return axes


def _layers(model: nn.Module) -> list[_Layer]:
    return [module for module in model.modules() if isinstance(module, _Layer)]


class ChannelSubmodels(Submodels):
    """For each width r a window of ⌈r·C⌉ of the C outputs and inputs of every layer; it begins `advance` channels later
    with every round, and goes on at the first where it reaches the last. The image's channels and the classes are never
    cut."""

    def __init__(
        self,
        model: nn.Module,
        shape: ImageShape,
        widths: tuple[float, ...],
        *,
        slimmable: bool = False,
        advance: int = 0,
        scaler: bool = False,
    ) -> None:
        self.widths, self.slimmable, self.advance, self.scaler = widths, slimmable, advance, scaler
        self.moves = advance > 0
        self.axes: Mapping[str, Axes] = channel_axes(model, shape)
        self.whole = _shapes(model)

    def shapes(self, width: float) -> Shapes:
        """The shapes of the sub-network. What belongs to no layer is a norm's, and follows its channels."""

        def kept(axis: int, size: int, unit: int) -> int:
            return max(1, ceil(width * size / unit - 1e-9)) * unit if unit and width < 1 else size

        return {n: tuple(map(kept, range(len(own)), own, self._units(n))) for n, own in self.whole.items()}

    def cut(self, values: Tensors, capacity: float, round_number: int, received: Tensors) -> Tensors:
        shapes = self.shapes(self._width(capacity))
        return {n: self._corner(n, t, shapes[n], round_number) if n in shapes else t for n, t in values.items()}

    def paste(self, part: Tensors, values: Tensors, capacity: float, round_number: int) -> Tensors:
        return {n: self._pasted(n, part[n], t, round_number) if t.dim() else part[n] for n, t in values.items()}

    def held(self, capacity: float, round_number: int, shared: Tensors) -> Tensors:
        masks = {}
        for name, size in self.shapes(self._width(capacity)).items():
            if name in shared:
                mask = torch.zeros(self.whole[name], dtype=torch.bool, device=shared[name].device)
                mask[tuple(map(slice, size))] = True
                masks[name] = self._rolled(name, mask, round_number, back=True)
        return masks

    def sizes(self, capacity: float) -> dict[str, float]:
        return {name: prod(size) for name, size in self.shapes(self._width(capacity)).items()}

    def trained(self, capacity: float) -> tuple[float, ...]:
        return tuple(reversed(fitting(self.widths, capacity))) if self.slimmable else (self._width(capacity),)

    def alone(self, inner: Objective, capacity: float, round_number: int) -> Objective:
        if not self.scaler or capacity == 1:
            return inner
        last = next(reversed([name.rpartition(".")[0] for name in self.axes]))
        scaled = tuple(name for name in self.axes if name.rpartition(".")[0] != last)
        return Scaled(inner=inner, gain=1 / capacity, names=scaled)

    def _width(self, capacity: float) -> float:
        return max(fitting(self.widths, capacity))

    def _units(self, name: str) -> list[int]:
        """For each axis of a tensor, how many entries belong to a channel; 0: it is not cut."""
        outputs, cells = self.axes.get(name, Axes(True, 0))
        return [int(outputs), cells, *[0] * len(self.whole[name])][: len(self.whole[name])]

    def _rolled(self, name: str, value: Tensor, round_number: int, *, back: bool = False) -> Tensor:
        """The tensor with the first channel of the round's window in the first place."""
        sign = 1 if back else -1
        moved = {
            axis: sign * unit * (self.advance * round_number % (self.whole[name][axis] // unit))
            for axis, unit in enumerate(self._units(name))
            if unit
        }
        moved = {axis: by for axis, by in moved.items() if by}
        return value.roll(tuple(moved.values()), tuple(moved)) if moved else value

    def _corner(self, name: str, value: Tensor, size: tuple[int, ...], round_number: int) -> Tensor:
        if not size or size == self.whole[name]:
            return value
        return self._rolled(name, value, round_number)[tuple(map(slice, size))]

    def _pasted(self, name: str, part: Tensor, whole: Tensor, round_number: int) -> Tensor:
        if part.shape == whole.shape:
            return part
        rest = self._rolled(name, whole, round_number)[len(part) :]
        return self._rolled(name, torch.cat([part, rest]), round_number, back=True)


def _shapes(model: nn.Module) -> Shapes:
    """Of the tensors that take part in training, and of statistics that are sent again in every round."""
    known = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    copies = {
        f"{path}.{name}": tuple(buffer.shape)
        for path, module in model.named_modules()
        if isinstance(module, Statistics)
        for name, buffer in module.named_buffers(recurse=False)
    }
    return {name: known[name] for name in tags(model)} | copies


@dataclass(frozen=True, kw_only=True)
class Scaled(Wrapper):
    """HeteroFL's scaler: what every layer but the last gives is multiplied by 1/r while the network learns, and not
    where it is served or attacked."""

    gain: float
    names: tuple[str, ...]
    """weights and biases of these layers"""

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        scaled = _ScaledNet(net.model, net.trained, net.buffers)
        scaled.received, scaled.offset, scaled.gain = net.received, net.offset, dict.fromkeys(self.names, self.gain)
        loss = self.inner.loss(scaled, private, batch, key)
        net.buffers = scaled.buffers
        return loss


class _ScaledNet(Net):
    gain: Mapping[str, float]

    def together(self, *passes: tuple[Tensor, Call]) -> list[Tensor]:
        if all(call.key is None for _, call in passes):
            return super().together(*passes)
        learning = self.on({n: t * self.gain.get(n, 1.0) for n, t in self.trained.items()}, self.buffers)
        found = Net.together(learning, *passes)
        self.buffers = learning.buffers
        return found


# The mean


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class HeldMean(Aggregator):
    """The weighted mean of every entry over the clients that trained it. Counters take the largest value."""

    @property
    def uses_weights(self) -> bool:
        return True

    def check(self, method: Method, setting: Setting) -> None:
        if not isinstance(method.budget, SubnetworkBudget):
            raise HardyError(
                f"aggregator held_mean averages over those who hold an entry, but with budget "
                f"{name_part(method.budget)!r} everybody holds all. Usual fix: budget corners, or aggregator mean."
            )

    def fold(self, folded: Any, updates: Updates, context: RoundContext) -> tuple[Tensors, Tensors, Tensors]:
        floating = {n: t for n, t in context.shared.items() if t.is_floating_point()}
        total, weight, counters = folded or (
            *(tensors.apply(torch.zeros_like, floating) for _ in range(2)),
            context.shared,
        )
        total, weight = dict(total), dict(weight)
        capacity = [context.capacities[slot.client] if context.capacities else 1.0 for slot in updates.slots]
        share = updates.weights.new_zeros(context.bases, len(capacity))
        share[updates.bases, torch.arange(len(capacity), device=share.device)] = updates.weights
        for each in sorted(set(capacity)):
            alike = [at for at, own in enumerate(capacity) if own == each]
            held, rows = context.held(updates.slots[alike[0]].client), tensors.send(alike, share.device)
            for name in floating:
                value = updates.shared[name][rows]
                own = share[:, rows].to(value)
                with tensors.full_precision():
                    added = torch.tensordot(own, value, 1)
                counted = tensors.expand_trailing(own.sum(1), value).expand_as(added)
                if name in held:
                    added, counted = (t.where(held[name], 0.0) for t in (added, counted))
                total[name], weight[name] = total[name] + added, weight[name] + counted
        return total, weight, largest_counters(counters, updates)

    def merge(self, folded: Any, ranks: Ranks) -> Any:
        return ranks.total(folded)

    def finish(self, folded: Any, context: RoundContext, memory: Tensors) -> tuple[Tensors, Tensors]:
        if folded is None:
            return context.shared, memory
        total, weight, counters = folded
        mean = {
            name: torch.where(weight[name] > 0, value / weight[name].clamp_min(1e-30), context.shared[name])
            for name, value in total.items()
        }
        return {**context.shared, **mean, **counters}, memory


held_mean = HeldMean
__all__ = ["held_mean"]
