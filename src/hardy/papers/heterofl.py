"""HeteroFL: a client trains the corner of the network that it can afford; SHeteroFL: and every narrower one in it.

Diao et al., HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients, ICLR 2021.
Hong et al., Split-Mix, ICLR 2022, §4.1 (SHeteroFL, after Yu et al., Slimmable Neural Networks, ICLR 2019).

W the ×1 network · R_k the width client k can train · W[r] the first ⌈r·C⌉ of the C outputs and inputs of every layer;
the image's channels and the classes are never cut
1. The server sends client k the corner W[R_k].
2. It trains that corner; SHeteroFL: on the sum of the losses of all widths r ≤ R_k, in one step.
3. Every entry of W is averaged over the clients that hold it, each client counted once, weighted by its examples;
   an entry nobody holds keeps its value.
4. Width r is served by W[r].
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hardy.core import random, tensors
from hardy.core.messages import Updates
from hardy.core.method import Method
from hardy.core.net import Net
from hardy.core.protocols import (
    Aggregator,
    Batch,
    Budget,
    Fact,
    Norm,
    Objective,
    Optimiser,
    RoundContext,
    Setting,
    Shapes,
    Submodels,
    Wrapper,
    name_part,
)
from hardy.core.tensors import ImageShape, Tensors
from hardy.errors import HardyError, unknown
from hardy.parts.aggregators.base import largest_counters
from hardy.parts.norms import batch
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd
from hardy.registry import part

_WIDTHS = (0.125, 0.25, 0.5, 1.0)


class Axes(NamedTuple):
    """Which axes of a tensor are cut: the outputs, and the inputs in blocks of so many cells a channel (0: never)."""

    outputs: bool
    cells: int


def channel_axes(model: nn.Module, shape: ImageShape) -> dict[str, Axes]:
    """How each tensor of a model is cut, from one forward pass: by the type of its layer and what feeds it."""
    given = deepcopy(model).to("meta")  # nothing is computed, and the model stays as it is
    own = dict(zip(_layers(given), _layers(model), strict=True))
    order: list[nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear] = []
    for layer in own:
        layer.register_forward_hook(lambda module, *_: order.append(own[module]))
    given(torch.empty(1, *shape, device="meta", dtype=next(given.parameters()).dtype))
    layers = list(dict.fromkeys(order))
    axes: dict[str, Axes] = {}
    before = 0
    paths = {module: path for path, module in model.named_modules()}
    for layer in layers:
        inputs = layer.weight.shape[1]
        outputs = layer is not layers[-1]
        # a linear layer behind a grid has a block of inputs for each channel
        blocks = inputs // before if isinstance(layer, nn.Linear) and before and inputs % before == 0 else 1
        axes[f"{paths[layer]}.weight"] = Axes(outputs, 0 if layer is layers[0] else blocks)
        axes[f"{paths[layer]}.bias"] = Axes(outputs, 0)
        before = layer.weight.shape[0]
    return axes


def _layers(model: nn.Module) -> list[nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear)]


@dataclass(frozen=True)
class Corners(Submodels):
    """The corners W[r] of a model, a width each."""

    widths: tuple[float, ...]
    slimmable: bool
    whole: Shapes
    axes: Mapping[str, Axes]

    def corner(self, width: float) -> Shapes:
        """The shapes of W[r]. What belongs to no layer is a norm's, and follows its channels."""

        def cut(size: int, cells: int = 1) -> int:
            return max(1, ceil(width * size / cells - 1e-9)) * cells

        shapes = {}
        for name, shape in self.whole.items():
            outputs, cells = self.axes.get(name, Axes(True, 0))
            kept = list(shape)
            if shape and outputs and width < 1:
                kept[0] = cut(shape[0])
            if cells and width < 1:
                kept[1] = cut(shape[1], cells)
            shapes[name] = tuple(kept)
        return shapes

    def shapes(self, capacity: float) -> Shapes:
        return self.corner(max(fitting(self.widths, capacity)))

    def objective(self, inner: Objective, capacity: float) -> Objective:
        affordable = fitting(self.widths, capacity)
        return _Slimmed(inner=inner, corners=self, trained=tuple(affordable if self.slimmable else affordable[-1:]))

    def __hash__(self) -> int:
        return hash((self.widths, self.slimmable))


def cut_tensors(values: Tensors, corner: Shapes) -> Tensors:
    return {name: value[tuple(map(slice, corner[name]))] if value.dim() else value for name, value in values.items()}


def fitting(widths: Sequence[float], capacity: float) -> list[float]:
    """The widths that a client can afford, the widest last."""
    return [width for width in sorted(widths) if width <= capacity + 1e-9]


@dataclass(frozen=True, kw_only=True)
class _Slimmed(Wrapper):
    """An objective on the corner of the network that a client can afford, or on all affordable corners at once."""

    corners: Corners
    trained: tuple[float, ...]
    """widths of a step, the widest last; their losses are added up"""

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        losses = []
        for number, width in enumerate(reversed(self.trained)):
            corner = self.corners.corner(width)
            received = {name: value for name, value in net.received.items() if name in corner}
            narrow = net.on(cut_tensors(net.trained, corner), cut_tensors(net.buffers, corner))
            narrow = narrow.knowing(cut_tensors(received, corner))
            losses.append(self.inner.loss(narrow, private, batch, random.fold(key, number) if number else key))
            net.buffers = {name: _paste(narrow.buffers[name], whole) for name, whole in net.buffers.items()}
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def _paste(part: Tensor, whole: Tensor) -> Tensor:
    return torch.cat([part, whole[len(part) :]]) if whole.dim() else part


@part("budget", name="corners")
@dataclass(frozen=True, kw_only=True)
class CornerBudget(Budget):
    """Every client trains the widest corner of the one network that it can afford."""

    widths: tuple[float, ...] = _WIDTHS
    """trained and served"""
    slimmable: bool = False
    """a client trains every width it can afford, the losses added up, and not the widest alone"""

    def __post_init__(self) -> None:
        if not self.widths or not all(0 < width <= 1 for width in self.widths):
            raise HardyError(f"widths are {list(self.widths)}; each must be in (0, 1], and there must be one.")

    @property
    def consumes(self) -> frozenset[Fact]:
        return frozenset({"capacity"})

    def check(self, method: Method, setting: Setting) -> None:
        if not any(isinstance(part, HeldMean) for part in method.parts()):
            raise HardyError(
                f"budget corners trains parts of the network, but aggregator {name_part(method.aggregator)!r} counts "
                "what a client did not train as its opinion. Usual fix: aggregator held_mean."
            )
        for number, client in enumerate(setting.sorts):
            if not fitting(self.widths, client.capacity):
                raise HardyError(
                    f"client {number} can train a width of {client.capacity:g}, below the least of "
                    f"{list(self.widths)}. Add a narrower one (method.widths), or raise its capacity (data.capacity)."
                )

    def submodels(self, model: nn.Module, shape: ImageShape) -> Submodels:
        whole = {n: tuple(t.shape) for n, t in (*model.named_parameters(), *model.named_buffers())}
        return Corners(self.widths, self.slimmable, whole, channel_axes(model, shape))

    def serve(self, held: Tensors, width: float, submodels: Submodels | None = None) -> list[Tensors]:
        if width not in self.widths:
            raise unknown("width; it must be one that was trained", f"{width:g}", (f"{w:g}" for w in self.widths))
        assert isinstance(submodels, Corners)
        return [cut_tensors(tensors.gather(held, 0), submodels.corner(width))]


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class HeldMean(Aggregator):
    """The weighted mean of every entry over the clients that hold it. Counters take the largest value."""

    @property
    def uses_weights(self) -> bool:
        return True

    def check(self, method: Method, setting: Setting) -> None:
        if not isinstance(method.budget, CornerBudget):
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
        total, weight = tensors.apply(Tensor.clone, total), tensors.apply(Tensor.clone, weight)
        held = [context.capacities[slot.client] if context.capacities else 1.0 for slot in updates.slots]
        share = updates.weights.new_zeros(context.bases, len(held))
        share[updates.bases, torch.arange(len(held), device=share.device)] = updates.weights
        for capacity in sorted(set(held)):
            rows = tensors.send([at for at, own in enumerate(held) if own == capacity], share.device)
            corner = context.submodels.shapes(capacity) if context.submodels else {}
            for name in floating:
                at = (slice(None), *map(slice, corner.get(name, floating[name].shape[1:])))
                value = updates.shared[name][rows][at]
                own = share[:, rows].to(value)
                with tensors.full_precision():
                    total[name][at] += torch.tensordot(own, value, 1)
                weight[name][at] += tensors.expand_trailing(own.sum(1), value)
        return total, weight, largest_counters(counters, updates)

    def finish(self, folded: Any, context: RoundContext, memory: Tensors) -> tuple[Tensors, Tensors]:
        if folded is None:
            return context.shared, memory
        total, weight, counters = folded
        mean = {
            name: torch.where(weight[name] > 0, value / weight[name].clamp_min(1e-30), context.shared[name])
            for name, value in total.items()
        }
        return {**context.shared, **mean, **counters}, memory


corners, held_mean = CornerBudget, HeldMean


@part("method")
def heterofl(
    *,
    widths: tuple[float, ...] = _WIDTHS,
    slimmable: bool = False,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """Each client trains the widest corner of one network that it can afford; widths are those trained and served."""
    return Method(
        name="sheterofl" if slimmable else "heterofl",
        norm=norm,
        objective=objective,
        optimiser=optimiser,
        budget=corners(widths=widths, slimmable=slimmable),
        aggregator=held_mean(),
    )


@part("method")
def sheterofl(
    *,
    widths: tuple[float, ...] = _WIDTHS,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """HeteroFL whose clients train every width they can afford, as slimmable networks."""
    return heterofl(widths=widths, slimmable=True, norm=norm, objective=objective, optimiser=optimiser)


__all__ = ["corners", "held_mean", "heterofl", "sheterofl"]
