"""One server round, the same for every engine. It reads like the papers' server algorithm."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from math import prod
from operator import mul
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from hardy.core import random, tensors
from hardy.core.admission import Admission, Admitted, Verdict, unpack
from hardy.core.client import Training
from hardy.core.federation import Client
from hardy.core.messages import Answer, Slot, Updates, Work
from hardy.core.method import Plan
from hardy.core.partition import Placement, Role
from hardy.core.state import ServerState
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.faults.injection import Faults
from hardy.parts.aggregators.base import RoundContext
from hardy.parts.objectives import Objective


class Trains(Protocol):
    """All the server asks of an engine."""

    def train(self, work: Work) -> Iterable[Updates | Sequence[Answer] | dict[int, str]]:
        """Updates as they are ready, or answers as they come in from outside; a dict: why clients will not answer."""
        ...

    def expect(self, round: int, slots: Sequence[Slot]) -> None:
        """What it will be asked for next, told while it may still be at work."""
        ...

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
    training: Training = field(default_factory=Training)
    drift: bool = False
    """measure how far the clients' weights lie apart; all replies are held until the round is over"""

    def refuse_impossible(self, training: Training) -> None:
        """Errors for what could not work, before anything is trained."""
        self.plan.method.budget.check(self.clients)
        cohort, aggregator = self.cohort.sample(self.seed, 0, len(self._examples)), self.plan.aggregator
        if len(cohort) < aggregator.min_updates:
            raise HardyError(
                f"aggregator {aggregator} needs {aggregator.min_updates} updates or more, but the cohort has {len(cohort)} "
                "clients. Ask more clients (cohort), expect fewer liars (a smaller f), or take another rule."
            )
        self.faults.refuse_impossible(
            self.seed, len(self._examples), roles=self._sent_roles, method=self.plan.method.name
        )
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
        memory = self.plan.aggregator.memory(self._context(shared))
        return ServerState(round=0, shared=shared, reported=reported, memory=memory)

    def _context(self, shared: Tensors, round: int = 0) -> RoundContext:
        method = self.plan.method
        return RoundContext(
            shared=shared,
            roles=self.plan.roles,
            bases=method.budget.bases,
            clients=1 if method.pooled else len(self.clients),
            momentum=self.training.momentum,
            round=round,
            kinds=[client.kind for client in self.clients],
            capacities=[client.capacity for client in self.clients],
            seed=self.seed,
        )

    def round(self, state: ServerState, engine: Trains, rate: float) -> tuple[ServerState, dict[str, Any]]:
        """Cohort, slots, training, admission, aggregation, exchange. Returns the next state and the round's figures."""
        context = self._context(state.shared, state.round)
        cohort, lost, slots = self.ask(state.round)
        work = Work(
            round=state.round,
            rate=rate,
            slots=slots,
            shared=state.shared,
            reported=state.reported,
            examples=self._examples,
        )

        tally = _Tally(self._traffic(work), self._weights if self.drift else ())
        arriving: Iterable[Updates] = self._arriving(engine, work, lost)
        if hostile := self.faults.hostile_clients(self.seed, context.clients):
            arriving = self._tampered(arriving, work, context, state.memory, hostile)
        taken, verdict = _Taken(None, state.reported), None
        for updates in arriving:
            if verdict:
                taken = taken.add(self._admitted(verdict, lost, tally), self.plan, context)
            verdict = self.admission.judge(updates, work, context.roles)
        # the rest is queued as if the last replies were admitted too, and the next round prepared; only then does the
        # host wait for the device
        after = self._next(taken.add(verdict and verdict.updates, self.plan, context), state, context)
        engine.expect(state.round + 1, self.ask(state.round + 1)[2])
        if verdict and (admitted := self._admitted(verdict, lost, tally)) is not verdict.updates:
            after = self._next(taken.add(admitted, self.plan, context), state, context)
        return after, {
            "cohort": len(cohort),
            "lost": {str(c): why for c, why in sorted(lost.items())},
            **tally.figures(slots),
            **tally.apart(after.shared),
            **(self.plan.aggregator.figures(after.memory) if tally.weight else {}),
        }

    def _admitted(self, verdict: Verdict, lost: dict[int, str], tally: "_Tally") -> Updates:
        admitted = verdict.read()
        lost |= admitted.refused
        tally.add(admitted)
        return admitted.updates

    def _next(self, taken: "_Taken", state: ServerState, context: RoundContext) -> ServerState:
        shared, memory = self.plan.aggregator.finish(taken.folded, context, state.memory)
        reported = self.plan.method.norm.exchange(taken.reported, self.plan.tags, self.clients)
        return ServerState(round=state.round + 1, shared=shared, reported=reported, memory=memory)

    def ask(self, round: int) -> tuple[list[int], dict[int, str], list[Slot]]:
        """The cohort of a round, those of it who are lost and why, and what the others train."""
        cohort = self.cohort.sample(self.seed, round, len(self._examples))
        lost = self.faults.sample_faults(self.seed, round, cohort)
        absent = {client for client, fate in lost.items() if fate != "late"}
        slots = self.plan.method.budget.assign(round, cohort, self.clients, self.seed)
        return cohort, lost, [slot for slot in slots if slot.client not in absent]

    def _traffic(self, work: Work) -> Callable[[Slot], int]:
        """Slot -> bytes of the tensors it is sent, and sends back."""
        sent = tensors.gather(work.shared, 0) | (tensors.gather(work.reported, 0, 0) if work.reported else {})
        sent = {name: sent[name] for name in self.plan.roles if name in sent}

        @cache
        def each(objective: Objective) -> int:
            corner = objective.corner(tensors.shapes(sent))
            return sum(prod(corner[name]) * value.element_size() for name, value in sent.items())

        return cache(lambda slot: each(self.plan.objective(self.clients[slot.client], work.round)))

    def _arriving(self, engine: Trains, work: Work, lost: dict[int, str]) -> Iterator[Updates]:
        """The replies that come in time, answers from outside unpacked; `lost` gets those that cannot be."""
        answered: list[Slot] = []
        for arrived in engine.train(work):
            if isinstance(arrived, dict):
                lost |= arrived
                continue
            if isinstance(arrived, Updates):
                updates = arrived
            else:
                updates, refused = unpack(arrived, work, steps=partial(self._steps, work.round), answered=answered)
                answered += updates.slots
                lost |= refused
            updates = on_time(updates, lost)
            if updates.slots:
                yield updates

    def _steps(self, round: int, client: int) -> int:
        """The local steps of a client in a round."""
        return len(self.training.batches(np.arange(self._examples[client]), random.stream(0), round))

    def _tampered(
        self, arriving: Iterable[Updates], work: Work, context: RoundContext, memory: Tensors, hostile: frozenset[int]
    ) -> list[Updates]:
        """All replies in one piece, those of hostile clients replaced."""

        def aggregate(updates: Updates) -> Tensors:
            admitted = self.admission.judge(updates, work, context.roles).read().updates
            folded = self.plan.aggregator.fold(None, admitted, context) if admitted.slots else None
            return self.plan.aggregator.finish(folded, context, memory)[0]

        return self.faults.tamper(list(arriving), work, hostile=hostile, roles=self._sent_roles, aggregate=aggregate)

    @cached_property
    def _examples(self) -> list[int]:
        """The training rows each client registered with."""
        held = [len(client.train) for client in self.clients]
        return [sum(held)] if self.plan.method.pooled else held

    @cached_property
    def _sent_roles(self) -> dict[str, Role]:
        """The roles of the tensors that clients send."""
        sent = {*self.plan.names(Placement.SHARED), *self.plan.names(Placement.REPORTED)}
        return {name: role for name, role in self.plan.roles.items() if name in sent}

    @cached_property
    def _weights(self) -> list[str]:
        """The shared tensors that clients train."""
        return [name for name in self.plan.trained if self.plan.placement[name] is Placement.SHARED]


def on_time(updates: Updates, lost: dict[int, str]) -> Updates:
    if not lost:
        return updates
    keep = [lost.get(slot.client) != "late" for slot in updates.slots]
    return updates.where(tensors.send(torch.tensor(keep), updates.loss.device))


class _Taken(NamedTuple):
    """What the server has taken in of a round's replies."""

    folded: Any
    reported: Tensors

    def add(self, updates: Updates | None, plan: Plan, context: RoundContext) -> "_Taken":
        if updates is None or not updates.slots:
            return self
        return _Taken(plan.aggregator.fold(self.folded, updates, context), _write(self.reported, updates))


def _write(reported: Tensors, updates: Updates) -> Tensors:
    if not reported:
        return reported
    clients = tensors.send([slot.client for slot in updates.slots], updates.loss.device)
    return tensors.scatter(reported, updates.reported, clients, updates.bases)


class _Tally:
    """Adds up what the admitted replies say."""

    def __init__(self, traffic: Callable[[Slot], int], held: Sequence[str] = ()) -> None:
        self.traffic, self.held = traffic, held
        """names of the tensors whose drift is measured"""
        self.replies: list[Updates] = []
        self.loss = self.weight = 0.0
        self.bytes_up = 0

    def add(self, admitted: Admitted) -> None:
        self.loss += sum(map(mul, admitted.loss, admitted.weights))
        self.weight += sum(admitted.weights)
        self.bytes_up += sum(map(self.traffic, admitted.updates.slots))
        if self.held and admitted.updates.slots:
            self.replies.append(admitted.updates.only(self.held))

    def figures(self, slots: Sequence[Slot]) -> dict[str, Any]:
        loss = self.loss / self.weight if self.weight else None
        down = sum(map(self.traffic, slots))
        return {"slots": len(slots), "loss": loss, "bytes_up": self.bytes_up, "bytes_down": down}

    def apart(self, shared: Tensors) -> dict[str, float]:
        """How far the replies lie from the next shared tensors, and how much they scatter around their own mean."""
        if not self.replies:
            return {}
        updates = Updates.join(self.replies)
        next_ones = tensors.flatten(tensors.select(shared, self.held), next(iter(shared.values())))
        centre = torch.stack([updates.matrix[updates.bases == b].mean(0) for b in range(len(next_ones))])
        drift = (updates.matrix - next_ones[updates.bases]).norm(dim=1)
        scatter = (updates.matrix - centre[updates.bases]).square().sum(1)
        return {"drift": drift.mean().item(), "variance": scatter.mean().item()}
