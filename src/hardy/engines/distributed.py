"""One rank of several: it trains the slots of the clients it owns on an engine of its own.

Every rank runs the same server round on the same state. The first one leads: it alone knows the run's folder and tells
the others when a round begins; they know nothing but rounds (`hardy.runs.workers`).
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from heapq import heapify, heapreplace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardy.core import tensors
from hardy.core.federation import Federation
from hardy.core.messages import Updates, Work
from hardy.core.method import Plan
from hardy.core.partition import Placement
from hardy.core.store import ClientStore, MemoryStore, Slot
from hardy.core.tensors import Tensors
from hardy.engines.base import Engine
from hardy.engines.process_group import ProcessGroup


def owners(costs: Sequence[float], ranks: int) -> list[int]:
    """Client -> the rank that owns it, for good: the dearest client first, each to the rank that has least so far; ties
    go by their numbers.

    Two clients that attack and eight that do not, which cost an eighth:
    >>> owners([8, 8, 1, 1, 1, 1, 1, 1, 1, 1], 2)
    [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
    """
    loads: list[tuple[float, int]] = [(0.0, rank) for rank in range(ranks)]
    heapify(loads)
    owner = [0] * len(costs)
    for client in sorted(range(len(costs)), key=lambda client: -costs[client]):
        load, owner[client] = loads[0]
        heapreplace(loads, (load + costs[client], owner[client]))
    return owner


def one_network(plan: Plan) -> bool:
    """Whether all clients are served by the same network."""
    kept = any(plan.placement[name] is not Placement.SHARED for name in plan.model_names)
    return not kept and plan.method.norm.inference_statistics != "recomputed"


class Distributed:
    """The engine of a rank. `here` trains; it holds the rows and the private tensors of this rank's clients."""

    def __init__(self, whole: Engine, ranks: ProcessGroup, owner: Sequence[int]) -> None:
        self.ranks, self.owner = ranks, owner
        self.own = [client for client, rank in enumerate(owner) if rank == ranks.number]
        self.place = {client: at for at, client in enumerate(self.own)}
        self.plan, self.training, self.data = whole.plan, whole.training, whole.data
        self.device, self.dtype, self.train_rows = whole.device, whole.dtype, whole.train_rows
        self.name = whole.name
        mine = replace(whole.data, clients=tuple(whole.data.clients[client] for client in self.own))
        measured = whole.data if one_network(whole.plan) else mine
        device_data = copy(whole.device_data)
        device_data.federation = mine
        if ranks.number:  # the first rank shows images of all in its reports
            device_data = device_data.only(train=_rows(mine, measured, "train"), test=_rows(mine, measured, "test"))
        self.here = type(whole)(
            whole.plan,
            device_data,
            whole.training,
            seed=whole.seed,
            lane=whole.lane,
            kernels=whole.kernels,
            numbers=self.own,
            stores=whole.stores,
        )
        self.shown: ClientStore = self.here.store
        """what the run sees of the tensors of all clients"""
        self.everybody = copy(self.here)
        """the same with all clients, of which it has no tensors: for networks that they share"""
        self.everybody.data, self.everybody.numbers = whole.data, range(len(whole.data.clients))
        self.everybody.store = MemoryStore({})

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
        """The updates of this rank's clients. The first rank tells the others to begin, with a sum of the bits of what
        is trained on, so that ranks that have come apart are found out."""
        if not self.ranks.number:
            self.ranks.tell("round", work.round, work.rate, digest(work.shared))
        slots = [Slot(self.place[slot.client], slot.base) for slot in work.slots if slot.client in self.place]
        if not slots:
            return
        for updates in self.here.train(replace(work, slots=slots, reported=ClientRows(work.reported, self.own))):
            yield replace(updates, slots=[Slot(self.own[slot.client], slot.base) for slot in updates.slots])


def digest(values: Tensors) -> int:
    """A sum over the bits of tensors."""
    total = 0
    for _, value in sorted(values.items()):
        flat = value.contiguous().view(-1)
        words = flat.view(torch.int32) if flat.element_size() >= 4 else flat.view(torch.uint8)
        total = (31 * total + int(words.sum(dtype=torch.int64))) % 2**61
    return total


def _rows(mine: Federation, measured: Federation, part: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The rows that a rank holds: those its clients train on, and those that its networks are measured on."""
    if part == "train":
        held = [*(client.train for client in mine.clients), *(client.validation for client in measured.clients)]
    else:
        held = [rows for client in measured.clients for rows in (client.test, client.triggered)]
    return np.unique(np.concatenate(held))


class ClientRows(ClientStore):
    """Some clients of a store, by numbers of their own; to be read."""

    def __init__(self, whole: ClientStore, clients: Sequence[int]) -> None:
        self.whole, self.clients = whole, clients

    @property
    def like(self) -> Tensors:  # type: ignore[override]
        return self.whole.like

    @property
    def axes(self) -> tuple[int, int]:  # type: ignore[override]
        return len(self.clients), self.whole.axes[1]

    def __getitem__(self, name: str) -> Tensor:
        whole = self.whole[name]
        return whole[tensors.send(self.clients, whole.device)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)

    def read(self, slots: Sequence[Slot]) -> Tensors:
        return self.whole.read([Slot(self.clients[slot.client], slot.base) for slot in slots])
