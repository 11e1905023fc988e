"""The clock of the simulation: how long a round would take on the clients' own machines, and who is online when.

A client's time is what it computes over its speed, plus what it is sent and sends over its links. The round ends with
the reply that is enough, or at the deadline; what would come later is late, as [faults] has it: the client trains and
keeps its private tensors, and its reply is left out. Nothing here looks at a real clock.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import cos, exp, inf, pi, sqrt

import numpy as np

from hardy.core import random
from hardy.core.messages import Slot
from hardy.errors import HardyError

_PEAK = 2.0
"""hour of a client's own day at which most are online: devices idle and charge at night"""
_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class ClockChoice:
    """`[clock]`: how fast clients and their links are, when they are online, and how long a round waits."""

    speed: float = 0.0
    """multiply-accumulates a second of the median client; 0: no clock"""
    up: float = inf
    """bytes a second that the median client sends"""
    down: float = inf
    """bytes a second that it receives"""
    spread: float = 0.0
    """deviation of the logarithm of a client's speed, and of its links, which are drawn once"""
    deadline: float = inf
    """seconds after which a reply is late"""
    enough: int | None = None
    """clients that have answered when a round ends; the others are late. A cohort above that is over-selection"""
    online: float = 1.0
    """share of the clients that are online, on average over their day; others are not asked"""
    swing: float = 0.0
    """how far that share swings around its average, highest at two in the morning of a client's own zone"""
    zones: int = 1
    """time zones that clients live in; 24: around the world"""
    target: float | None = None
    """accuracy on test rows whose time the summary notes"""

    def __post_init__(self) -> None:
        if not self.speed and replace(self, speed=1.0) != ClockChoice(speed=1.0):
            raise HardyError("[clock] has no effect while clock.speed is 0. Set it, such as 1e9, or leave it out.")
        for name in ("speed", "spread", "swing"):
            if not 0 <= getattr(self, name) < inf:
                raise HardyError(f"clock.{name} is {getattr(self, name)}; it must be 0 or more, and finite.")
        for name in ("up", "down", "deadline"):
            if not getattr(self, name) > 0:
                raise HardyError(f"clock.{name} is {getattr(self, name)}; it must be above 0, or inf.")
        if self.enough is not None and self.enough < 1:
            raise HardyError(f"clock.enough is {self.enough}; it must be 1 or more, or absent.")
        if not 0 < self.online <= 1 or self.online * (1 + self.swing) > 1 or self.swing > 1:
            raise HardyError(
                f"clock.online is {self.online} and swing {self.swing}; online must be in (0, 1], swing in [0, 1], and "
                "online × (1 + swing) at most 1."
            )
        if not 1 <= self.zones <= 24:
            raise HardyError(f"clock.zones is {self.zones}; it must be 1 to 24.")
        if self.zones > 1 and not self.swing:
            raise HardyError(f"clock.zones is {self.zones}, but clock.swing is 0, so it has no effect. Leave it out.")


class Clock:
    """What the clients of a run take."""

    def __init__(
        self,
        choice: ClockChoice,
        seed: int,
        *,
        macs: Callable[[int, Slot], float],
        traffic: Callable[[Slot], int],
    ) -> None:
        self.choice, self.macs, self.traffic = choice, macs, traffic
        """macs: (round, slot) -> multiply-accumulates; traffic: slot -> bytes each way"""
        self._key = random.fold(np.array([seed & (2**62 - 1)]), "clock")
        self._starts = [0.0]

    def start(self, round_number: int, ask: Callable[[int], object]) -> float:
        """When a round begins, in seconds; `ask` works out who is asked in a round before it."""
        while len(self._starts) <= round_number:
            ask(len(self._starts) - 1)
        return self._starts[round_number]

    def online_at(self, seconds: float) -> Callable[[int], bool] | None:
        """Who is online; None: everybody. A client is or is not for an hour."""
        choice = self.choice
        if choice.online == 1:
            return None
        hour = int(seconds // _HOUR)

        def online(client: int) -> bool:
            zone = int(self._chance("zone", client) * choice.zones) * 24 / choice.zones
            share = choice.online * (1 + choice.swing * cos(2 * pi * (seconds / _HOUR + zone - _PEAK) / 24))
            return self._chance("online", client, hour) < share

        return online

    def seconds(self, round_number: int, slots: Sequence[Slot]) -> dict[int, float]:
        """What each client takes for its slots."""
        taken: dict[int, float] = {}
        for slot in slots:
            size = self.traffic(slot)
            work = self.macs(round_number, slot) / (self.choice.speed * self._factor("speed", slot.client))
            links = (size / self.choice.up + size / self.choice.down) / self._factor("links", slot.client)
            taken[slot.client] = taken.get(slot.client, 0.0) + work + links
        return taken

    def end(self, round_number: int, slots: Sequence[Slot], lost: Mapping[int, str]) -> tuple[dict[int, str], float]:
        """(who is late, how long the round takes). Clients that are lost anyhow are not waited for longer than the
        deadline, and not at all where there is none."""
        choice, taken = self.choice, self.seconds(round_number, slots)
        answers = sorted((s, client) for client, s in taken.items() if client not in lost and s <= choice.deadline)
        counted = answers[: choice.enough]
        late = taken.keys() - {client for _, client in counted} - lost.keys()
        last = counted[-1][0] if counted else 0.0
        waits = len(counted) < (choice.enough or len(taken.keys() | lost.keys())) and choice.deadline < inf
        seconds = choice.deadline if waits else last
        if round_number == len(self._starts) - 1:
            self._starts.append(self._starts[-1] + seconds)
        return dict.fromkeys(sorted(late), "late"), seconds

    def _chance(self, word: str, *numbers: int) -> float:
        key = random.fold(random.fold(self._key, word), *(np.array([n]) for n in numbers))
        return float((key[0] >> 11 & (2**53 - 1)) * 2.0**-53)

    def _factor(self, word: str, client: int) -> float:
        """Log-normal, with median 1."""
        if not self.choice.spread:
            return 1.0
        u, v = 1 - self._chance(word, client, 1), self._chance(word, client, 2)
        return exp(self.choice.spread * sqrt(-2 * np.log(u)) * cos(2 * pi * v))


__all__ = ["Clock", "ClockChoice"]
