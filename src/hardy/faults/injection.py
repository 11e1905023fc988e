"""Clients that fail or lie: what goes wrong with whom in which round is a function of the seed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hardy.core import random
from hardy.core.federation import Federation
from hardy.errors import HardyError
from hardy.faults.byzantine import ByzantineAttack, On
from hardy.registry import PARTS


@dataclass(frozen=True, kw_only=True)
class Faults:
    """`[faults]`: the chance, for each client and round, of each misfortune; and the clients that lie."""

    dropped: float = 0.0
    """is asked but never starts"""
    crashed: float = 0.0
    """starts, dies before it can answer, and comes back as it was before the round"""
    late: float = 0.0
    """trains and keeps its private tensors, but answers after the deadline: the reply is left out"""
    hostile: int | tuple[int, ...] = 0
    """how many clients lie, drawn once by the seed; or their numbers"""
    added: bool = False
    """the hostile clients come on top of those of [data], so that all rows are dealt among the honest; each holds the
    training rows of an honest one again, and is not tested"""
    lie: ByzantineAttack | None = None
    on: On = "both"
    """what lies are about: weights (with affine and control tensors), running statistics, or both"""

    def __post_init__(self) -> None:
        chances = {"dropped": self.dropped, "crashed": self.crashed, "late": self.late}
        for name, chance in chances.items():
            if not 0 <= chance <= 1:
                raise HardyError(f"faults.{name} is {chance}; a chance must be in [0, 1].")
        if sum(chances.values()) > 1:
            raise HardyError(f"the chances in [faults] add up to {sum(chances.values()):g}; they must not exceed 1.")
        if isinstance(self.hostile, int) and self.hostile < 0:
            raise HardyError(f"faults.hostile is {self.hostile}; it must be 0 or more, or a list of clients.")
        if isinstance(self.hostile, tuple) and self.added:
            raise HardyError(
                f"faults.hostile is {list(self.hostile)}, but added clients have no numbers yet; say how many."
            )
        if self.hostile and self.lie is None:
            raise HardyError(
                f"faults.hostile is {self.hostile}, but faults.lie is absent. Known lies: {', '.join(PARTS['lie'])}."
            )

    def sample_faults(self, seed: int, round: int, cohort: Sequence[int]) -> dict[int, str]:
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

    def liars(self, seed: int, clients: int) -> frozenset[int]:
        """The hostile ones of so many clients, the same in every round."""
        if isinstance(self.hostile, tuple):
            for number in self.hostile:
                if not 0 <= number < clients:
                    raise HardyError(f"faults.hostile names client {number}; there are {clients}, from 0 on.")
            chosen = frozenset(self.hostile)
        elif self.added:
            chosen = frozenset(range(max(0, clients - self.hostile), clients))
        else:
            chosen = frozenset(random.stream(seed, "hostile").permutation(clients)[: self.hostile].tolist())
        if chosen and len(chosen) == clients:
            raise HardyError(f"faults.hostile is {self.hostile} of {clients} clients; at least one must be honest.")
        return chosen

    def add_hostile_clients(self, federation: Federation, seed: int) -> Federation:
        """The federation with its hostile clients: added ones, and the labels they train on."""
        if self.lie is None:
            return federation
        clients, y = list(federation.clients), federation.y_train
        if self.added and isinstance(self.hostile, int):
            nothing = clients[0].train[:0]
            again = (clients[i % len(clients)] for i in range(self.hostile))
            clients += [replace(client, validation=nothing, test=nothing) for client in list(again)]
        liars = self.liars(seed, len(clients))
        turned = {n: self.lie.labels(y[clients[n].train], len(federation.classes)) for n in sorted(liars)}
        if all(np.array_equal(labels, y[clients[n].train]) for n, labels in turned.items()):
            return replace(federation, clients=tuple(clients))
        # rows of their own: an honest client may hold the same ones
        first, rows = len(y), np.concatenate([clients[n].train for n in turned])
        for n, labels in turned.items():
            clients[n] = replace(clients[n], train=np.arange(first, first + len(labels)))
            first += len(labels)
        return replace(
            federation,
            x_train=np.concatenate([federation.x_train, federation.x_train[rows]]),
            y_train=np.concatenate([y, *turned.values()]),
            clients=tuple(clients),
        )
