"""One server round, the same for every engine. It reads like the papers' server algorithm."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from math import comb, prod
from operator import mul
from typing import Any, NamedTuple

import torch

from hardy.core import random, tensors
from hardy.core.admission import Admission, Admitted, unpack
from hardy.core.engine import Trains
from hardy.core.federation import Client
from hardy.core.messages import Slot, Updates, Work
from hardy.core.method import Plan
from hardy.core.partition import Placement, Role
from hardy.core.protocols import RoundContext, Setting, walk
from hardy.core.state import ServerState
from hardy.core.tensors import Tensors
from hardy.core.training import Training
from hardy.errors import HardyError


class FaultModel:
    """What goes wrong with clients. This one: nothing."""

    def sample_faults(self, seed: int, round_number: int, cohort: Sequence[int]) -> dict[int, str]:
        """Client -> what happens to it in this round: dropped, crashed or late."""
        return {}

    def hostile_clients(self, seed: int, clients: int) -> frozenset[int]:
        """The hostile ones of so many clients, the same in every round."""
        return frozenset()

    def refuse_impossible(self, seed: int, clients: int, *, roles: Mapping[str, Role], method: str) -> None:
        """Refuses attacks that would have no effect on the tensors that the clients of a method send."""

    def tamper(
        self,
        updates: Sequence[Updates],
        work: Work,
        *,
        hostile: Collection[int],
        roles: Mapping[str, Role],
        aggregate: Callable[[Updates], Tensors],
    ) -> list[Updates]:
        """The round's replies with those of the hostile clients replaced; `roles` are those of the tensors sent, and
        `aggregate` says what the server would make of some replies."""
        return list(updates)


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
        if self.clients is not None and self.fraction != 1:
            raise HardyError(
                f"cohort.fraction is {self.fraction} and cohort.clients is {self.clients}; one of them has no effect. "
                "Leave one out."
            )

    def size(self, population: int) -> int:
        """Clients asked in a round."""
        size = self.clients or max(1, round_half_up(self.fraction * population))
        if size > population:
            raise HardyError(f"cohort.clients is {size}, but there are {population} clients to ask.")
        return size

    def sample(self, seed: int, round_number: int, population: int) -> list[int]:
        """A fresh draw each round, without replacement."""
        if (size := self.size(population)) == population:
            return list(range(population))
        return sorted(random.stream(seed, round_number, "cohort").choice(population, size, replace=False).tolist())


def round_half_up(value: float) -> int:
    return int(value + 0.5)


class Asked(NamedTuple):
    """Who is asked in a round."""

    cohort: list[int]
    lost: dict[int, str]
    """clients that will not answer in time, and why"""
    slots: list[Slot]
    """what the others train"""


@dataclass(frozen=True, kw_only=True)
class Server:
    """The rules of a federation: who is asked, what happens to them, which replies count."""

    plan: Plan
    clients: Sequence[Client]
    seed: int
    cohort: Cohort = field(default_factory=Cohort)
    faults: FaultModel = field(default_factory=FaultModel)
    admission: Admission = field(default_factory=Admission)
    training: Training = field(default_factory=Training)
    drift: bool = False
    """measure how far the clients' weights lie apart; all replies are held until the round is over"""

    def round(self, state: ServerState, engine: Trains, rate: float) -> tuple[ServerState, dict[str, Any]]:
        """Cohort, slots, training, admission, aggregation, exchange. Returns the next state and the round's figures."""
        context, asked = self.context(state.shared, state.round), self.ask(state.round)
        work, lost = self._work(state, asked, rate), dict(asked.lost)
        tally, folded, reported = self._tally(work), None, state.reported
        for updates in self._arriving(engine, work, lost, context, state.memory):
            admitted = self.admission.judge(updates, work, context.roles).read()
            lost |= admitted.refused
            tally.add(admitted)
            if admitted.updates.slots:
                folded = self.plan.aggregator.fold(folded, admitted.updates, context)
                reported = _write(reported, admitted.updates)
        after = self._next(state, context, folded, reported)
        return after, self._figures(after, asked, lost, tally)

    def check(self) -> list[str]:
        """Refuses what could not work, before anything is trained; returns warnings."""
        population = len(self._examples)
        size, aggregator = self.cohort.size(population), self.plan.aggregator
        self.plan.method.check(self.setting)
        if size < aggregator.min_updates:
            raise HardyError(
                f"aggregator {aggregator} needs {aggregator.min_updates} updates or more, but the cohort has {size} "
                "clients. Ask more clients (cohort), expect fewer hostile ones (a smaller f), or take another rule."
            )
        hostile = self.faults.hostile_clients(self.seed, population)
        self.faults.refuse_impossible(self.seed, population, roles=self._sent_roles, method=self.plan.method.name)
        if self.plan.method.norm.branches is not None:
            for number, client in enumerate(self.clients):
                if (rows := min(self.training.batch, len(client.train))) < 2:
                    raise HardyError(
                        f"client {number} trains on batches of {rows} ({len(client.train)} rows, training.batch "
                        f"{self.training.batch}), but BatchNorm needs 2. Take larger batches, fewer clients, or norm "
                        "group."
                    )
        return self._exceedable(len(hostile), size, population)

    def _exceedable(self, hostile: int, size: int, population: int) -> list[str]:
        """A warning where a sampled cohort can hold more hostile clients than a robust rule tolerates."""
        tolerated = [part.f for part in walk(self.plan.method.aggregator) if hasattr(part, "f")]
        if not tolerated or not hostile:
            return []
        f, most = min(tolerated), min(hostile, size)
        draws = (comb(hostile, k) * comb(population - hostile, size - k) for k in range(f + 1, most + 1))
        if not (chance := sum(draws) / comb(population, size)):
            return []
        return [
            f"{hostile} of {population} clients are hostile and the rule tolerates f = {f} in a cohort of {size}: "
            f"{chance:.1%} of the rounds hold more. Ask more clients (cohort), or raise f."
        ]

    @property
    def setting(self) -> Setting:
        """What the method works on."""
        size = self.cohort.size(len(self._examples))
        return Setting(clients=self.clients, training=self.training, cohort=size)

    def start(self) -> ServerState:
        """The state before the first round."""
        bases = self.plan.method.budget.bases
        shared = self.plan.first(Placement.SHARED, bases)
        reported = self.plan.first(Placement.REPORTED, len(self.clients), bases)
        memory = self.plan.aggregator.memory(self.context(shared))
        return ServerState(round=0, shared=shared, reported=reported, memory=memory)

    def context(self, shared: Tensors, round_number: int = 0) -> RoundContext:
        """What a rule may know of a round."""
        method = self.plan.method
        return RoundContext(
            shared=shared,
            roles=self.plan.roles,
            bases=method.budget.bases,
            clients=1 if method.pooled else len(self.clients),
            momentum=getattr(method.optimiser.links[-1], "momentum", 0.0),
            round=round_number,
            kinds=[client.kind for client in self.clients],
            capacities=[client.capacity for client in self.clients],
            submodels=self.plan.submodels,
            seed=self.seed,
        )

    def ask(self, round_number: int) -> Asked:
        """Who is asked in a round, and what they train: a function of the seed, worked out once."""
        if round_number not in self._asked:
            cohort = self.cohort.sample(self.seed, round_number, len(self._examples))
            lost = self.faults.sample_faults(self.seed, round_number, cohort)
            absent = {client for client, fate in lost.items() if fate != "late"}
            slots = self.plan.method.budget.assign(round_number, cohort, self.clients, self.seed)
            if len(self._asked) > 2:
                self._asked.clear()
            self._asked[round_number] = Asked(cohort, lost, [slot for slot in slots if slot.client not in absent])
        return self._asked[round_number]

    @cached_property
    def _asked(self) -> dict[int, Asked]:
        return {}

    def _work(self, state: ServerState, asked: Asked, rate: float) -> Work:
        return Work(
            round=state.round,
            rate=rate,
            slots=asked.slots,
            shared=state.shared,
            reported=state.reported,
            examples=self._examples,
        )

    def _arriving(
        self, engine: Trains, work: Work, lost: dict[int, str], context: RoundContext, memory: Tensors
    ) -> Iterable[Updates]:
        """The replies that come in time. Where clients are hostile, all in one piece: a liar has seen what the others
        answer."""
        arriving = self._unpacked(engine, work, lost)
        hostile = self.faults.hostile_clients(self.seed, context.clients)
        if not hostile:
            return arriving

        def aggregate(updates: Updates) -> Tensors:
            admitted = self.admission.judge(updates, work, context.roles).read().updates
            folded = self.plan.aggregator.fold(None, admitted, context) if admitted.slots else None
            return self.plan.aggregator.finish(folded, context, memory)[0]

        return self.faults.tamper(list(arriving), work, hostile=hostile, roles=self._sent_roles, aggregate=aggregate)

    def _unpacked(self, engine: Trains, work: Work, lost: dict[int, str]) -> Iterator[Updates]:
        """Answers from outside unpacked; `lost` gets those that cannot be."""
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

    def _next(self, state: ServerState, context: RoundContext, folded: Any, reported: Tensors) -> ServerState:
        shared, memory = self.plan.aggregator.finish(folded, context, state.memory)
        reported = self.plan.method.norm.exchange(reported, self.plan.tags, self.clients)
        return ServerState(round=state.round + 1, shared=shared, reported=reported, memory=memory)

    def _figures(self, after: ServerState, asked: Asked, lost: dict[int, str], tally: "_Tally") -> dict[str, Any]:
        return {
            "cohort": len(asked.cohort),
            "lost": {str(c): why for c, why in sorted(lost.items())},
            **tally.figures(asked.slots),
            **tally.apart(after.shared),
            **(self.plan.aggregator.figures(after.memory) if tally.weight else {}),
        }

    def _tally(self, work: Work) -> "_Tally":
        return _Tally(self._traffic(work), self.plan.shared_trained if self.drift else ())

    def _traffic(self, work: Work) -> Callable[[Slot], int]:
        """Slot -> bytes of the tensors it is sent, and sends back."""
        sent = tensors.gather(work.shared, 0) | (tensors.gather(work.reported, 0, 0) if work.reported else {})
        submodels = self.plan.submodels

        @cache
        def each(capacity: float) -> int:
            part = submodels.shapes(capacity) if submodels else {}
            return sum(prod(part.get(name, value.shape)) * value.element_size() for name, value in sent.items())

        return lambda slot: each(self.clients[slot.client].capacity)

    def _steps(self, round_number: int, client: int) -> int:
        """The local steps of a client in a round."""
        return self.training.local_steps(self._examples[client], round_number)

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


@dataclass(frozen=True, kw_only=True)
class PipelinedServer(Server):
    """The same round for a GPU: the host never waits for the device while there is something left to queue.

    Each lane's replies are judged while the next lane trains. The last lane is aggregated as if all of it were
    admitted, and the next round is prepared; only then is its verdict read, and the aggregation done again if a reply
    was refused. A law says that both servers agree, bit for bit.
    """

    def round(self, state: ServerState, engine: Trains, rate: float) -> tuple[ServerState, dict[str, Any]]:
        context, asked = self.context(state.shared, state.round), self.ask(state.round)
        work, lost = self._work(state, asked, rate), dict(asked.lost)
        tally, taken, verdict = self._tally(work), _Taken(None, state.reported), None
        for updates in self._arriving(engine, work, lost, context, state.memory):
            if verdict:
                admitted = verdict.read()
                taken = taken.add(self._counted(admitted, lost, tally), self.plan, context)
            verdict = self.admission.judge(updates, work, context.roles)
        hoped = taken.add(verdict and verdict.updates, self.plan, context)
        after = self._next(state, context, *hoped)
        engine.expect(state.round + 1, self.ask(state.round + 1).slots)
        if verdict:
            updates = self._counted(verdict.read(), lost, tally)
            if updates is not verdict.updates:
                after = self._next(state, context, *taken.add(updates, self.plan, context))
        return after, self._figures(after, asked, lost, tally)

    def _counted(self, admitted: Admitted, lost: dict[int, str], tally: "_Tally") -> Updates:
        lost |= admitted.refused
        tally.add(admitted)
        return admitted.updates


class _Taken(NamedTuple):
    """What the server has taken in of a round's replies."""

    folded: Any
    reported: Tensors

    def add(self, updates: Updates | None, plan: Plan, context: RoundContext) -> "_Taken":
        if updates is None or not updates.slots:
            return self
        return _Taken(plan.aggregator.fold(self.folded, updates, context), _write(self.reported, updates))


def on_time(updates: Updates, lost: dict[int, str]) -> Updates:
    """Without the replies that come late."""
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
