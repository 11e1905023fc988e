"""Capacities: the width of network that each client can train, a share of the full one's."""

from dataclasses import dataclass, replace

import numpy as np

from hardy.core import random
from hardy.core.federation import Federation, affordable
from hardy.errors import HardyError
from hardy.registry import kind, part


@kind("capacity")
@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The part that deals out the clients' capacities R, shares of the ×1 network's width."""

    shuffled: bool = True
    """by lot; false: in the order of the clients, the poorest first, which ties capacity to domain (Split-Mix's way)"""

    def deal(self, clients: int, rng: np.random.Generator) -> list[float]:
        """A capacity for each client, ascending."""
        raise NotImplementedError


@part("capacity")
@dataclass(frozen=True, kw_only=True)
class Groups(Capacity):
    """Groups of equal size, a width each."""

    widths: tuple[float, ...]
    """a width for each group, in (0, 1]"""

    def __post_init__(self) -> None:
        if not self.widths or not all(0 < width <= 1 for width in self.widths):
            raise HardyError(f"capacity widths are {list(self.widths)}; each must be in (0, 1], and there must be one.")

    def deal(self, clients: int, rng: np.random.Generator) -> list[float]:
        return [sorted(self.widths)[len(self.widths) * client // clients] for client in range(clients)]


@part("capacity")
@dataclass(frozen=True, kw_only=True)
class LogNormal(Capacity):
    """Log-normal capacities, rounded down to bins and kept within [bin, 1]."""

    deviation: float = 0.5
    """deviation of the logarithm of the capacity"""
    median: float = 0.4
    """of the capacities before rounding"""
    bin: float = 0.125
    """capacities are multiples of it"""

    def __post_init__(self) -> None:
        if not (self.deviation >= 0 and self.median > 0 and 0 < self.bin <= 1):
            raise HardyError(
                f"log_normal takes deviation >= 0, median > 0 and bin in (0, 1]; it got {self.deviation}, "
                f"{self.median} and {self.bin}."
            )

    def deal(self, clients: int, rng: np.random.Generator) -> list[float]:
        drawn = np.sort(rng.lognormal(np.log(self.median), self.deviation, clients))
        counts = np.floor(drawn / self.bin + 1e-9).clip(1, affordable(1.0, self.bin))
        return [float(count * self.bin) for count in counts]


groups, log_normal = Groups, LogNormal


@part("capacity")
def exponential(*, factor: float = 2.0, levels: int = 4, shuffled: bool = True) -> Groups:
    """1, 1/f, 1/f², ... in groups of equal size (Split-Mix: 1, 1/2, 1/4, 1/8).

    factor: f, from one group to the next
    levels: groups
    """
    if not (factor > 1 and levels >= 1):
        raise HardyError(f"exponential takes factor > 1 and levels >= 1; it got {factor} and {levels}.")
    return groups(widths=tuple(factor**-level for level in range(levels)), shuffled=shuffled)


@part("capacity")
def steps(*, step: float = 0.25, shuffled: bool = True) -> Groups:
    """s, 2s, 3s, ... up to 1, in groups of equal size.

    step: s, from one group to the next
    """
    if not 0 < step <= 1:
        raise HardyError(f"capacity steps of {step}; a step must be in (0, 1].")
    return groups(
        widths=tuple(min(1.0, count * step) for count in range(1, affordable(1.0, step) + 1)), shuffled=shuffled
    )


def with_capacity(federation: Federation, capacity: Capacity, seed: int) -> Federation:
    """The same clients with capacities dealt to them."""
    rng = random.stream(seed, "capacity")
    dealt = capacity.deal(len(federation.clients), rng)
    if capacity.shuffled:
        dealt = [dealt[at] for at in rng.permutation(len(dealt))]
    clients = (replace(client, capacity=own) for client, own in zip(federation.clients, dealt, strict=True))
    return replace(federation, clients=tuple(clients))


__all__ = ["Capacity", "exponential", "groups", "log_normal", "steps", "with_capacity"]
