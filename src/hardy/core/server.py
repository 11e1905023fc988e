"""One server round, the same for every engine. It reads like the papers' server algorithm."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardy.core import tensors
from hardy.core.admission import Admission, Admitted, Gate, unpack
from hardy.core.clock import Clock
from hardy.core.cohort import Cohort
from hardy.core.cohort_odds import CohortOdds, cohort_odds
from hardy.core.describe import non_defaults
from hardy.core.engine import Trains
from hardy.core.exchange import Exchange
from hardy.core.federation import Client, each_of, examples_of
from hardy.core.messages import Slot, Updates, Work
from hardy.core.method import Plan
from hardy.core.partition import Placement, Role
from hardy.core.protocols import Aggregator, RoundContext, Setting, walk
from hardy.core.ranks import ALONE, Ranks
from hardy.core.replies import TakenReplies, Tally
from hardy.core.state import ServerState
from hardy.core.store import MakeStore, MemoryStore
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


class Asked(NamedTuple):
    """Who is asked in a round."""

    cohort: list[int]
    lost: dict[int, str]
    """clients that will not answer in time, and why"""
    slots: list[Slot]
    """what the others train"""
    seconds: float = 0.0
    """how long the round takes by the clock of the simulation"""


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
    own: Trains | None = None
    """trains on the server's own rows, for a rule that compares clients with it"""
    drift: bool = False
    """measure how far the clients' weights lie apart; all replies are held until the round is over"""
    ranks: Ranks = ALONE
    """the processes that run the rounds together, each the clients it owns; all then have the same next state"""
    clock: Clock | None = None
    """how long clients take, and when they are online"""

    def round(self, state: ServerState, engine: Trains, rate: float) -> tuple[ServerState, dict[str, Any]]:
        """Cohort, slots, training, admission, aggregation, exchange. Returns the next state and the round's figures."""
        context, asked = self.context(state.shared, state.round), self.ask(state.round)
        work, lost = self._work(state, asked, rate), dict(asked.lost)
        context = self._with_server_update(context, work)
        ranks = ALONE if self._needs_all else self.ranks  # every rank then has all replies, and no more to learn
        gate = Gate(self.admission, work, context.roles, state.lengths, ranks)
        tally, taken = self._tally(work), TakenReplies(self.plan, context)
        for updates in gate.hold(self._arriving(engine, work, lost, context, state.memory, gate)):
            admitted = gate.read(gate.judge(updates))
            lost |= admitted.refused
            tally.add(admitted)
            taken.add(admitted.updates)
        if ranks.count > 1:
            self._merge(ranks, lost, tally, taken, gate)
        return self._end(state, *self._next(state, taken), asked, lost, tally, gate)

    def _merge(self, ranks: Ranks, lost: dict[int, str], tally: Tally, taken: TakenReplies, gate: Gate) -> None:
        """Brings together what each rank has of the round: figures of replies, and what the rule has folded."""
        parts = ranks.gather((lost, tally.sums, gate.taken, gate.refused, taken.reporting))
        everybodys, sums, admitted, refused, reporting = zip(*parts, strict=True)
        for each in everybodys:
            lost |= each
        tally.merge(sums)
        gate.taken, gate.refused = list(chain(*admitted)), list(chain(*refused))
        taken.merge(ranks, list(chain(*reporting)))

    def check(self) -> list[str]:
        """Refuses what could not work, before anything is trained; returns warnings."""
        population = len(self._examples)
        size, aggregator = self.cohort.size(population), self.plan.aggregator
        self.plan.method.check(self.setting)
        if not self.plan.method.pooled:
            self.admission.largest_weight(self._examples)  # refuses a share that nobody could keep to
        if size < aggregator.min_updates:
            raise HardyError(
                f"aggregator {non_defaults(aggregator)} needs {aggregator.min_updates} updates or more, but the cohort "
                f"has {size} clients. Ask more clients (cohort), expect fewer hostile ones (a smaller f), or take "
                "another rule."
            )
        self._refuse_weights(size)
        self.faults.refuse_impossible(self.seed, population, roles=self._sent_roles, method=self.plan.method.name)
        if self.plan.method.norm.branches is not None and self.training.batch < 2:
            raise HardyError(
                f"training.batch is {self.training.batch}, but BatchNorm needs 2 rows in a batch. Take larger batches, "
                "or norm group."
            )
        return [self.odds.warning] if self.odds and self.odds.warning else []

    def _refuse_weights(self, size: int) -> None:
        """Refuses a rule that weighs its updates if f clients, of a median one, can have more weight than it tolerates,
        in the worst cohort: the f heaviest clients and the lightest ones."""
        aggregator = self.plan.aggregator
        named = sorted({part.f for part in walk(aggregator) if hasattr(part, "f")})
        rules = [part for part in walk(aggregator) if isinstance(part, Aggregator) and part.uses_weights]
        weighs = named or any(type(rule).outweighed is not Aggregator.outweighed for rule in rules)
        weights = sorted((min(n, self._largest_weight) for n in self._examples), reverse=True) if weighs else []
        heavy, light = weights[:1], weights[1:][1 - size :]
        if weights and size > 2 and aggregator.outweighed(torch.tensor(heavy + light, dtype=torch.float64)):
            raise HardyError(
                f"aggregator {non_defaults(aggregator)} counts clients by their examples, and the heaviest has "
                f"{heavy[0] / sum(heavy + light):.0%} of those of a cohort of {size}: what it sends is the result. "
                "Usual fix: stage truncated_weights (f = 1, a share below 0.5) before the rule, more clients (cohort), "
                "or weigh = uniform."
            )
        for f in named:
            heavy, light = weights[:f], weights[f:][f - size :] if f < size else []
            if not aggregator.tolerates(torch.tensor(heavy + light, dtype=torch.float64)):
                raise HardyError(
                    f"aggregator {non_defaults(aggregator)} counts clients by their examples, and the {f} heaviest "
                    f"have {sum(heavy) / sum(heavy + light):.0%} of those of a cohort of {size}: more than it "
                    f"tolerates. Usual fix: stage truncated_weights (f = {f}, a share below 0.5) before the rule, more "
                    "clients (cohort), or weigh = uniform."
                )

    @cached_property
    def odds(self) -> CohortOdds | None:
        """How often a cohort holds more hostile clients than the rule tolerates, where that can happen."""
        population = len(self._examples)
        hostile = self.faults.hostile_clients(self.seed, population)
        size, sampling = self.cohort.size(population), self.cohort.sampling
        return cohort_odds(self.plan.aggregator, len(hostile), size, population, sampling)

    @property
    def setting(self) -> Setting:
        """What the method works on."""
        size = self.cohort.size(len(self._examples))
        return Setting(clients=self.clients, training=self.training, cohort=size, sampling=self.cohort.sampling)

    def start(self, make: MakeStore = MemoryStore.filled) -> ServerState:
        """The state before the first round; `make` makes what holds the clients' reported tensors."""
        bases = self.plan.method.budget.bases
        shared = self.plan.first(Placement.SHARED, bases)
        reported = make(self.plan.first(Placement.REPORTED, bases), len(self.clients))
        self.exchange.check(reported)
        reported = self.exchange.between_rounds(reported)
        memory = self.plan.aggregator.memory(self.context(shared))
        return ServerState(round=0, shared=shared, reported=reported, memory=memory)

    @cached_property
    def exchange(self) -> Exchange:
        """What the norm does to reported tensors between rounds."""
        return Exchange(self.plan.method.norm, self.plan.tags, self.clients)

    def context(self, shared: Tensors, round_number: int = 0) -> RoundContext:
        """What a rule may know of a round."""
        method = self.plan.method
        return RoundContext(
            shared=shared,
            roles=self.plan.roles,
            bases=method.budget.bases,
            clients=1 if method.pooled else len(self.clients),
            cohort=self.cohort.size(len(self._examples)),
            momentum=getattr(method.optimiser.links[-1], "momentum", 0.0),
            round=round_number,
            kinds=each_of(self.clients, attrgetter("kind")),
            capacities=each_of(self.clients, attrgetter("capacity")),
            submodels=self.plan.submodels,
            seed=self.seed,
            passes=partial(self._passes, round_number),
        )

    def _passes(self, round_number: int, client: int) -> float:
        held = self._examples[client]
        return self.training.examples(held, round_number) / max(1, held)

    def _with_server_update(self, context: RoundContext, work: Work) -> RoundContext:
        """The same round, after training on the server's own rows, where it has some."""
        if self.own is None:
            return context
        slots = [Slot(0, base) for base in range(context.bases)]
        trained = self.own.train(replace(work, slots=slots, examples=(), largest_weight=float("inf")))
        return replace(context, server_update=Updates.join([some for some in trained if isinstance(some, Updates)]))

    def ask(self, round_number: int) -> Asked:
        """Who is asked in a round, and what they train: a function of the seed, worked out once."""
        if round_number not in self._asked:
            clock, online = self.clock, None
            if clock and clock.choice.online < 1:
                online = clock.online_at(clock.start(round_number, self.ask))
            cohort = self.cohort.sample(self.seed, round_number, len(self._examples), online)
            lost = self.faults.sample_faults(self.seed, round_number, cohort)
            absent = {client for client, fate in lost.items() if fate != "late"}
            slots = self.plan.method.budget.assign(round_number, cohort, self.clients, self.seed)
            if len(self._asked) > 2:
                self._asked.clear()
            slots, seconds = [slot for slot in slots if slot.client not in absent], 0.0
            if clock:
                late, seconds = clock.end(round_number, slots, lost)
                lost = lost | late
            self._asked[round_number] = Asked(cohort, lost, slots, seconds)
        return self._asked[round_number]

    @cached_property
    def _asked(self) -> dict[int, Asked]:
        return {}

    def networks_asked(self, rounds: int) -> Sequence[int]:
        """How many networks each client was asked to train in so many rounds, lost or not."""
        done = max(number for number in self._networks if number <= rounds)
        counts = self._networks[done].copy()
        for number in range(done, rounds):
            cohort = self.cohort.sample(self.seed, number, len(self._examples))
            slots = self.plan.method.budget.assign(number, cohort, self.clients, self.seed)
            np.add.at(counts, [slot.client for slot in slots], 1)
        for number in [n for n in self._networks if n]:
            del self._networks[number]
        self._networks[rounds] = counts
        asked: list[int] = counts.tolist()
        return asked

    @cached_property
    def _networks(self) -> dict[int, NDArray[np.int64]]:
        """Rounds -> that: of none, and of the last that was asked for."""
        return {0: np.zeros(len(self.clients), np.int64)}

    def _work(self, state: ServerState, asked: Asked, rate: float) -> Work:
        return Work(
            round=state.round,
            rate=rate,
            slots=asked.slots,
            shared=state.shared,
            reported=state.reported,
            examples=self._examples,
            largest_weight=self._largest_weight,
        )

    def _arriving(
        self, engine: Trains, work: Work, lost: dict[int, str], context: RoundContext, memory: Tensors, gate: Gate
    ) -> Iterable[Updates]:
        """The replies that come in time. Where clients are hostile, all in one piece: a liar has seen what the others
        answer."""
        arriving = self._unpacked(engine, work, lost)
        if self._needs_all and self.ranks.count > 1:
            arriving = iter(self._of_all_ranks(list(arriving), work))
        hostile = self.faults.hostile_clients(self.seed, context.clients)
        if not hostile:
            return arriving

        def aggregate(updates: Updates) -> Tensors:
            admitted = self.admission.judge(updates, work, context.roles, gate.usual_of([updates])).read().updates
            folded = self.plan.aggregator.fold(None, admitted, context) if admitted.slots else None
            return self.plan.aggregator.finish(folded, context, memory)[0]

        return self.faults.tamper(list(arriving), work, hostile=hostile, roles=self._sent_roles, aggregate=aggregate)

    @property
    def _needs_all(self) -> bool:
        """Whether a round begins with all replies in one place."""
        return self.drift or bool(self.faults.hostile_clients(self.seed, len(self._examples)))

    def _of_all_ranks(self, arrived: list[Updates], work: Work) -> list[Updates]:
        """The replies of all clients, in the order of slots."""
        if not (parts := list(chain(*self.ranks.gather(arrived)))):
            return []
        updates, place = Updates.join(parts), {slot: at for at, slot in enumerate(work.slots)}
        order = sorted(range(len(updates.slots)), key=lambda at: place[updates.slots[at]])
        return [updates.take(tensors.send(order, updates.loss.device))]

    def _unpacked(self, engine: Trains, work: Work, lost: dict[int, str]) -> Iterator[Updates]:
        """Answers from outside unpacked; `lost` gets those that cannot be."""
        answered: set[Slot] = set()
        for arrived in engine.train(work):
            if isinstance(arrived, dict):
                lost |= arrived
                continue
            if isinstance(arrived, Updates):
                updates = arrived
            else:
                updates, refused = unpack(arrived, work, steps=partial(self._steps, work.round), answered=answered)
                answered |= set(updates.slots)
                lost |= refused
            updates = on_time(updates, lost)
            if updates.slots:
                yield updates

    def _next(self, state: ServerState, taken: TakenReplies) -> tuple[ServerState, Tensor]:
        """The next state, and whether it is finite: a number on the device, for which nobody waits yet."""
        shared, memory = self.plan.aggregator.finish(taken.folded, taken.context, state.memory)
        reported = self.exchange.after_round(taken.write(state.reported))
        after = ServerState(round=state.round + 1, shared=shared, reported=reported, memory=memory)
        return after, _is_finite(after)

    def _end(
        self,
        state: ServerState,
        after: ServerState,
        finite: Tensor,
        asked: Asked,
        lost: dict[int, str],
        tally: Tally,
        gate: Gate,
    ) -> tuple[ServerState, dict[str, Any]]:
        """The next state and the round's figures. A state that is not finite is never the next one: the round is then
        as if nobody had answered."""
        lengths = gate.remember()
        if tally.weight and not finite:
            lost |= tally.refuse_all()
            after, lengths = replace(state, round=after.round), state.lengths
        after = replace(after, lengths=lengths)
        return after, self._figures(after, asked, lost, tally)

    def _figures(self, after: ServerState, asked: Asked, lost: dict[int, str], tally: Tally) -> dict[str, Any]:
        return {
            "cohort": len(asked.cohort),
            "lost": {str(c): why for c, why in sorted(lost.items())},
            **({"clock_seconds": asked.seconds} if self.clock else {}),
            **self._hostile_in(asked.cohort),
            **tally.figures(asked.slots),
            **tally.apart(after.shared),
            **(self.plan.aggregator.figures(after.memory) if tally.weight else {}),
        }

    def _hostile_in(self, cohort: Sequence[int]) -> dict[str, int]:
        """How many hostile clients were asked, where some are."""
        hostile = self.faults.hostile_clients(self.seed, len(self._examples))
        return {"hostile_in_cohort": len(hostile & set(cohort))} if hostile else {}

    def _tally(self, work: Work) -> Tally:
        return Tally(self._traffic(work), self.plan.shared_trained if self.drift else ())

    def _traffic(self, work: Work) -> Callable[[Slot], int]:
        """Slot -> bytes of the tensors it is sent, and sends back."""
        sent = tensors.gather(work.shared, 0) | work.reported.like
        submodels = self.plan.submodels

        @cache
        def each(capacity: float) -> int:
            part = submodels.sizes(capacity) if submodels else {}
            return round(sum(part.get(name, value.numel()) * value.element_size() for name, value in sent.items()))

        return lambda slot: each(self.clients[slot.client].capacity)

    def _steps(self, round_number: int, client: int) -> int:
        """The local steps of a client in a round."""
        return self.training.local_steps(self._examples[client], round_number)

    @cached_property
    def _examples(self) -> Sequence[int]:
        """The training rows each client registered with."""
        held = examples_of(self.clients)
        return [sum(held)] if self.plan.method.pooled else held

    @cached_property
    def _largest_weight(self) -> float:
        """What a client counts at most; the one client of a pooled method counts alone."""
        return float("inf") if self.plan.method.pooled else self.admission.largest_weight(self._examples)

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
        context = self._with_server_update(context, work)
        gate = Gate(self.admission, work, context.roles, state.lengths)
        tally, taken, verdict = self._tally(work), TakenReplies(self.plan, context), None
        for updates in gate.hold(self._arriving(engine, work, lost, context, state.memory, gate)):
            if verdict:
                taken.add(self._counted(gate.read(verdict), lost, tally))
            verdict = gate.judge(updates)
        hoped = taken.copy()
        if verdict:
            hoped.add(verdict.updates)
        after, finite = self._next(state, hoped)
        engine.expect(state.round + 1, self.ask(state.round + 1).slots)
        if verdict:
            updates = self._counted(gate.read(verdict), lost, tally)
            if updates is not verdict.updates:
                taken.add(updates)
                after, finite = self._next(state, taken)
        return self._end(state, after, finite, asked, lost, tally, gate)

    def _counted(self, admitted: Admitted, lost: dict[int, str], tally: Tally) -> Updates:
        lost |= admitted.refused
        tally.add(admitted)
        return admitted.updates


def on_time(updates: Updates, lost: dict[int, str]) -> Updates:
    """Without the replies that come late."""
    if not lost:
        return updates
    keep = [lost.get(slot.client) != "late" for slot in updates.slots]
    return updates.where(tensors.send(torch.tensor(keep), updates.loss.device))


def _is_finite(state: ServerState) -> Tensor:
    """Whether every number is, and its square too, as sums and distances of the next round must be."""
    held = [t for t in (*state.shared.values(), *state.reported.changed(), *state.memory.values()) if t.numel()]
    found = torch._foreach_norm([t for t in held if t.is_floating_point()] or [torch.zeros(())])
    return torch.stack(found).isfinite().all()
