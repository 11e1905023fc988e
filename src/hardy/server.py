"""One server round, the same for every engine. It reads like the papers' server algorithm."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hardy import random, tensors
from hardy.client import Training
from hardy.data.splits import Client
from hardy.errors import HardyError
from hardy.messages import Slot, Updates, Work
from hardy.method import Plan
from hardy.partition import Placement
from hardy.parts.admission import Admission
from hardy.parts.aggregation import Frame
from hardy.robustness.faults import Faults
from hardy.state import ServerState
from hardy.tensors import Tensors


class Trains(Protocol):
    """All the server asks of an engine."""

    def train(self, work: Work) -> Iterable[Updates]: ...

    def cast(self, values: Tensors) -> Tensors: ...


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """`[cohort]`: which clients are asked each round."""

    fraction: float = 1.0
    """share of the clients"""
    clients: int | None = None
    """their number, instead of a share"""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise HardyError(f"cohort.fraction is {self.fraction}; it must be in (0, 1].")
        if self.clients is not None and self.clients < 1:
            raise HardyError(f"cohort.clients is {self.clients}; it must be 1 or more.")

    def sample(self, seed: int, round: int, population: int) -> list[int]:
        """A fresh draw each round, without replacement."""
        size = self.clients or max(1, round_half_up(self.fraction * population))
        if size > population:
            raise HardyError(f"cohort.clients is {size}, but there are {population} clients to ask.")
        if size == population:
            return list(range(population))
        return sorted(random.stream(seed, round, "cohort").choice(population, size, replace=False).tolist())


def round_half_up(value: float) -> int:
    return int(value + 0.5)


@dataclass(frozen=True, kw_only=True)
class Server:
    """The rules of a federation: who is asked, what befalls them, which replies count."""

    plan: Plan
    clients: Sequence[Client]
    seed: int
    cohort: Cohort = field(default_factory=Cohort)
    faults: Faults = field(default_factory=Faults)
    admission: Admission = field(default_factory=Admission)
    momentum: float = 0.0
    """of the clients' optimiser, which some rules must know"""

    def refuse_impossible(self, training: Training) -> None:
        """Errors for what could not work, before anything is trained."""
        self.cohort.sample(self.seed, 0, 1 if self.plan.method.pooled else len(self.clients))
        if self.plan.method.norm.branches is None:
            return
        for number, client in enumerate(self.clients):
            if (size := min(training.batch, len(client.train))) < 2:
                raise HardyError(
                    f"client {number} trains on batches of {size} ({len(client.train)} rows, training.batch "
                    f"{training.batch}), but BatchNorm needs 2. Take larger batches, fewer clients, or norm group."
                )

    def start(self) -> ServerState:
        """The state before the first round."""
        bases = self.plan.method.budget.bases
        shared = self.plan.first(Placement.SHARED, bases)
        reported = self.plan.first(Placement.REPORTED, len(self.clients), bases)
        memory = self.plan.method.aggregator.memory(self._frame(shared))
        return ServerState(round=0, shared=shared, reported=reported, memory=memory)

    def _frame(self, shared: Tensors) -> Frame:
        method = self.plan.method
        clients = 1 if method.pooled else len(self.clients)
        return Frame(
            shared=shared, roles=self.plan.roles, bases=method.budget.bases, clients=clients, momentum=self.momentum
        )

    def round(self, state: ServerState, engine: Trains, rate: float) -> tuple[ServerState, dict[str, Any]]:
        """Cohort, slots, training, admission, aggregation, exchange. Returns the next state and the round's figures."""
        method, frame = self.plan.method, self._frame(state.shared)
        cohort = self.cohort.sample(self.seed, state.round, frame.clients)
        lost = self.faults.strike(self.seed, state.round, cohort)
        absent = {client for client, fate in lost.items() if fate != "late"}
        rng = random.stream(self.seed, state.round, "budget")
        slots = [slot for slot in method.budget.assign(state.round, cohort, rng) if slot.client not in absent]
        work = Work(round=state.round, rate=rate, slots=slots, shared=state.shared, reported=state.reported)

        folded, reported, tally = None, state.reported, _Tally()
        for updates in filter(lambda u: u.slots, (on_time(u, lost) for u in engine.train(work))):
            admitted, refused = self.admission.admit(updates, work)
            lost |= refused
            if admitted.slots:
                folded = method.aggregator.fold(folded, admitted, frame)
                reported = _write(reported, admitted)
                tally.add(admitted)
        shared, memory = method.aggregator.finish(folded, frame, state.memory)
        reported = method.norm.exchange(reported, self.plan.tags, self.clients)
        after = ServerState(round=state.round + 1, shared=shared, reported=reported, memory=memory)
        return after, {
            "cohort": len(cohort),
            "lost": {str(c): why for c, why in sorted(lost.items())},
            **tally.figures(slots, work),
        }


def on_time(updates: Updates, lost: dict[int, str]) -> Updates:
    if not lost:
        return updates
    keep = [lost.get(slot.client) != "late" for slot in updates.slots]
    return updates.where(tensors.send(torch.tensor(keep), updates.loss.device))


def _write(reported: Tensors, updates: Updates) -> Tensors:
    if not reported:
        return reported
    clients = tensors.send([slot.client for slot in updates.slots], updates.loss.device)
    return tensors.scatter(reported, updates.reported, clients, updates.bases)


class _Tally:
    """Adds up what the admitted replies say. Sums stay on the device until the round is over."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []
        self.bytes_up = 0

    def add(self, updates: Updates) -> None:
        self.losses.append(updates.loss * updates.weights)
        self.weights.append(updates.weights)
        self.bytes_up += tensors.count_bytes(updates.shared) + tensors.count_bytes(updates.reported)

    def figures(self, slots: Sequence[Slot], work: Work) -> dict[str, Any]:
        loss = (torch.cat(self.losses).sum() / torch.cat(self.weights).sum()).item() if self.losses else None
        one = tensors.count_bytes(tensors.gather(work.shared, 0))
        if work.reported:
            one += tensors.count_bytes(tensors.gather(work.reported, 0, 0))
        return {"slots": len(slots), "loss": loss, "bytes_up": self.bytes_up, "bytes_down": one * len(slots)}
