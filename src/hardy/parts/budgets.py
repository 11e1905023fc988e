"""Budgets: what a client can afford, which base networks it trains in a round, and which of them serve a width.

A client's capacity R, a share of the ×1 network's width, is part of its profile (`data.capacity` deals it out). A
budget turns the cohort into slots within these capacities.
"""

from dataclasses import dataclass

from hardy.core import tensors
from hardy.core.federation import affordable
from hardy.core.protocols import Budget
from hardy.core.submodels import Submodels
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.registry import part


@part("budget")
@dataclass(frozen=True, kw_only=True)
class Full(Budget):
    """Every client trains the whole network."""


@dataclass(frozen=True, kw_only=True)
class Mixed(Budget):
    """What budgets of several base networks share: the first ⌊R/r⌋ of them serve a width R, r = `unit`."""

    @property
    def unit(self) -> float:
        """The width one base stands for."""
        raise NotImplementedError

    @property
    def bases(self) -> int:
        return affordable(1.0, self.unit)

    @property
    def widths(self) -> tuple[float, ...]:
        return tuple(min(1.0, round(count * self.unit, 9)) for count in range(1, self.bases + 1))

    def serve(self, held: Tensors, width: float, submodels: Submodels | None = None, rounds: int = 0) -> list[Tensors]:
        if not self.unit - 1e-9 <= width <= 1:
            raise HardyError(
                f"width {width} is outside the trained range: the bases are ×{self.unit:g}, so it must be in "
                f"[{self.unit:g}, 1]."
            )
        return [tensors.gather(held, base) for base in range(affordable(width, self.unit))]


full = Full
__all__ = ["Budget", "Mixed", "full"]
