"""Clients that fail: what goes wrong with whom in which round is a function of the seed."""

from collections.abc import Sequence
from dataclasses import dataclass

from hardy import random
from hardy.errors import HardyError


@dataclass(frozen=True, kw_only=True)
class Faults:
    """`[faults]`: the chance, for each client and round, of each misfortune."""

    dropped: float = 0.0
    """is asked but never starts"""
    crashed: float = 0.0
    """starts, dies before it can answer, and comes back as it was before the round"""
    late: float = 0.0
    """trains and keeps its private tensors, but answers after the deadline: the reply is left out"""

    def __post_init__(self) -> None:
        chances = {"dropped": self.dropped, "crashed": self.crashed, "late": self.late}
        for name, chance in chances.items():
            if not 0 <= chance <= 1:
                raise HardyError(f"faults.{name} is {chance}; a chance must be in [0, 1].")
        if sum(chances.values()) > 1:
            raise HardyError(f"the chances in [faults] add up to {sum(chances.values()):g}; they must not exceed 1.")

    def strike(self, seed: int, round: int, cohort: Sequence[int]) -> dict[int, str]:
        """What befalls each unlucky client of the cohort."""
        struck = {}
        for client in cohort if self.dropped + self.crashed + self.late > 0 else ():
            luck = random.stream(seed, round, client, "faults").random()
            for name in ("dropped", "crashed", "late"):
                luck -= getattr(self, name)
                if luck < 0:
                    struck[client] = name
                    break
        return struck
