"""One rank of several: it trains a share of each round's slots on an engine of its own.

Every rank runs the same server round on the same state. The first one leads: it alone knows the run's folder and tells
the others when a round begins; they know nothing but rounds (`hardy.runs.workers`). Where clients keep tensors of their
own, each has an owner for good; where they keep nothing, a round's slots are dealt anew.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from heapq import heapify, heapreplace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardy.core.federation import Client, LazyClients
from hardy.core.messages import Updates, Work
from hardy.core.method import Plan
from hardy.core.partition import Placement
from hardy.core.store import ClientStore, MemoryStore, Slot
from hardy.core.tensors import Tensors
from hardy.engines.base import Engine
from hardy.engines.process_group import ProcessGroup


def deal(costs: Sequence[float], ranks: int) -> list[int]:
    """Which rank each of these goes to: the dearest first, each to the rank that has least so far; ties go by their
    numbers.

    Two clients that attack and eight that do not, which cost an eighth:
    >>> deal([8, 8, 1, 1, 1, 1, 1, 1, 1, 1], 2)
    [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
    """
    loads: list[tuple[float, int]] = [(0.0, rank) for rank in range(ranks)]
    heapify(loads)
    dealt = [0] * len(costs)
    for one in sorted(range(len(costs)), key=lambda one: -costs[one]):
        load, dealt[one] = loads[0]
        heapreplace(loads, (load + costs[one], dealt[one]))
    return dealt


def one_network(plan: Plan) -> bool:
    """Whether all clients are served by the same network."""
    kept = any(plan.placement[name] is not Placement.SHARED for name in plan.model_names)
    return not kept and plan.method.norm.inference_statistics != "recomputed"


class Distributed:
    """The engine of a rank. `here` trains, and holds the private tensors of the clients that this rank owns."""

    def __init__(
        self, whole: Engine, ranks: ProcessGroup, owner: Sequence[int], cost: Callable[[int, Slot], float]
    ) -> None:
        self.ranks, self.owner, self.cost = ranks, owner, cost
        """cost: (round, slot) -> what it is expected to take"""
        self.plan, self.training, self.data = whole.plan, whole.training, whole.data
        self.device, self.dtype, self.train_rows = whole.device, whole.dtype, whole.train_rows
        self.name = whole.name
        self.keeps = bool(whole.plan.names(Placement.PRIVATE))
        """whether clients keep tensors, and so belong to a rank"""
        measured = whole.data.measured
        self.mine = [at for at, client in enumerate(measured) if owner[client] == ranks.number]
        """the places among the measured clients of those that this rank owns"""
        self._my_data = replace(whole.data, sample=tuple(measured[at] for at in self.mine))
        self.here = copy(whole)
        if ranks.number and self.keeps and not isinstance(whole.data.clients, LazyClients):
            own = [client for at, client in zip(owner, whole.data.clients, strict=True) if at == ranks.number]
            asked = whole.data.profiles if one_network(whole.plan) else self._my_data.profiles
            only = {part: _rows(own, asked, part) for part in ("train", "test")}
            self.here.device_data = whole.device_data.only(**only)  # the first rank shows images of all in its reports
        self.shown: ClientStore = self.here.store
        """what the run sees of the tensors of all clients"""

    def __repr__(self) -> str:
        return f"rank {self.ranks.number} of {self.ranks.count}: {self.here!r}"

    @property
    def store(self) -> ClientStore:
        return self.shown

    @store.setter
    def store(self, values: Mapping[str, Tensor]) -> None:
        self.here.store = values
        self.shown = self.here.store

    def new_store(self, first: Tensors, clients: int) -> ClientStore:
        return self.here.new_store(first, clients)

    def cast(self, values: Mapping[str, Tensor]) -> Tensors:
        return self.here.cast(values)

    def account(self, line: dict[str, Any]) -> dict[str, Any]:
        return {}

    def expect(self, round_number: int, slots: Sequence[Slot]) -> None:
        """Each round is told when it begins."""

    def train(self, work: Work) -> Iterator[Updates]:
        """The updates of this rank's slots. The first rank tells the others to begin, with a sum of the bits of what is
        trained on, so that ranks that have come apart are found out."""
        if not self.ranks.number:
            self.ranks.tell("round", work.round, work.rate, digest(work.shared))
        if slots := self.share(work):
            yield from self.here.train(replace(work, slots=slots))

    def share(self, work: Work) -> list[Slot]:
        """The slots of a round that this rank trains."""
        if self.keeps:
            dealt = [self.owner[slot.client] for slot in work.slots]
        else:
            dealt = deal([self.cost(work.round, slot) for slot in work.slots], self.ranks.count)
        return [slot for slot, rank in zip(work.slots, dealt, strict=True) if rank == self.ranks.number]

    def owns(self, rank: int, client: int) -> bool:
        return self.owner[client] == rank

    @property
    def of_mine(self) -> Engine:
        """The same engine, of which the measured clients are those that this rank owns."""
        some = copy(self.here)
        some.data = self._my_data
        return some

    @property
    def of_everybody(self) -> Engine:
        """The same engine without tensors of clients: for networks that they share."""
        some = copy(self.here)
        some.store = MemoryStore({})
        return some


def digest(values: Tensors) -> int:
    """A sum over the bits of tensors."""
    total = 0
    for _, value in sorted(values.items()):
        flat = value.contiguous().view(-1)
        words = flat.view(torch.int32) if flat.element_size() >= 4 else flat.view(torch.uint8)
        total = (31 * total + int(words.sum(dtype=torch.int64))) % 2**61
    return total


def _rows(own: Sequence[Client], measured: Sequence[Client], part: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The rows that a rank holds: those its clients train on, and those that its networks are measured on."""
    if part == "train":
        held = [*(client.train for client in own), *(client.validation for client in measured)]
    else:
        held = [rows for client in measured for rows in (client.test, client.triggered)]
    return np.unique(np.concatenate([np.zeros(0, np.int64), *held]))


class OwnRows(ClientStore):
    """The tensors of some clients, in memory."""

    def __init__(self, first: Tensors, own: Sequence[int], clients: int) -> None:
        """`first` values, [B, ...], of each."""
        self.rows, self.own, self.clients = MemoryStore.filled(first, len(own)), own, clients
        self._place = {client: at for at, client in enumerate(own)}

    @property
    def like(self) -> Tensors:  # type: ignore[override]
        return self.rows.like

    @property
    def axes(self) -> tuple[int, int]:  # type: ignore[override]
        return self.clients, self.rows.axes[1]

    def __getitem__(self, name: str) -> Tensor:
        raise KeyError(f"{name} of all clients: this rank has those of {len(self.own)} of {self.clients}")

    def read(self, slots: Sequence[Slot]) -> Tensors:
        return self.rows.read(self._placed(slots))

    def write(self, slots: Sequence[Slot], rows: Tensors, mask: Tensor | None = None) -> None:
        self.rows.write(self._placed(slots), rows, mask)

    def held(self) -> Iterator[Slot]:
        return (Slot(self.own[slot.client], slot.base) for slot in self.rows.held())

    def _placed(self, slots: Sequence[Slot]) -> list[Slot]:
        return [Slot(self._place[slot.client], slot.base) for slot in slots]
