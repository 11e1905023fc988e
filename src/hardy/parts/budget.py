"""Budgets: which base networks each client of the cohort trains this round."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hardy.messages import Slot
from hardy.registry import kind, part


@kind("budget")
@dataclass(frozen=True, kw_only=True)
class Budget:
    """The part that turns a cohort into slots."""

    @property
    def bases(self) -> int:
        """How many base networks the server holds."""
        return 1

    def assign(self, round: int, cohort: Sequence[int], rng: np.random.Generator) -> list[Slot]:
        raise NotImplementedError


@part("budget")
@dataclass(frozen=True, kw_only=True)
class Full(Budget):
    """Every client trains the whole network."""

    def assign(self, round: int, cohort: Sequence[int], rng: np.random.Generator) -> list[Slot]:
        return [Slot(client) for client in cohort]


full = Full
__all__ = ["Budget", "full"]
