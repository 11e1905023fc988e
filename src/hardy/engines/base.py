"""What every engine on one machine has: the data on the device, the clients' private tensors, and two verbs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hardy.core import random, tensors
from hardy.core.client import Training
from hardy.core.federation import Federation, Rows
from hardy.core.messages import Slot, Updates, Work
from hardy.core.method import Plan
from hardy.core.partition import Placement
from hardy.core.tensors import Tensors
from hardy.parts.objectives import Batch

Precision = Literal["float32", "tf32", "float64", "bfloat16"]


class DeviceData:
    """A federation's images on a device, in one tensor for all clients: no loader, no copies."""

    def __init__(self, data: Federation, device: torch.device, precision: Precision = "tf32") -> None:
        self.federation, self.device = data, device
        self.dtype = torch.float64 if precision == "float64" else torch.float32
        self.mixed = precision == "bfloat16"
        tf32 = precision in ("tf32", "bfloat16")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        self.x = {
            "train": torch.from_numpy(data.x_train).to(device),
            "test": torch.from_numpy(data.x_test).to(device),
        }
        self.y = {
            "train": torch.from_numpy(data.y_train).to(device),
            "test": torch.from_numpy(data.y_test).to(device),
        }

    def images(self, part: str, rows: Tensor) -> Tensor:
        """Pixels in [0, 1]."""
        return self.x[part][rows].to(self.dtype).div_(255.0)


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
        first: int = 0,
    ) -> None:
        self.plan, self.device_data, self.training, self.seed, self.lane = plan, device_data, training, seed, lane
        self.first = first
        """number of its first client in the whole federation: a node of a network holds one client of many"""
        self.device, self.dtype = device_data.device, device_data.dtype
        data = self.data = device_data.federation
        plan.model.to(self.device, self.dtype)  # for its constants; tensors that train are passed in
        self.train_rows = [client.train for client in data.clients]
        if plan.method.pooled:
            self.train_rows = [np.concatenate(self.train_rows)]
        bases = plan.method.budget.bases
        self.store = self.cast(plan.first(Placement.PRIVATE, len(data.clients), bases))
        """private tensors, [C, B, ...]; shared and reported ones are the server's"""

    def cast(self, values: Tensors) -> Tensors:
        """Onto the engine's device, in its precision."""
        return tensors.apply(lambda t: t.to(self.device, self.dtype if t.is_floating_point() else None), values)

    def batch(self, rows: Tensor) -> Batch:
        return Batch(self.device_data.images("train", rows), self.device_data.y["train"][rows])

    def arithmetic(self) -> torch.autocast:
        """What training steps run in: with precision bfloat16 the products of layers and what passes between them are
        bfloat16; weights, statistics, gradients and losses are float32 as ever, and so is all evaluation."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device_data.mixed, cache_enabled=False)

    def batches(self, round: int, client: int) -> list[Rows]:
        """The rows of a client's local steps; the same for every base it trains."""
        rng = random.stream(self.seed, round, self.first + client, "batches")
        return self.training.batches(self.train_rows[client], rng, round)

    def numbered(self, slots: Sequence[Slot]) -> list[Slot]:
        """The slots by their clients' numbers in the whole federation, from which all randomness comes."""
        return [Slot(self.first + slot.client, slot.base) for slot in slots] if self.first else list(slots)

    def account(self, line: dict[str, Any]) -> dict[str, Any]:
        """What a network has to add to a round's line."""
        return {}

    def loss_window(self, round: int, steps: int) -> int:
        """How many of the last steps make up the last epoch, over which the loss is reported."""
        return steps if self.training.steps is not None else max(1, steps // self.training.epochs_at(round))

    def keep(self, slots: Sequence[Slot], private: Tensors) -> None:
        """Stores what clients keep, [S, ...]. One that ruined its tensors keeps its old ones, as a restart would."""
        if not private:
            return
        each = (rows.reshape(len(slots), -1).to(self.dtype) for rows in private.values())
        fine = torch.stack([torch.linalg.vector_norm(rows, dim=1) for rows in each]).isfinite().all(0)
        where = None if self.everyone(slots) else self.where(slots)
        for name, rows in private.items():
            held, fits = self.store[name], tensors.expand_trailing(fine, rows)
            if where is None:
                all_rows = held.view(rows.shape)
                torch.where(fits, rows, all_rows, out=all_rows)
            else:
                held[where] = torch.where(fits, rows, held[where])

    def own(self, values: Tensors, slots: Sequence[Slot]) -> Tensors:
        """Rows of the slots out of [C, B, ...]; a view where the slots are all of them."""
        if self.everyone(slots):
            return tensors.apply(lambda t: t.flatten(0, 1), values)
        return tensors.gather(values, *self.where(slots))

    def where(self, slots: Sequence[Slot]) -> tuple[Tensor, ...]:
        """The slots' clients and bases, on the device."""
        return tensors.send(torch.tensor([(s.client, s.base) for s in slots]), self.device).unbind(1)

    def everyone(self, slots: Sequence[Slot]) -> bool:
        """Whether the slots are every base of every client, in order."""
        clients, bases = len(self.data.clients), self.plan.method.budget.bases
        return list(slots) == [Slot(client, base) for client in range(clients) for base in range(bases)]

    def expect(self, round: int, slots: Sequence[Slot]) -> None:
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
