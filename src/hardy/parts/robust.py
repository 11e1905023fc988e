"""Rules and stages that hold while up to f of the n clients lie.

x_i update of client i, a row of a matrix [S, D] · x what was sent down · Δ_i = x_i − x, how far client i moved

Two mechanisms carry them all:
- coordinate by coordinate: the mean of the middle values of each column (median, trimmed mean);
- by geometry: the products ⟨Δ_i, Δ_j⟩, [S, S] in float64, hold every norm and distance. A rule turns them into weights,
  however often it iterates, and the result is weights times updates: the matrix is read twice.

Working copies are cut into blocks of columns (`_MIB`), so memory beyond the updates does not grow with the model.
Updates are finite, since admission refuses any other; no rule makes a NaN out of finite ones.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hardy import random, tensors
from hardy.errors import HardyError
from hardy.messages import Slot, Updates
from hardy.parts.aggregation import Aggregator, Frame, Stage, largest_counters
from hardy.registry import part
from hardy.tensors import Tensors

_MIB = {"cpu": 4, "cuda": 512}
"""working copy of one block of columns: on the CPU it should stay in the cache, on a GPU outlast a kernel's launch"""
_NETWORK = {"cpu": 32, "cuda": 64}
"""updates up to which comparing whole rows beats sorting columns"""
_COVERS = 16
"""largest f of minimum_diameter"""

Weigh = Literal["samples", "uniform"]


def _blocks(matrix: Tensor) -> list[slice]:
    """Columns in pieces of `_MIB`."""
    width = max(1, _MIB[matrix.device.type] * 2**20 // (len(matrix) * matrix.element_size()))
    return [slice(first, first + width) for first in range(0, matrix.shape[1], width)]


# coordinate by coordinate


def middle_mean(matrix: Tensor, trim: int) -> Tensor:
    """The mean of each column without its `trim` smallest and largest values, [S, D] -> [D]."""
    if len(matrix) <= _NETWORK[matrix.device.type]:
        return _by_network(matrix, trim)
    return _by_sorting_on_cpu(matrix, trim) if matrix.device.type == "cpu" else _by_sorting(matrix, trim)


def _by_network(matrix: Tensor, trim: int) -> Tensor:
    """Compares whole rows, elementwise: no gather, no branch, and nearly at the speed of memory."""
    count, middle = len(matrix), matrix.new_empty(matrix.shape[1])
    for block in _blocks(matrix):
        *rows, spare = torch.cat([matrix[:, block], matrix[:1, block]]).unbind()
        for low, high, least, greatest in _network(count, trim):
            if least and greatest:
                torch.minimum(rows[low], rows[high], out=spare)
                torch.maximum(rows[low], rows[high], out=rows[high])
                rows[low], spare = spare, rows[low]
            elif least:
                torch.minimum(rows[low], rows[high], out=rows[low])
            else:
                torch.maximum(rows[low], rows[high], out=rows[high])
        total = rows[trim]
        for row in rows[trim + 1 : count - trim]:
            total += row
        torch.div(total, count - 2 * trim, out=middle[block])
    return middle


@cache
def _network(count: int, trim: int) -> tuple[tuple[int, int, bool, bool], ...]:
    """Batcher's odd-even merge sort without what the sum of the middle rows does not need.

    (low, high, is the smaller value needed, is the greater one), in order. Going backwards, a comparison is left out
    while both of its rows are thrown away, or both only summed.
    """
    compared, merged = [], 1
    while merged < count:
        stride = merged
        while stride:
            for first in range(stride % merged, count - stride, 2 * stride):
                for low in range(first, min(first + stride, count - stride)):
                    if low // (2 * merged) == (low + stride) // (2 * merged):
                        compared.append((low, low + stride))
            stride //= 2
        merged *= 2
    fate = ["summed" if trim <= row < count - trim else "dropped" for row in range(count)]
    kept = []
    for low, high in reversed(compared):
        if fate[low] != fate[high] or fate[low] == "compared":
            kept.append((low, high, fate[low] != "dropped", fate[high] != "dropped"))
            fate[low] = fate[high] = "compared"
    return tuple(reversed(kept))


def _by_sorting(matrix: Tensor, trim: int) -> Tensor:
    keep, middle = slice(trim, len(matrix) - trim), matrix.new_empty(matrix.shape[1])
    for block in _blocks(matrix):
        torch.mean(matrix[:, block].sort(0).values[keep], 0, out=middle[block])
    return middle


def _by_sorting_on_cpu(matrix: Tensor, trim: int) -> Tensor:
    """numpy sorts short contiguous rows ten times as fast as torch sorts columns, and lets other threads run."""
    array, keep = matrix.numpy(), slice(trim, len(matrix) - trim)
    middle = np.empty(matrix.shape[1], array.dtype)

    def sort(block: slice) -> None:
        columns = np.ascontiguousarray(array[:, block].T)
        columns.sort(axis=1)
        columns[:, keep].mean(axis=1, out=middle[block])

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(sort, _blocks(matrix)))
    return torch.from_numpy(middle)


# by geometry


def _sent(updates: Updates, frame: Frame) -> Tensor:
    """x, [1, D]"""
    base = updates.slots[0].base
    return tensors.flatten(tensors.gather(frame.shared, slice(base, base + 1)), updates.weights[:1])


def _changes(updates: Updates, frame: Frame) -> Iterator[Tensor]:
    """Δ in float64, block by block, each written over the one before."""
    matrix, sent = updates.matrix, _sent(updates, frame).double()
    buffer = None
    for block in _blocks(matrix):
        here = matrix[:, block]
        buffer = torch.empty_like(here, dtype=torch.float64) if buffer is None else buffer
        yield torch.sub(here, sent[:, block], out=buffer[:, : here.shape[1]])


def _products(updates: Updates, frame: Frame) -> Tensor:
    """⟨Δ_i, Δ_j⟩, [S, S]. From where the round began, since far from there distances drown in rounding."""
    products = updates.matrix.new_zeros(len(updates.slots), len(updates.slots), dtype=torch.float64)
    for change in _changes(updates, frame):
        products.addmm_(change, change.T)
    return products


def _squared_distances(updates: Updates, frame: Frame) -> Tensor:
    """‖x_i − x_j‖², [S, S]"""
    products = _products(updates, frame)
    return (products.diagonal()[:, None] + products.diagonal() - 2 * products).clamp_min(0.0)


def _blend(weights: Tensor, updates: Updates, frame: Frame) -> Tensor:
    """Σ w_i x_i + (1 − Σ w_i) x, [T, S] -> [T, D]"""
    with tensors.full_precision():
        blend = weights.to(updates.matrix) @ updates.matrix
    return blend.addcmul_(1 - weights.sum(1, keepdim=True).to(blend), _sent(updates, frame))


def _named(row: Tensor, updates: Updates, frame: Frame) -> Tensors:
    """A combined row as tensors; counters take the largest value."""
    base = updates.slots[0].base
    values = tensors.gather(tensors.unflatten(row[None], updates.shared), 0)
    return values | tensors.gather(largest_counters(frame.shared, updates), base)


def _shares(updates: Updates, weigh: Weigh) -> Tensor:
    weights = updates.weights.double() if weigh == "samples" else torch.ones_like(updates.weights, dtype=torch.float64)
    return weights / weights.sum()


@dataclass(frozen=True, kw_only=True)
class _Withstands:
    """A part made for a number of liars."""

    f: int
    """f, the clients that may lie"""

    def __post_init__(self) -> None:
        if self.f < 0:
            raise HardyError(f"f is {self.f} in {self}; it must be 0 or more.")


# rules


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class CoordinateMedian(Aggregator):
    """The middle value of each number, or the mean of the two middle ones (Yin et al., ICML 2018)."""

    def combine(self, updates: Updates, frame: Frame) -> Tensors:
        return _named(middle_mean(updates.matrix, (len(updates.slots) - 1) // 2), updates, frame)


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class TrimmedMean(_Withstands, Aggregator):
    """The mean of each number without its f smallest and f largest values (Yin et al., ICML 2018)."""

    @property
    def least(self) -> int:
        return 2 * self.f + 1

    def combine(self, updates: Updates, frame: Frame) -> Tensors:
        return _named(middle_mean(updates.matrix, self.f), updates, frame)


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class GeometricMedian(Aggregator):
    """The point with the least sum of distances to the updates, by smoothed Weiszfeld steps (Pillutla et al., 2022)."""

    weigh: Weigh = "uniform"
    iterations: int = 32
    smoothing: float = 1e-6
    """ν, below which a distance counts as ν"""

    def __post_init__(self) -> None:
        if self.iterations < 1 or not self.smoothing > 0:
            raise HardyError(f"{self}: iterations must be 1 or more, and smoothing (ν) above 0.")

    @property
    def weighted(self) -> bool:
        return self.weigh == "samples"

    def combine(self, updates: Updates, frame: Frame) -> Tensors:
        shares, products = _shares(updates, self.weigh), _products(updates, frame)
        lengths = products.diagonal()
        # starts among the updates that have the others near: one on which it starts would hold it for 1/ν steps
        distances = (lengths[:, None] + lengths - 2 * products).clamp_min(0.0).sqrt().median(1).values
        for _ in range(self.iterations + 1):
            weights = shares / distances.clamp_min(self.smoothing)
            weights = weights / weights.sum()
            towards = products @ weights
            distances = (lengths - 2 * towards + weights @ towards).clamp_min(0.0).sqrt()
        return _named(_blend(weights[None], updates, frame)[0], updates, frame)


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class MultiKrum(_Withstands, Aggregator):
    """The mean of the updates with the least squared distances to their n − f − 2 nearest (Blanchard et al., 2017)."""

    keep: int | None = None
    """m, the updates averaged; absent: n − f"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is not None and self.keep < 1:
            raise HardyError(f"keep is {self.keep} in {self}; it must be 1 or more, or absent.")

    @property
    def least(self) -> int:
        return max(2 * self.f + 3, self.f + (self.keep or 0))

    def combine(self, updates: Updates, frame: Frame) -> Tensors:
        count = len(updates.slots)
        scores = _krum_scores(_squared_distances(updates, frame), count, self.f)
        keep = self.keep or count - self.f
        best = scores.topk(keep, largest=False).indices
        weights = torch.zeros_like(scores).index_fill(0, best, 1 / keep)
        return _named(_blend(weights[None], updates, frame)[0], updates, frame)


def _krum_scores(squared: Tensor, count: int, f: int) -> Tensor:
    """Of each update, the squared distances to the nearest count − f − 2 others. Those left out are infinitely far."""
    return squared.sort(1).values[:, 1 : count - f - 1].sum(1)


@part("aggregator")
def krum(*, f: int) -> MultiKrum:
    """The one update with the least squared distances to its n − f − 2 nearest (Blanchard et al., NeurIPS 2017)."""
    return MultiKrum(f=f, keep=1)


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class Bulyan(_Withstands, Aggregator):
    """Krum over and over, then of each number the mean of the values nearest to the median (El Mhamdi et al., 2018).

    Krum chooses θ = n − 2f − 2 updates one by one, so that the last choice, too, is among the 2f + 3 it needs; of each
    number θ − 2f values are kept.
    """

    @property
    def least(self) -> int:
        return 4 * self.f + 3

    def combine(self, updates: Updates, frame: Frame) -> Tensors:
        squared, chosen = _squared_distances(updates, frame), []
        for left in range(len(updates.slots), 2 * self.f + 2, -1):
            best = _krum_scores(squared, left, self.f).argmin(keepdim=True)
            squared = squared.index_fill(0, best, torch.inf).index_fill(1, best, torch.inf)
            chosen.append(best)
        keep, row = len(chosen) - 2 * self.f, updates.matrix.new_empty(updates.matrix.shape[1])
        for block in _blocks(updates.matrix):
            rows = updates.matrix[:, block][torch.cat(chosen)]
            away = (rows - middle_mean(rows, (len(rows) - 1) // 2)).abs()
            row[block] = rows.gather(0, away.topk(keep, 0, largest=False).indices).mean(0)
        return _named(row, updates, frame)


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class MinimumDiameter(_Withstands, Aggregator):
    """The mean of the n − f updates of least diameter (Rousseeuw, 1985; El Mhamdi et al., PODC 2020).

    Of several sets with that diameter, the one with the least sum of squared distances, so that order is irrelevant.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.f > _COVERS:
            raise HardyError(
                f"minimum_diameter f is {self.f}; it must be {_COVERS} or less, because up to 2^f sets of clients are "
                "tried. Usual fix: nearest_neighbour_mixing before trimmed_mean, which costs no more for a larger f."
            )

    @property
    def least(self) -> int:
        return 2 * self.f + 1

    def combine(self, updates: Updates, frame: Frame) -> Tensors:
        squared = _squared_distances(updates, frame).cpu().numpy()
        levels = np.unique(squared)
        # the least diameter at which f updates can be left out so that no pair further apart remains
        reached = bisect_left(levels, True, key=lambda level: any(True for _ in _covers(squared > level, self.f)))
        kept = [np.delete(np.arange(len(squared)), gone) for gone in _covers(squared > levels[reached], self.f)]
        best = min(kept, key=lambda rows: squared[np.ix_(rows, rows)].sum())
        weights = np.bincount(best, minlength=len(squared)) / len(best)
        here = tensors.send(torch.from_numpy(weights), updates.weights.device)
        return _named(_blend(here[None], updates, frame)[0], updates, frame)


def _covers(far: np.ndarray[Any, np.dtype[np.bool_]], f: int) -> Iterator[list[int]]:
    """All choices of f updates or fewer without which no pair is far: the vertex covers of that graph."""
    degree = far.sum(1)
    worst = int(degree.argmax())
    if not degree[worst]:
        yield []
    elif degree.sum() <= 2 * f * degree[worst]:  # else f updates cannot be in all those pairs
        for gone in ([worst], far[worst].nonzero()[0].tolist()):
            if len(gone) <= f:
                left = far.copy()
                left[gone, :] = left[:, gone] = False
                yield from (gone + more for more in _covers(left, f - len(gone)))


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class CentredClipping(Aggregator):
    """What was sent down, plus the mean of the clients' moves, none longer than a radius (Karimireddy et al., 2021).

    The paper's centre is the last aggregate of gradients. Here updates are models, so that is x itself: nothing is
    remembered that an attack could spoil, and no client moves a base by more than radius / n in an iteration.
    """

    radius: float
    """τ"""
    iterations: int = 1
    """L; each starts at the result of the one before"""
    weigh: Weigh = "uniform"

    def __post_init__(self) -> None:
        if not self.radius > 0 or self.iterations < 1:
            raise HardyError(f"{self}: radius (τ) must be above 0, and iterations 1 or more.")

    @property
    def weighted(self) -> bool:
        return self.weigh == "samples"

    def combine(self, updates: Updates, frame: Frame) -> Tensors:
        shares, products = _shares(updates, self.weigh), _products(updates, frame)
        weights = torch.zeros_like(shares)  # the centre is x + Σ w_i Δ_i
        for _ in range(self.iterations):
            towards = products @ weights
            distances = (products.diagonal() - 2 * towards + weights @ towards).clamp_min(0.0).sqrt()
            clipped = shares * (self.radius / distances).clamp_max(1.0)
            weights = weights + clipped - clipped.sum() * weights
        return _named(_blend(weights[None], updates, frame)[0], updates, frame)


# stages


@dataclass(frozen=True, kw_only=True)
class _Reshapes(Stage):
    """A stage whose effect is in the values of the updates."""

    @property
    def weighs(self) -> bool:
        return False


def _mix(share: Tensor, slots: Sequence[Slot], updates: Updates, frame: Frame) -> Updates:
    """Each new update is a mean of the old ones, [T, S], and so are its figures. Counters take the largest value."""

    largest = {
        name: value.amax(0).expand(len(share), *value.shape[1:])
        for name, value in updates.shared.items()
        if not value.is_floating_point()
    }
    weights, steps, loss = (
        (share @ figure.double()).to(updates.weights) for figure in (updates.weights, updates.steps, updates.loss)
    )
    shared = updates.shared | largest
    mixed = replace(updates, slots=slots, shared=shared, weights=weights, steps=steps, loss=loss)
    return _with_matrix(_blend(share, updates, frame), mixed)


def _with_matrix(matrix: Tensor, updates: Updates) -> Updates:
    """The same with other values of the floating tensors."""
    changed = replace(updates, shared=updates.shared | tensors.unflatten(matrix, updates.shared), reported={})
    changed.__dict__["matrix"] = matrix  # fills the cached property: as large as all updates, it is not built twice
    return changed


@part("stage")
@dataclass(frozen=True, kw_only=True)
class NearestNeighbourMixing(_Withstands, _Reshapes):
    """NNM: each update becomes the mean of the n − f nearest to it, itself included (Allouah et al., AISTATS 2023)."""

    def least(self, after: int) -> int:
        return max(after, 2 * self.f + 1)

    def apply(self, updates: Updates, frame: Frame, memory: Tensors) -> tuple[Updates, Tensors]:
        squared, keep = _squared_distances(updates, frame), len(updates.slots) - self.f
        nearest = squared.topk(keep, 1, largest=False).indices
        return _mix(torch.zeros_like(squared).scatter(1, nearest, 1 / keep), updates.slots, updates, frame), memory


@part("stage")
@dataclass(frozen=True, kw_only=True)
class Bucketing(_Reshapes):
    """Updates dealt at random into buckets, each of which becomes its mean (Karimireddy et al., ICLR 2022).

    A liar spoils its whole bucket, so the rule that follows still meets f of them, among fewer.
    """

    size: int
    """s, updates a bucket; the last may have fewer"""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise HardyError(f"bucketing size (s) is {self.size}; it must be 1 or more.")

    def least(self, after: int) -> int:
        return self.size * (after - 1) + 1

    def apply(self, updates: Updates, frame: Frame, memory: Tensors) -> tuple[Updates, Tensors]:
        slots = updates.slots
        rng = random.stream(frame.seed, frame.round, "buckets", slots[0].base)
        by_client = np.argsort([slot.client for slot in slots])  # the order in which they came must not matter
        dealt = by_client[rng.permutation(len(slots))]
        buckets = [dealt[first : first + self.size] for first in range(0, len(slots), self.size)]
        share = np.stack([np.bincount(bucket, minlength=len(slots)) / len(bucket) for bucket in buckets])
        here = tensors.send(torch.from_numpy(share), updates.weights.device)
        return _mix(here, [slots[bucket[0]] for bucket in buckets], updates, frame), memory


def _lengths(updates: Updates, frame: Frame) -> Tensor:
    """‖Δ_i‖, [S, 1]"""
    squares = updates.matrix.new_zeros(len(updates.slots), 1, dtype=torch.float64)
    for change in _changes(updates, frame):
        squares += change.square_().sum(1, keepdim=True)
    return squares.sqrt()


def _clip(lengths: Tensor, radius: Tensor | float, updates: Updates, frame: Frame) -> Updates:
    """No update further from what was sent down than the radius."""
    scale = torch.where(lengths > radius, radius / lengths, 1.0).to(updates.matrix)
    return _with_matrix((updates.matrix * scale).addcmul_(1 - scale, _sent(updates, frame)), updates)


@part("stage")
@dataclass(frozen=True, kw_only=True)
class Clipping(_Reshapes):
    """No update moves further than a radius from what was sent down."""

    radius: float

    def __post_init__(self) -> None:
        if not self.radius > 0:
            raise HardyError(f"clipping radius is {self.radius}; it must be above 0.")

    def apply(self, updates: Updates, frame: Frame, memory: Tensors) -> tuple[Updates, Tensors]:
        return _clip(_lengths(updates, frame), self.radius, updates, frame), memory


@part("stage")
@dataclass(frozen=True, kw_only=True)
class AdaptiveClipping(_Withstands, _Reshapes):
    """ARC: the ⌊2 (f/n) (n − f)⌋ longest moves are cut to the length of the next (Allouah et al., ICLR 2025)."""

    def least(self, after: int) -> int:
        return max(after, 2 * self.f + 1)

    def apply(self, updates: Updates, frame: Frame, memory: Tensors) -> tuple[Updates, Tensors]:
        lengths, count = _lengths(updates, frame), len(updates.slots)
        clipped = 2 * self.f * (count - self.f) // count
        return _clip(lengths, lengths.sort(0).values[count - clipped - 1], updates, frame), memory


coordinate_median, trimmed_mean, geometric_median = CoordinateMedian, TrimmedMean, GeometricMedian
multi_krum, bulyan, minimum_diameter, centred_clipping = MultiKrum, Bulyan, MinimumDiameter, CentredClipping
nearest_neighbour_mixing, bucketing = NearestNeighbourMixing, Bucketing
clipping, adaptive_clipping = Clipping, AdaptiveClipping
__all__ = [
    "adaptive_clipping",
    "bucketing",
    "bulyan",
    "centred_clipping",
    "clipping",
    "coordinate_median",
    "geometric_median",
    "krum",
    "middle_mean",
    "minimum_diameter",
    "multi_krum",
    "nearest_neighbour_mixing",
    "trimmed_mean",
]
