"""Budgets: what a client can afford, which base networks it trains in a round, and which of them serve a width.

A client's capacity R, a share of the ×1 network's width, is part of its profile (`data.capacity` deals it out). A
budget turns the cohort into slots within these capacities.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from hardy.core import tensors
from hardy.core.federation import Client, affordable
from hardy.core.messages import Slot
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.registry import kind, part


@kind("budget")
@dataclass(frozen=True, kw_only=True)
class Budget:
    """The part that turns a cohort into slots, and base networks into the network served at a width."""

    @property
    def bases(self) -> int:
        """How many base networks the server holds."""
        return 1

    @property
    def base_width(self) -> float | None:
        """The width `model.width` must have; None: any."""
        return None

    @property
    def widths(self) -> tuple[float, ...]:
        """The widths that can be served, the widest last."""
        return (1.0,)

    @property
    def sorted(self) -> bool:
        """Whether the bases are served in the order of their validation accuracy, the best first."""
        return False

    def check(self, clients: Sequence[Client]) -> None:
        """Refuses clients it has no work for."""

    def networks(self, build: Callable[[], nn.Module]) -> list[nn.Module]:
        """The base networks as they are first built, each with random values of its own."""
        return [build() for _ in range(self.bases)]

    def assign(self, round: int, cohort: Sequence[int], clients: Sequence[Client], seed: int) -> list[Slot]:
        """The slots of a round: a pure function of its arguments, so that a resumed run goes on with the same."""
        raise NotImplementedError

    def serve(self, held: Tensors, width: float) -> list[Tensors]:
        """The networks whose mean answers at a width, out of the tensors of all bases, [B, ...]."""
        if width != 1:
            raise HardyError(
                f"width {width} cannot be served: this run trained one network, so it must be 1. Methods split_mix, "
                "heterofl and fed_ensemble train several widths at once."
            )
        return [tensors.gather(held, 0)]


@part("budget")
@dataclass(frozen=True, kw_only=True)
class Full(Budget):
    """Every client trains the whole network."""

    def assign(self, round: int, cohort: Sequence[int], clients: Sequence[Client], seed: int) -> list[Slot]:
        return [Slot(client) for client in cohort]


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

    def serve(self, held: Tensors, width: float) -> list[Tensors]:
        if not self.unit - 1e-9 <= width <= 1:
            raise HardyError(
                f"width {width} is outside the trained range: the bases are ×{self.unit:g}, so it must be in "
                f"[{self.unit:g}, 1]."
            )
        return [tensors.gather(held, base) for base in range(affordable(width, self.unit))]


full = Full
__all__ = ["Budget", "Mixed", "full"]
