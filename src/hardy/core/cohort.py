"""Which clients are asked in a round."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hardy.core import random
from hardy.core.account import Sampling
from hardy.errors import HardyError

_MANY = 100_000
"""clients above which a Poisson cohort is drawn by its size first"""
_DRAWS = 100


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """`[cohort]`: which clients are asked each round."""

    fraction: float = 1.0
    """share of the clients"""
    clients: int | None = None
    """their number, instead of a share"""
    sampling: Sampling = "fixed"
    """fixed: so many, drawn without replacement; poisson: each client is in by a chance of its own, and their number
    varies, for which a privacy account finds a smaller ε"""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise HardyError(f"cohort.fraction is {self.fraction}; it must be in (0, 1].")
        if self.clients is not None and self.clients < 1:
            raise HardyError(f"cohort.clients is {self.clients}; it must be 1 or more.")
        if self.clients is not None and self.fraction != 1:
            raise HardyError(
                f"cohort.fraction is {self.fraction} and cohort.clients is {self.clients}; one of them has no effect. "
                "Leave one out."
            )

    def size(self, population: int) -> int:
        """Clients asked in a round."""
        size = self.clients or max(1, round_half_up(self.fraction * population))
        if size > population:
            raise HardyError(f"cohort.clients is {size}, but there are {population} clients to ask.")
        return size

    def sample(
        self, seed: int, round_number: int, population: int, online: Callable[[int], bool] | None = None
    ) -> list[int]:
        """A fresh draw each round, of those that are online. What it takes grows with the cohort, not the population,
        as long as it is less than a fiftieth of it."""
        size, rng = self.size(population), random.stream(seed, round_number, "cohort")
        if online is not None:
            return self._online(size, population, rng, online)
        if size == population:
            return list(range(population))
        if self.sampling == "poisson" and population <= _MANY:
            return (rng.random(population) < size / population).nonzero()[0].tolist()
        if self.sampling == "poisson":  # the same distribution: so many are in, and which ones is drawn
            size = int(rng.binomial(population, size / population))
        return sorted(rng.choice(population, size, replace=False).tolist())

    def _online(self, size: int, population: int, rng: np.random.Generator, online: Callable[[int], bool]) -> list[int]:
        """So many of those online, or as many as are found in a hundred times as many draws."""
        asked: set[int] = set()
        chosen: list[int] = []
        for _ in range(_DRAWS):
            for client in rng.integers(population, size=size).tolist():
                if len(chosen) < size and client not in asked:
                    asked.add(client)
                    chosen += [client] if online(client) else []
            if len(chosen) == size or len(asked) == population:
                break
        return sorted(chosen)


def round_half_up(value: float) -> int:
    return int(value + 0.5)
