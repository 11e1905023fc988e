"""Rules that hold while up to f of the n clients lie; most can weigh them, and then f clients are a share of weight.

Median and trimmed mean go coordinate by coordinate (`columns`), the others by where the updates lie
(`distances`, with its symbols and how ties are broken). Updates are finite, since admission refuses any other; no rule
makes a NaN out of finite ones.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hardy.core import tensors
from hardy.core.messages import Updates
from hardy.core.protocols import Aggregator, RoundContext
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.parts.aggregators.columns import (
    column_blocks,
    middle_mean,
    weighted_median,
    weighted_trimmed_mean,
)
from hardy.parts.aggregators.distances import (
    ToleratesByzantine,
    ToleratesWeight,
    Weigh,
    Weights,
    as_tensors,
    blend,
    first_of,
    products_of,
    rounded,
    shares_of,
    smallest,
    squared_distances,
)
from hardy.registry import part

_COVERS = 16
"""largest f of minimum_diameter"""


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class CoordinateMedian(Aggregator):
    """The middle value of each number, or the mean of the two middle ones (Yin et al., ICML 2018).

    By samples: the value with half of the weight on either side. Of 1, 2 and 9 that is 2, and 9 if it has three
    examples and the others one each.
    """

    weigh: Weigh = "uniform"

    @property
    def uses_weights(self) -> bool:
        return self.weigh == "samples"

    def outweighed(self, weights: Tensor) -> bool:
        return self.uses_weights and bool(2 * weights.max() > weights.sum())

    def combine(self, updates: Updates, context: RoundContext) -> Tensors:
        if self.uses_weights:
            return as_tensors(weighted_median(updates.matrix, updates.weights), updates, context)
        return as_tensors(middle_mean(updates.matrix, (len(updates.slots) - 1) // 2), updates, context)


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class TrimmedMean(ToleratesWeight, Aggregator):
    """The mean of each number without its f smallest and f largest values (Yin et al., ICML 2018).

    By samples: without the weight F of the f heaviest clients at either end. It holds while F < W/2. With f = 1, the
    values 0, 1, 2, 5 and the weights 2, 1, 1, 1, F is 2: 0 goes below, 2 and 5 above, and 1 is left.
    """

    @property
    def uses_weights(self) -> bool:
        return self.weigh == "samples"

    @property
    def min_updates(self) -> int:
        return self.least

    def combine(self, updates: Updates, context: RoundContext) -> Tensors:
        if self.uses_weights:
            each, _, hostile, _ = self.weights(updates.weights)
            return as_tensors(weighted_trimmed_mean(updates.matrix, each, hostile), updates, context)
        return as_tensors(middle_mean(updates.matrix, self.f), updates, context)


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class GeometricMedian(Aggregator):
    """The point with the least sum of distances to the updates, by smoothed Weiszfeld steps (Pillutla et al., 2022)."""

    weigh: Weigh = "uniform"
    iterations: int = 32
    """Weiszfeld steps"""
    smoothing: float = 1e-6
    """ν, below which a distance counts as ν"""

    def __post_init__(self) -> None:
        if self.iterations < 1 or not self.smoothing > 0:
            raise HardyError(f"{self}: iterations must be 1 or more, and smoothing (ν) above 0.")

    @property
    def uses_weights(self) -> bool:
        return self.weigh == "samples"

    def outweighed(self, weights: Tensor) -> bool:
        return self.uses_weights and bool(2 * weights.max() > weights.sum())

    def combine(self, updates: Updates, context: RoundContext) -> Tensors:
        shares, products = shares_of(updates, self.weigh), products_of(updates, context)
        lengths = products.diagonal()
        # starts among the updates that have the others near: one on which it starts would hold it for 1/ν steps
        distances = (lengths[:, None] + lengths - 2 * products).clamp_min(0.0).sqrt().median(1).values
        for _ in range(self.iterations + 1):
            weights = shares / distances.clamp_min(self.smoothing)
            weights = weights / weights.sum()
            towards = products @ weights
            distances = (lengths - 2 * towards + weights @ towards).clamp_min(0.0).sqrt()
        return as_tensors(blend(weights[None], updates, context)[0], updates, context)


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class MultiKrum(ToleratesWeight, Aggregator):
    """The mean of the updates with the least squared distances to their n − f − 2 nearest (Blanchard et al., 2017).

    By samples: distances count by weight up to W − F − u, its own weight first, and the best of weight W − F are
    averaged by weight. It holds while 2F + 3u ≤ W.
    """

    keep: int | None = None
    """m, the updates averaged; absent: n − f, and by samples those of weight W − F"""
    spare: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is not None and self.keep < 1:
            raise HardyError(f"keep is {self.keep} in {self}; it must be 1 or more, or absent.")
        if self.uses_weights and self.keep not in (None, 1):
            raise HardyError(
                f"keep is {self.keep} in {self}, but by samples it is a weight that is kept. Leave keep out, or set it "
                "to 1 (krum)."
            )

    @property
    def uses_weights(self) -> bool:
        return self.weigh == "samples"

    @property
    def min_updates(self) -> int:
        return max(self.least, self.f + (self.keep or 0))

    def combine(self, updates: Updates, context: RoundContext) -> Tensors:
        count = len(updates.slots)
        squared, keys = squared_distances(updates, context)
        if self.uses_weights:
            kept = self._kept(squared, keys, self.weights(updates.weights))
            return as_tensors(blend(kept[None], updates, context)[0], updates, context)
        scores, keep = _krum_scores(squared, count, self.f), self.keep or count - self.f
        best = smallest(scores, keys, keep)
        weights = torch.zeros_like(scores).index_fill(0, best, 1 / keep)
        return as_tensors(blend(weights[None], updates, context)[0], updates, context)

    def _kept(self, squared: Tensor, keys: Tensor, weights: Weights) -> Tensor:
        """What each update counts in the result, by weight; together 1."""
        each, total, hostile, lightest = weights
        nearest = squared.sort(1)
        scores = (nearest.values * first_of(each[nearest.indices], total - hostile - lightest)).sum(1)
        order = smallest(scores, keys, len(scores))
        if self.keep == 1:
            return torch.zeros_like(scores).index_fill(0, order[:1], 1.0)
        return torch.zeros_like(scores).scatter(0, order, first_of(each[order], total - hostile)) / (total - hostile)


def _krum_scores(squared: Tensor, count: int, f: int) -> Tensor:
    """Of each update, the squared distances to the nearest count − f − 2 others. Those left out are infinitely far."""
    return squared.sort(1).values[:, 1 : count - f - 1].sum(1)


@part("aggregator")
def krum(*, f: int, weigh: Weigh = "uniform") -> MultiKrum:
    """The one update with the least squared distances to its n − f − 2 nearest (Blanchard et al., NeurIPS 2017).

    f: f, the clients that may lie
    weigh: uniform, or samples: distances count by weight, as in multi_krum
    """
    return MultiKrum(f=f, keep=1, weigh=weigh)


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class Bulyan(ToleratesByzantine, Aggregator):
    """Krum over and over, then of each number the mean of the values nearest to the median (El Mhamdi et al., 2018).

    Krum chooses θ = n − 2f − 2 updates one by one, so that the last choice, too, is among the 2f + 3 it needs; of each
    number θ − 2f values are kept.
    """

    @property
    def min_updates(self) -> int:
        return 4 * self.f + 3

    def combine(self, updates: Updates, context: RoundContext) -> Tensors:
        (squared, keys), chosen = squared_distances(updates, context), []
        for left in range(len(updates.slots), 2 * self.f + 2, -1):
            best = smallest(_krum_scores(squared, left, self.f), keys, 1)
            squared = squared.index_fill(0, best, torch.inf).index_fill(1, best, torch.inf)
            chosen.append(best)
        keep, row = len(chosen) - 2 * self.f, updates.matrix.new_empty(updates.matrix.shape[1])
        for block in column_blocks(updates.matrix):
            rows = updates.matrix[:, block][torch.cat(chosen)].sort(0).values
            away = (rows - middle_mean(rows, (len(rows) - 1) // 2)).abs()
            nearest = away.argsort(dim=0, stable=True)[:keep]  # of two values equally near, the smaller
            row[block] = rows.gather(0, nearest).mean(0)
        return as_tensors(row, updates, context)


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class MinimumDiameter(ToleratesByzantine, Aggregator):
    """The mean of the n − f updates of least diameter (Rousseeuw, 1985; El Mhamdi et al., PODC 2020).

    Of several sets with that diameter, the one with the least sum of squared distances; then the one whose keys come
    first.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.f > _COVERS:
            raise HardyError(
                f"minimum_diameter f is {self.f}; it must be {_COVERS} or less, because up to 2^f sets of clients are "
                "tried. Usual fix: nearest_neighbour_mixing before trimmed_mean, which costs no more for a larger f."
            )

    @property
    def min_updates(self) -> int:
        return 2 * self.f + 1

    def combine(self, updates: Updates, context: RoundContext) -> Tensors:
        distances, order = squared_distances(updates, context)
        squared, keys = rounded(distances).cpu().numpy(), order.cpu().numpy()
        levels = np.unique(squared)
        # the least diameter at which f updates can be left out so that no pair further apart remains
        reached = bisect_left(levels, True, key=lambda level: any(True for _ in _covers(squared > level, self.f)))
        kept = [np.delete(np.arange(len(squared)), gone) for gone in _covers(squared > levels[reached], self.f)]

        def rank(rows: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[float, list[float]]:
            total = torch.tensor(squared[np.ix_(rows, rows)].sum())
            return rounded(total).item(), sorted(keys[rows].tolist())

        best = min(kept, key=rank)
        weights = np.bincount(best, minlength=len(squared)) / len(best)
        here = tensors.send(torch.from_numpy(weights), updates.weights.device)
        return as_tensors(blend(here[None], updates, context)[0], updates, context)


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
    """τ, the furthest a client may move the result"""
    iterations: int = 1
    """L; each starts at the result of the one before"""
    weigh: Weigh = "uniform"

    def __post_init__(self) -> None:
        if not self.radius > 0 or self.iterations < 1:
            raise HardyError(f"{self}: radius (τ) must be above 0, and iterations 1 or more.")

    @property
    def uses_weights(self) -> bool:
        return self.weigh == "samples"

    def combine(self, updates: Updates, context: RoundContext) -> Tensors:
        shares, products = shares_of(updates, self.weigh), products_of(updates, context)
        weights = torch.zeros_like(shares)  # the centre is x + Σ w_i Δ_i
        for _ in range(self.iterations):
            towards = products @ weights
            distances = (products.diagonal() - 2 * towards + weights @ towards).clamp_min(0.0).sqrt()
            clipped = shares * (self.radius / distances).clamp_max(1.0)
            weights = weights + clipped - clipped.sum() * weights
        return as_tensors(blend(weights[None], updates, context)[0], updates, context)


coordinate_median, trimmed_mean, geometric_median = CoordinateMedian, TrimmedMean, GeometricMedian
multi_krum, bulyan, minimum_diameter, centred_clipping = MultiKrum, Bulyan, MinimumDiameter, CentredClipping
__all__ = [
    "bulyan",
    "centred_clipping",
    "coordinate_median",
    "geometric_median",
    "krum",
    "minimum_diameter",
    "multi_krum",
    "trimmed_mean",
]
