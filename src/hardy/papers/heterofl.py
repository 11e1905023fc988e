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
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from hardy.core import random, tensors
from hardy.core.federation import Client
from hardy.core.messages import Slot, Updates
from hardy.core.method import Method
from hardy.core.net import Net
from hardy.core.tensors import Tensors
from hardy.errors import HardyError, unknown
from hardy.parts.aggregators.base import Aggregator, RoundContext, largest_counters
from hardy.parts.budgets import Budget
from hardy.parts.norms import Norm, batch
from hardy.parts.objectives import Batch, Objective, Wrapper, cross_entropy
from hardy.registry import part

Shapes = Mapping[str, Sequence[int]]
_WIDTHS = (0.125, 0.25, 0.5, 1.0)


def narrowed(shapes: Shapes, width: float) -> dict[str, tuple[int, ...]]:
    """The shapes of the corner W[r], out of those of a network's tensors in the order of its layers."""
    if width == 1:
        return {name: tuple(shape) for name, shape in shapes.items()}

    def cut(size: int, cells: int = 1) -> int:
        return max(1, ceil(width * size / cells - 1e-9)) * cells

    layers = [name for name, shape in shapes.items() if len(shape) > 1]
    last = layers[-1].rpartition(".")[0]
    corner, before = {}, 1
    for name, shape in shapes.items():
        kept = list(shape)
        if shape and name.rpartition(".")[0] != last:
            kept[0] = cut(shape[0])
        if len(shape) > 1:
            if name != layers[0]:  # a linear layer behind a grid has a block of inputs a channel
                cells = shape[1] // before if len(shape) == 2 and shape[1] % before == 0 else 1
                kept[1] = cut(shape[1], cells)
            before = shape[0]
        corner[name] = tuple(kept)
    return corner


def cut(values: Tensors, corner: Shapes) -> Tensors:
    return {name: value[tuple(map(slice, corner[name]))] if value.dim() else value for name, value in values.items()}


def fitting(widths: Sequence[float], capacity: float) -> list[float]:
    """The widths that a client can afford, the widest last."""
    return [width for width in sorted(widths) if width <= capacity + 1e-9]


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Slimmed(Wrapper):
    """An objective on the corner of the network that the client can afford, or on all affordable corners at once."""

    inner: Objective = cross_entropy()
    widths: tuple[float, ...] = _WIDTHS
    slimmable: bool = False
    """train every affordable width, the losses added up, and not the widest alone"""

    def within(self, capacity: float) -> Objective:
        return replace(self, inner=self.inner.within(capacity), widths=tuple(fitting(self.widths, capacity)))

    @property
    def trained(self) -> list[float]:
        """Widths of a step, the widest last."""
        return sorted(self.widths) if self.slimmable else [max(self.widths)]

    def corner(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        return narrowed(shapes, max(self.widths))

    def nets(self, shapes: Shapes) -> list[dict[str, tuple[int, ...]]]:
        return [narrowed(shapes, width) for width in self.trained]

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        shapes, losses = tensors.shapes({**net.trained, **net.kept}), []
        for number, width in enumerate(reversed(self.trained)):
            corner = narrowed(shapes, width)
            narrow = Net(net.model, cut(net.trained, corner), cut(net.kept, corner))
            losses.append(self.inner.loss(narrow, private, batch, random.fold(key, number) if number else key))
            net.kept = {name: _paste(narrow.kept[name], whole) for name, whole in net.kept.items()}
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def _paste(part: Tensor, whole: Tensor) -> Tensor:
    return torch.cat([part, whole[len(part) :]]) if whole.dim() else part


@part("budget")
@dataclass(frozen=True, kw_only=True)
class Corners(Budget):
    """Every client trains the widest corner of the one network that it can afford."""

    widths: tuple[float, ...] = _WIDTHS

    def __post_init__(self) -> None:
        if not self.widths or not all(0 < width <= 1 for width in self.widths):
            raise HardyError(f"widths are {list(self.widths)}; each must be in (0, 1], and there must be one.")

    def check(self, clients: Sequence[Client]) -> None:
        for number, client in enumerate(clients):
            if not fitting(self.widths, client.capacity):
                raise HardyError(
                    f"client {number} can train a width of {client.capacity:g}, below the least of {list(self.widths)}. "
                    "Add a narrower one (method.widths), or raise its capacity (data.capacity)."
                )

    def assign(self, round: int, cohort: Sequence[int], clients: Sequence[Client], seed: int) -> list[Slot]:
        return [Slot(client) for client in cohort]

    def serve(self, held: Tensors, width: float) -> list[Tensors]:
        if width not in self.widths:
            raise unknown("width; it must be one that was trained", f"{width:g}", (f"{w:g}" for w in self.widths))
        whole = tensors.gather(held, 0)
        return [cut(whole, narrowed(tensors.shapes(whole), width))]


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class HeldMean(Aggregator):
    """The weighted mean of every entry over the clients that hold it. Counters take the largest value."""

    widths: tuple[float, ...] = _WIDTHS

    @property
    def uses_weights(self) -> bool:
        return True

    def fold(self, folded: Any, updates: Updates, context: RoundContext) -> tuple[Tensors, Tensors, Tensors]:
        floating = {n: t for n, t in context.shared.items() if t.is_floating_point()}
        total, weight, counters = folded or (
            *(tensors.apply(torch.zeros_like, floating) for _ in range(2)),
            context.shared,
        )
        total, weight = tensors.apply(Tensor.clone, total), tensors.apply(Tensor.clone, weight)
        shapes = {n: tuple(context.shared[n].shape[1:]) for n in context.roles if n in context.shared}
        held = [
            max(fitting(self.widths, context.capacities[s.client])) if context.capacities else 1.0
            for s in updates.slots
        ]
        share = updates.weights.new_zeros(context.bases, len(held))
        share[updates.bases, torch.arange(len(held), device=share.device)] = updates.weights
        for width in sorted(set(held)):
            rows = tensors.send([at for at, own in enumerate(held) if own == width], share.device)
            corner = narrowed(shapes, width)
            for name in floating:
                at = (slice(None), *map(slice, corner[name]))
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


corners, held_mean, slimmed = Corners, HeldMean, Slimmed


@part("method")
def heterofl(
    *,
    widths: tuple[float, ...] = _WIDTHS,
    slimmable: bool = False,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
) -> Method:
    """Each client trains the widest corner of one network that it can afford; widths are those trained and served."""
    return Method(
        name="sheterofl" if slimmable else "heterofl",
        norm=norm,
        objective=slimmed(inner=objective, widths=widths, slimmable=slimmable),
        budget=corners(widths=widths),
        aggregator=held_mean(widths=widths),
    )


@part("method")
def sheterofl(
    *, widths: tuple[float, ...] = _WIDTHS, norm: Norm = batch(), objective: Objective = cross_entropy()
) -> Method:
    """HeteroFL whose clients train every width they can afford, as slimmable networks."""
    return heterofl(widths=widths, slimmable=True, norm=norm, objective=objective)


__all__ = ["corners", "held_mean", "heterofl", "narrowed", "sheterofl", "slimmed"]
