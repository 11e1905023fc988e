"""What every engine on one machine has: the data on the device, the clients' private tensors, and two verbs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hardy.core import random, tensors
from hardy.core.federation import Rows, each_of
from hardy.core.messages import Slot, Updates, Work
from hardy.core.method import Plan
from hardy.core.partition import Placement
from hardy.core.protocols import Batch
from hardy.core.store import ClientStore, MakeStore, MemoryStore, as_store
from hardy.core.tensors import Tensors
from hardy.core.training import Training
from hardy.engines.device_data import DeviceData


class Engine:
    """Trains slots and maps functions over clients. A subclass says how: one by one, or many in one call."""

    name: Literal["sequential", "vectorised"]

    def __init__(
        self,
        plan: Plan,
        device_data: DeviceData,
        training: Training,
        *,
        seed: int,
        lane: int | None = None,
        kernels: bool = True,
        numbers: Sequence[int] | None = None,
        stores: MakeStore = MemoryStore.filled,
    ) -> None:
        self.plan, self.device_data, self.training, self.seed, self.lane = plan, device_data, training, seed, lane
        self.kernels = kernels
        """whether fused ones are used where there are any"""
        self.device, self.dtype = device_data.device, device_data.dtype
        data = self.data = device_data.federation
        self.numbers = range(len(data.clients)) if numbers is None else numbers
        """of its clients in the whole federation, from which all randomness comes: a node of a network holds one client
        of many, a rank some"""
        plan.model.to(self.device, self.dtype)  # for its constants; tensors that train are passed in
        self.train_rows: Sequence[Rows] = each_of(data.clients, attrgetter("train"))
        if plan.method.pooled:
            self.train_rows = [np.concatenate(self.train_rows)]
        bases = plan.method.budget.bases
        self._label_counts: dict[int, Rows] = {}
        self.stores = stores
        """makes what holds the clients' own tensors"""
        self.store = self.new_store(plan.first(Placement.PRIVATE, bases), len(data.clients))

    def __repr__(self) -> str:
        kind, clients = str(self.dtype).removeprefix("torch."), len(self.data.clients)
        return f"{self.name} engine on {self.device}, {kind}: {self.plan.method.name!r}, {clients} clients"

    @property
    def store(self) -> ClientStore:
        """Private tensors, [C, B, ...]; shared and reported ones are the server's."""
        return self._store

    @store.setter
    def store(self, values: Mapping[str, Tensor]) -> None:
        self._store = as_store(values)

    def new_store(self, first: Tensors, clients: int) -> ClientStore:
        """What holds tensors of so many clients, with first values, [B, ...], on the engine's device."""
        return self.stores(self.cast(first), clients)

    def cast(self, values: Mapping[str, Tensor]) -> Tensors:
        """Onto the engine's device, in its precision."""
        return tensors.apply(lambda t: t.to(self.device, self.dtype if t.is_floating_point() else None), values)

    def counted_labels(self, clients: Sequence[int]) -> Rows:
        """[C, K], training rows of each class that these clients have. Counted once for each."""
        held, y = self._label_counts, self.data.y_train
        for client in clients:
            if client not in held:
                held[client] = np.bincount(y[self.train_rows[client]], minlength=len(self.data.classes))
        return np.stack([held[client] for client in clients])

    def label_counts(self, clients: Sequence[int]) -> Tensor:
        """The same on the engine's device, in its precision."""
        return tensors.send(torch.from_numpy(self.counted_labels(clients)).to(self.dtype), self.device)

    def batch(self, rows: Tensor, key: Tensor, label_counts: Tensor) -> Batch:
        """The images and labels of a step, [B], or of a step of several slots, [S, B] with a key and counts each."""
        x = self.augmented(self.device_data.images("train", rows), key)
        return Batch(x, self.device_data.y["train"][rows], label_counts)

    def augmented(self, x: Tensor, key: Tensor) -> Tensor:
        """The images of a step, or of a step of several slots, as they are trained on."""
        if (change := self.device_data.augmentation) is None:
            return x
        apply = torch.vmap(change.apply) if key.dim() else change.apply
        return apply(x, random.fold(key, "augmentation"))

    def arithmetic(self, *, training: bool = True) -> AbstractContextManager[None]:
        """What steps, or evaluations, run in."""
        return self.device_data.arithmetic(training=training)

    def batches(self, round_number: int, client: int) -> list[Rows]:
        """The rows of a client's local steps; the same for every base it trains."""
        rng = random.stream(self.seed, round_number, self.numbers[client], "batches")
        return self.training.batches(self.train_rows[client], rng, round_number)

    def numbered(self, slots: Sequence[Slot]) -> list[Slot]:
        """The slots by their clients' numbers in the whole federation."""
        return [Slot(self.numbers[slot.client], slot.base) for slot in slots]

    def account(self, line: dict[str, Any]) -> dict[str, Any]:
        """What a network has to add to a round's line."""
        return {}

    def sent(self, work: Work) -> Tensors:
        """What clients of a round get, [B, ...]: the shared tensors, and what the cuts of their networks depend on."""
        told = self.plan.submodels.told(work.shared) if self.plan.submodels and work.shared else {}
        return {**work.shared, **told}

    def loss_window(self, round_number: int, steps: int) -> int:
        """How many of the last steps make up the last epoch, over which the loss is reported."""
        return steps if self.training.steps is not None else max(1, steps // self.training.epochs_at(round_number))

    def keep(self, slots: Sequence[Slot], private: Tensors) -> None:
        """Stores what clients keep, [S, ...]. One that ruined its tensors keeps its old ones, as a restart would."""
        if not private:
            return
        each = (rows.reshape(len(slots), -1).to(self.dtype) for rows in private.values())
        fine = torch.stack([torch.linalg.vector_norm(rows, dim=1) for rows in each]).isfinite().all(0)
        self.store.write(slots, private, fine)

    def expect(self, round_number: int, slots: Sequence[Slot]) -> None:
        """Told what the next round will ask for while this one is still at work; most engines need not know."""

    def train(self, work: Work) -> Iterator[Updates]:
        """Runs the slots of a round; yields their updates as they are ready."""
        raise NotImplementedError

    def map(self, function: Callable[..., Any], common: Any, *rows: Any) -> Any:
        """function(common, row) for each leading row of tensors; results stacked."""
        raise NotImplementedError

    def samples(self, slots: Sequence[Slot]) -> Tensor:
        """Training examples of each slot's client."""
        counts = [len(self.train_rows[slot.client]) for slot in slots]
        return tensors.send(torch.tensor(counts, dtype=self.dtype), self.device)
