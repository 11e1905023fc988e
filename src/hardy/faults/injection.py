"""Clients that fail or attack: what goes wrong with whom in which round is a function of the seed."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hardy.core import random
from hardy.core.federation import Federation, LazyClients
from hardy.core.messages import Updates, Work
from hardy.core.partition import Role
from hardy.core.server import FaultModel
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.faults.byzantine import Affects, ByzantineAttack, affected_tensors, corrupt
from hardy.registry import PARTS, name_of


@lru_cache(maxsize=8)
def _drawn_hostile(seed: int, clients: int, hostile: int) -> frozenset[int]:
    if not hostile:
        return frozenset()
    return frozenset(random.stream(seed, "hostile").permutation(clients)[:hostile].tolist())


@dataclass(frozen=True, kw_only=True)
class Faults(FaultModel):
    """`[faults]`: the chance, for each client and round, of each failure; and the hostile clients."""

    dropped: float = 0.0
    """is asked but never starts"""
    crashed: float = 0.0
    """starts, dies before it can answer, and comes back as it was before the round"""
    late: float = 0.0
    """trains and keeps its private tensors, but answers after the deadline: the reply is left out"""
    hostile: int | tuple[int, ...] = 0
    """how many clients attack, drawn once by the seed; or their numbers"""
    added: bool = False
    """the hostile clients come on top of those of [data], so that all rows are dealt among the honest; each holds the
    training rows of an honest one again, and is not tested"""
    byzantine: ByzantineAttack | None = None
    """what the hostile clients do"""
    affects: Affects = "both"
    """the tensors they change: weights (with affine and control tensors), running statistics, or both"""

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
        if self.hostile and self.byzantine is None:
            raise HardyError(
                f"faults.hostile is {self.hostile}, but faults.byzantine is absent. Known attacks: "
                f"{', '.join(PARTS['byzantine_attack'])}."
            )
        self._refuse_without_effect()

    def _refuse_without_effect(self) -> None:
        if not self.hostile:
            for name, usual in (("byzantine", None), ("added", False), ("affects", "both")):
                if (value := getattr(self, name)) != usual:
                    raise HardyError(
                        f"faults.{name} is {value!r}, but faults.hostile is {self.hostile!r}, so it has no effect. Set "
                        f"faults.hostile to 1 or more, or leave out faults.{name}."
                    )
        if self.affects != "both" and self.byzantine and not self.byzantine.changes_tensors:
            raise HardyError(
                f"faults.affects is {self.affects!r}, but {name_of(type(self.byzantine))} changes no tensors, so it "
                "has no effect. Leave out faults.affects, or take another attack."
            )

    def sample_faults(self, seed: int, round_number: int, cohort: Sequence[int]) -> dict[int, str]:
        """Which failure each client of the cohort has, where it has one."""
        failed = {}
        for client in cohort if self.dropped + self.crashed + self.late > 0 else ():
            luck = random.stream(seed, round_number, client, "faults").random()
            for name in ("dropped", "crashed", "late"):
                luck -= getattr(self, name)
                if luck < 0:
                    failed[client] = name
                    break
        return failed

    def hostile_clients(self, seed: int, clients: int) -> frozenset[int]:
        """The hostile ones of so many clients, the same in every round."""
        if isinstance(self.hostile, tuple):
            for number in self.hostile:
                if not 0 <= number < clients:
                    raise HardyError(f"faults.hostile names client {number}; there are {clients}, from 0 on.")
            chosen = frozenset(self.hostile)
        elif self.added:
            chosen = frozenset(range(max(0, clients - self.hostile), clients))
        else:
            chosen = _drawn_hostile(seed, clients, self.hostile)
        if chosen and len(chosen) == clients:
            raise HardyError(f"faults.hostile is {self.hostile} of {clients} clients; at least one must be honest.")
        return chosen

    def tamper(
        self,
        updates: Sequence[Updates],
        work: Work,
        *,
        hostile: Collection[int],
        roles: Mapping[str, Role],
        aggregate: Callable[[Updates], Tensors],
    ) -> list[Updates]:
        """A round's updates in one piece, with what the clients `hostile` send: they have seen what the others answer.

        `roles` are those of the tensors that clients send; `aggregate` says what the server would make of updates.
        """
        if not updates or self.byzantine is None:
            return list(updates)
        affected = affected_tensors(self.affects, roles)
        joined = Updates.join(list(updates))
        return [corrupt(self.byzantine, joined, work, hostile=hostile, roles=affected, aggregate=aggregate)]

    def _refuse_for_population(self) -> None:
        assert self.byzantine is not None
        if self.added or self.byzantine.plants_backdoor or type(self.byzantine).poison is not ByzantineAttack.poison:
            raise HardyError(
                f"faults.byzantine {name_of(type(self.byzantine))} with faults.added {self.added} changes the rows of "
                "clients, and those of a population are drawn when they are asked for. Take an attack on replies, such "
                "as sign_flipping, without faults.added."
            )

    def refuse_impossible(self, seed: int, clients: int, *, roles: Mapping[str, Role], method: str) -> None:
        """An error for hostile clients that do not exist, or that attack tensors the method does not send."""
        if self.hostile_clients(seed, clients) and not affected_tensors(self.affects, roles):
            raise HardyError(
                f"faults.affects is {self.affects!r}, but method {method!r} sends no such tensors. Take both, or "
                "another method."
            )

    def add_hostile_clients(self, federation: Federation, seed: int) -> Federation:
        """The federation with its hostile clients: added ones, the rows they train on, those that test a backdoor."""
        if self.byzantine is None:
            return federation
        if isinstance(federation.clients, LazyClients):
            self._refuse_for_population()
            return federation
        clients = list(federation.clients)
        if self.added and isinstance(self.hostile, int):
            nothing = clients[0].train[:0]
            again = (clients[i % len(clients)] for i in range(self.hostile))
            clients += [replace(client, validation=nothing, test=nothing) for client in list(again)]
        joined = replace(federation, clients=tuple(clients))
        poisoned = self.byzantine.poison(joined, sorted(self.hostile_clients(seed, len(clients))), seed)
        measured = self.byzantine.with_triggered_rows(joined)
        if not poisoned:
            return measured
        clients, first = list(measured.clients), len(federation.y_train)
        for n, (_, labels) in poisoned.items():  # rows of their own: an honest client may hold the same ones
            clients[n] = replace(clients[n], train=np.arange(first, first + len(labels)))
            first += len(labels)
        return replace(
            measured,
            x_train=np.concatenate([federation.x_train, *(x for x, _ in poisoned.values())]),
            y_train=np.concatenate([federation.y_train, *(labels for _, labels in poisoned.values())]),
            clients=tuple(clients),
        )
