"""DnC: the clients that stand out along the direction in which updates differ most are left out.

Shejwalkar & Houmansadr, Manipulating the Byzantine, NDSS 2021, Algorithm 2.

1. Some coordinates are drawn at random; of them the updates, minus their mean, are the rows of G.
2. v is the top right singular vector of G, and the score of client i is ⟨G_i, v⟩².
3. The ⌈c f⌉ highest scores are left out. After several draws, those that were never left out are averaged.
"""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from hardy.core import random, tensors
from hardy.core.messages import Updates
from hardy.core.protocols import Aggregator, RoundContext
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.parts.aggregators.distances import (
    ToleratesByzantine,
    as_tensors,
    blend,
    sent_down,
    smallest,
    squared_distances,
)
from hardy.registry import part


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class DivideAndConquer(ToleratesByzantine, Aggregator):
    """DnC: the mean without the ⌈c f⌉ updates that lie furthest along the main direction of difference.

    Of (0, 0), (1, 0), (0, 1), (1, 1), (9, 9) the main direction is the diagonal, and with f = 1 the last one is left
    out: (0.5, 0.5). Ties are broken as everywhere.
    """

    coordinates: int = 10_000
    """r, the numbers of an update that a draw looks at; all, where an update has fewer"""
    iterations: int = 1
    """draws; who was left out in one is left out"""
    removed: float = 1.0
    """c, how many updates a draw leaves out, in f"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coordinates < 1 or self.iterations < 1 or not self.removed > 0:
            raise HardyError(f"{self}: coordinates and iterations must be 1 or more, and removed (c) above 0.")

    @property
    def _left_out(self) -> int:
        return ceil(self.removed * self.f)

    @property
    def min_updates(self) -> int:
        return max(2 * self.f, self.iterations * self._left_out) + 1

    def combine(self, updates: Updates, context: RoundContext) -> Tensors:
        matrix, sent = updates.matrix, sent_down(updates, context)
        count, width = matrix.shape
        _, keys = squared_distances(updates, context)
        good = torch.ones(count, dtype=torch.float64, device=matrix.device)
        for draw in range(self.iterations):
            rows = (matrix - sent).double() if width <= self.coordinates else self._drawn(updates, context, draw)
            scores = _along_main_direction(rows - rows.mean(0))
            kept = smallest(scores, keys, count - self._left_out)
            good *= torch.zeros_like(good).index_fill(0, kept, 1.0)
        return as_tensors(blend((good / good.sum())[None], updates, context)[0], updates, context)

    def _drawn(self, updates: Updates, context: RoundContext, draw: int) -> Tensor:
        rng = random.stream(context.seed, context.round, "coordinates", updates.slots[0].base, draw)
        chosen = rng.choice(updates.matrix.shape[1], self.coordinates, replace=False)
        here = tensors.send(torch.from_numpy(chosen), updates.weights.device)
        return (updates.matrix[:, here] - sent_down(updates, context)[:, here]).double()


def _along_main_direction(rows: Tensor) -> Tensor:
    """⟨G_i, v⟩², [S]; where several directions are equally long, the sum over them.

    >>> _along_main_direction(torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]])).round()
    tensor([4., 4., 0., 0.])
    """
    values, vectors = torch.linalg.eigh(rows @ rows.T)  # of GGᵀ, so that it costs S² numbers and not D²
    main = values >= values[-1] * (1 - 1e-9)
    scores: Tensor = (values * main * vectors.square()).sum(1)
    return scores


divide_and_conquer = DivideAndConquer
__all__ = ["divide_and_conquer"]
