"""Many slots in one call.

Slots whose static choices agree (their objective) run as lanes. One step is vectorised with vmap; steps are looped.
Examples are never padded, since that would poison batch statistics: at each step the slots with batches of one size
run together, and a slot that has finished its steps rests.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hardy.core import tensors
from hardy.core.client import ClientState, compute_gradients, init_client, make_reply, step_keys
from hardy.core.federation import Rows
from hardy.core.manner import Manner, fused_products, vectorising
from hardy.core.messages import Slot, Updates, Work
from hardy.core.protocols import Objective, name_part
from hardy.core.tensors import Tensors
from hardy.engines.base import Engine
from hardy.engines.lane import Lane, cuda_stream
from hardy.errors import HardyError
from hardy.models.stacked import why_not_fused


def vmap(function: Callable[..., Any], in_dims: tuple[Any, ...], manner: Manner = "many") -> Callable[..., Any]:
    """torch.vmap, with layers told of it."""
    mapped = torch.vmap(function, in_dims)

    def run(*arguments: Any) -> Any:
        with vectorising(manner):
            return mapped(*arguments)

    return run


class _Planned(NamedTuple):
    """What a slot has to do: its objective, and the rows of its steps."""

    objective: Objective
    slot: Slot
    batches: list[Rows]


class _Task(NamedTuple):
    """What a lane has to do, with all of it that the host can prepare while the device still works at the last one."""

    objective: Objective
    slots: list[Slot]
    longest: int
    """steps of the slot that takes most"""
    counts: Tensor
    """[S], steps"""
    window: Tensor
    """[S], how many of the last steps the loss is taken over"""
    keys: Tensor
    """[steps, S]"""
    examples: Tensor
    """[S], that its clients hold"""
    label_counts: Tensor
    """[S, K]"""
    schedule: list[tuple[int, Tensor | slice, Tensor]]
    same_first_batch: bool
    """whether all take their first step together"""
    urgent: bool
    """whether its kernels go first where lanes run side by side: with the fewest slots it waits for launches, while
    others fill the device"""


_CPU_LANE = 16
_MEMORY_SHARE = 0.5
_SPARE = 1.5
_Key = tuple[Objective, int, bool, bool]
"""what a lane's captured steps depend on: objective, number of slots, whether all train one base, frozen statistics"""
_EVERYONE = slice(None)


class Vectorised(Engine):
    """Lanes of at most `lane` slots."""

    name = "vectorised"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sizes: dict[Objective, int] = {}
        self._each: dict[Objective, float] = {}
        """bytes a slot takes"""
        self._lanes: dict[_Key, Lane] = {}
        """in the order in which they were last used"""
        self._expected: tuple[int, list[Slot], list[_Task]] | None = None
        self._streams: dict[tuple[int, bool], torch.cuda.Stream] = {}
        """for lanes side by side: by their number, and whether they are urgent"""

    @property
    def manner(self) -> Manner:
        """How layers run. The matrix units have no float32 and no float64 of their own: there torch's layers stay."""
        fused = self.kernels and self.device.type == "cuda" and self.device_data.tf32
        return "fused" if fused and not why_not_fused(self.device) else "many"

    @property
    def fixed(self) -> bool:
        """Whether lanes are kept from round to round with their tensors, as captured steps need it."""
        return self.device.type == "cuda"

    def expect(self, round_number: int, slots: Sequence[Slot]) -> None:
        planned = self._planned(round_number, slots) if self.device.type == "cuda" else []
        if planned and all(p.objective in self._sizes for p in planned):
            tasks = self._tasks(round_number, planned, lambda some: self._sizes[some[0].objective])
            self._expected = round_number, list(slots), list(tasks)

    def train(self, work: Work) -> Iterator[Updates]:
        if self._expected and self._expected[:2] == (work.round, list(work.slots)):
            tasks: Iterable[_Task] = self._expected[2]
        else:
            planned = self._planned(work.round, work.slots)
            tasks = self._tasks(work.round, planned, partial(self._fitting, work))
        self._expected = None
        known = isinstance(tasks, list) and len(tasks) > 1
        fit = known and sum(len(task.slots) / self._sizes[task.objective] for task in tasks) <= 1
        for updates, private in self._side_by_side(work, tasks) if fit else (self._lane(work, task) for task in tasks):
            self.keep(updates.slots, private)
            yield updates

    def _side_by_side(self, work: Work, tasks: Iterable[_Task]) -> list[tuple[Updates, Tensors]]:
        """Lanes that fill the device only together, each on a stream of its own."""
        here, done = torch.cuda.current_stream(self.device), []
        try:
            for number, task in enumerate(tasks):
                key = number, task.urgent
                if key not in self._streams:
                    self._streams[key] = cuda_stream(self.device, urgent=task.urgent)
                self._streams[key].wait_stream(here)
                with torch.cuda.stream(self._streams[key]):
                    done.append(self._lane(work, task))
        finally:
            for aside in self._streams.values():
                here.wait_stream(aside)
        return done

    def _planned(self, round_number: int, slots: Sequence[Slot]) -> list[_Planned]:
        planned = [
            _Planned(
                self.plan.objective(self.data.clients[slot.client], round_number),
                slot,
                self.batches(round_number, slot.client),
            )
            for slot in slots
        ]
        # slots of one length side by side, so that few rest while others work
        planned.sort(key=lambda p: (repr(p.objective), -len(p.batches), p.slot.client, p.slot.base))
        return planned

    def _tasks(
        self, round_number: int, planned: list[_Planned], fitting: Callable[[list[_Planned]], int]
    ) -> Iterator[_Task]:
        groups = [list(group) for _, group in groupby(planned, key=lambda p: p.objective)]
        fewest = min(map(len, groups), default=0)
        for members in groups:
            size = fitting(members)
            if self.plan.synchronised and (len(groups) > 1 or len(members) > size):
                raise HardyError(
                    f"norm {name_part(self.plan.method.norm)!r} needs all clients of a step in one call, but they run "
                    f"in several: {len(groups)} objectives, {size} clients at once. Take clients of one kind and "
                    "capacity, fewer of them, or a smaller network."
                )
            for start in range(0, len(members), size):
                some = members[start : start + size]
                yield self._task(round_number, some, urgent=len(groups) > 1 and len(members) == fewest)

    def _task(self, round_number: int, members: list[_Planned], *, urgent: bool = False) -> _Task:
        slots, batches = [m.slot for m in members], [m.batches for m in members]
        steps = [len(rows) for rows in batches]
        window = [self.loss_window(round_number, n) for n in steps]
        key = step_keys(self.seed, round_number, self.numbered(slots), max(steps))
        groups = _schedule(batches)
        together, rows = [members for _, members, _ in groups], [rows for _, _, rows in groups]
        held = [len(self.train_rows[slot.client]) for slot in slots], self.counted_labels([s.client for s in slots])
        sent = tensors.send_all([steps, window, key, *held, *together, *rows], self.device)
        counts, window_, key_, examples, labels, *sent = sent
        return _Task(
            objective=members[0].objective,
            slots=slots,
            longest=max(steps),
            counts=counts,
            window=window_,
            keys=key_,
            examples=examples,
            label_counts=labels,
            schedule=[
                (t, _EVERYONE if len(members) == len(slots) else sent[at], sent[len(groups) + at])
                for at, (t, members, _) in enumerate(groups)
            ],
            same_first_batch=len({len(rows[0]) for rows in batches}) == 1,
            urgent=urgent,
        )

    def _lane(self, work: Work, task: _Task, *, trial: bool = False) -> tuple[Updates, Tensors]:
        """What a lane's slots send, and what they keep."""
        objective, slots = task.objective, task.slots
        one_base = len({slot.base for slot in slots}) == 1
        bases = slots[0].base if one_base else tensors.send([slot.base for slot in slots], self.device)
        received = tensors.gather(self.sent(work), bases)
        own = {**work.reported.read(slots), **self.store.read(slots)}
        rate = torch.full((), work.rate, dtype=self.dtype, device=self.device)
        # one base for all slots: one copy of it is enough
        each = tensors.apply(lambda t: t.expand(len(slots), *t.shape), received) if one_base else received
        first = init_client(self.plan, each, own, task.label_counts.to(self.dtype))

        frozen = self.plan.method.norm.frozen(work.round)
        one = partial(compute_gradients, self.plan, objective, frozen=frozen)

        def look(received: Tensors, state: ClientState, rows: Tensor, key: Tensor, rate: Tensor, opening: bool) -> Any:
            own, dims = _opening(received, state) if opening else (state, 0)
            many = vmap(one, (None if one_base else 0, dims, 0, 0, None), self.manner)
            batch = self.batch(rows, key, state.label_counts)
            with self.arithmetic():
                return many(received, own, batch, key, rate)

        make = partial(
            Lane,
            look,
            self.plan.method.optimiser,
            objective,
            one_base=one_base,
            fixed=self.fixed,
            rounding=self._rounding(),
            urgent=task.urgent,
        )
        lane = self._held((objective, len(slots), one_base, frozen), make) if self.fixed and not trial else make()
        alike = one_base and task.same_first_batch
        lane.load(received, first, rate, opening=alike)
        losses = torch.zeros(task.longest, len(slots), dtype=self.dtype, device=self.device)
        for t, members, rows in task.schedule:
            losses[t, members] = lane.step(rows, task.keys[t, members], members, opening=alike and t == 0)

        reply = make_reply(self.plan, objective, received, lane.unload(), first.trained, task.counts, rate)
        order = torch.arange(task.longest, device=self.device)[:, None]
        last = (order >= task.counts - task.window) & (order < task.counts)
        updates = Updates(
            slots=slots,
            shared=reply.shared,
            reported=reply.reported,
            weights=task.examples.to(self.dtype),
            steps=task.counts,
            loss=torch.where(last, losses, 0).sum(0) / task.window,
        )
        return updates, reply.private

    def _rounding(self) -> Callable[[Tensors], Tensors] | None:
        """What rounds the weights that products read, where a lane keeps rounded copies."""
        if self.manner != "fused" or not self.device_data.mixed:
            return None
        from hardy.kernels.descent import round_all

        trained = set(self.plan.trained)
        names = [name for name in fused_products(self.plan.model) if name in trained]
        return partial(round_all, names=names, dtype=torch.bfloat16)

    def _fitting(self, work: Work, members: list[_Planned]) -> int:
        """How many slots to run at once: on a GPU no more than its free memory holds, by a measured trial of two."""
        if self.device.type != "cuda":
            return len(members) if self.plan.synchronised else self.lane or _CPU_LANE
        objective = members[0].objective
        if objective not in self._sizes:
            self._make_room(0.0)
            trial = [m._replace(batches=m.batches[:1]) for m in members[:2]]
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            self._lane(work, self._task(work.round, trial), trial=True)
            each = max(1, torch.cuda.max_memory_allocated(self.device) - before) / len(trial)
            torch.cuda.empty_cache()
            self._each[objective] = each
            most = int(_MEMORY_SHARE * torch.cuda.mem_get_info(self.device)[0] / each)
            self._sizes[objective] = max(1, min(self.lane or most, most))
        return self._sizes[objective]

    def _held(self, key: _Key, make: Callable[..., Lane]) -> Lane:
        """The lane of these slots if there is one, which has its steps captured; a new one if not. Where memory is
        short, those that were not used for longest go."""
        if key in self._lanes:
            lane = self._lanes.pop(key)
        else:
            self._make_room(_SPARE * self._each.get(key[0], 0.0) * key[1])
            lane = make(captured=self.device.type == "cuda")
        self._lanes[key] = lane
        return lane

    def _make_room(self, needed: float) -> None:
        """Frees what engines that are no more have left, and lanes until so many bytes are free."""
        if self.device.type != "cuda":
            return
        gc.collect()
        torch.cuda.empty_cache()
        while self._lanes and torch.cuda.mem_get_info(self.device)[0] < needed:
            self._lanes.pop(next(iter(self._lanes)))
            gc.collect()
            torch.cuda.empty_cache()

    def map(self, function: Callable[..., Any], common: Any, *rows: Any) -> Any:
        with self.arithmetic(training=False):
            return vmap(function, (None, *(0 for _ in rows)), self.manner)(common, *rows)


def _schedule(batches: list[list[Rows]]) -> list[tuple[int, list[int], Rows]]:
    """(step, positions of the slots that run it together, their rows [S, batch])"""
    groups = []
    for t in range(max(len(rows) for rows in batches)):
        sizes: dict[int, list[int]] = {}
        for position, rows in enumerate(batches):
            if t < len(rows):
                sizes.setdefault(len(rows[t]), []).append(position)
        groups += [(t, members, np.stack([batches[m][t] for m in members])) for members in sizes.values()]
    return groups


def _opening(received: Tensors, state: ClientState) -> tuple[ClientState, ClientState]:
    """The state at the first step, and its axes: what all slots have just received is one tensor without a slot axis,
    so that a layer of all slots is one product instead of many."""
    start = state._replace(trained={name: received.get(name, own) for name, own in state.trained.items()}, rounded={})
    dims = pytree.tree_map(lambda _: 0, start)
    return start, dims._replace(trained={name: None if name in received else 0 for name in state.trained})
