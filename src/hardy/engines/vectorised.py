"""Many slots in one call.

Slots whose static choices agree (their objective) run as lanes. One step is vectorised with vmap; steps are looped.
Examples are never padded, since that would poison batch statistics: at each step the slots with batches of one size
run together, and a slot that has finished its steps rests.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hardy import tensors
from hardy.client import Rows, begin, finish, keys, step
from hardy.engines.base import Engine
from hardy.messages import Slot, Updates, Work
from hardy.parts.objective import Objective
from hardy.tensors import Tensors

vmap: Any = torch.vmap
_CPU_LANE = 16
_MEMORY_SHARE = 0.5


class Vectorised(Engine):
    """Lanes of at most `lane` slots."""

    name = "vectorised"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sizes: dict[Objective, int] = {}

    def train(self, work: Work) -> Iterator[Updates]:
        planned = [
            (
                self.plan.method.objective.of(self.data.clients[slot.client].kind),
                slot,
                self.batches(work.round, slot.client),
            )
            for slot in work.slots
        ]
        # slots of one length side by side, so that few rest while others work
        planned.sort(key=lambda p: (repr(p[0]), -len(p[2]), p[1].client, p[1].base))
        for objective, group in groupby(planned, key=lambda p: p[0]):
            members = list(group)
            size = self.lane or self._fitting(work, objective, members)
            for start in range(0, len(members), size):
                chosen = members[start : start + size]
                yield self._lane(work, objective, [slot for _, slot, _ in chosen], [rows for _, _, rows in chosen])

    def _lane(self, work: Work, objective: Objective, slots: list[Slot], batches: list[list[Rows]]) -> Updates:
        clients = torch.tensor([slot.client for slot in slots], device=self.device)
        bases = torch.tensor([slot.base for slot in slots], device=self.device)
        one_base = len({slot.base for slot in slots}) == 1
        received = tensors.gather(work.shared, slots[0].base if one_base else bases)
        across = None if one_base else 0  # one base for all slots: one copy is enough
        own = tensors.gather({**work.reported, **self.store}, clients, bases)
        rate = torch.tensor(work.rate, dtype=self.dtype, device=self.device)

        each = tensors.apply(lambda t: t.expand(len(slots), *t.shape), received) if one_base else received
        state = first = begin(self.plan, self.training, each, own)
        run = vmap(partial(step, self.plan, objective, self.training), (across, 0, 0, 0, None))
        steps = [len(rows) for rows in batches]
        lane_keys = keys(self.seed, work.round, slots, max(steps)).to(self.device)
        losses = torch.full((max(steps), len(slots)), torch.nan, dtype=self.dtype, device=self.device)
        for t, members, rows in self._schedule(batches):
            batch = self.batch(rows)
            if len(members) == len(slots):
                state, losses[t] = run(received, state, batch, lane_keys[t], rate)
            else:
                part = pytree.tree_map(lambda leaf: leaf[members], state)  # noqa: B023
                moved, losses[t, members] = run(received, part, batch, lane_keys[t, members], rate)
                state = pytree.tree_map(lambda leaf, new: leaf.index_copy(0, members, new), state, moved)  # noqa: B023
        counts = torch.tensor(steps, device=self.device)
        reply = vmap(partial(finish, self.plan, objective), (across, 0, 0, 0, None))(
            received, state, first.trained, counts, rate
        )
        self.keep(slots, reply.private)
        window = torch.tensor([self.loss_window(n) for n in steps], device=self.device)
        order = torch.arange(len(losses), device=self.device)[:, None]
        last = torch.where((order >= counts - window) & (order < counts), losses, torch.nan)
        return Updates(
            slots=slots,
            shared=reply.shared,
            reported=reply.reported,
            weights=self.samples(slots),
            steps=counts,
            loss=last.nanmean(0),
        )

    def _fitting(self, work: Work, objective: Objective, members: list[Any]) -> int:
        """How many slots to run at once: on a GPU as many as its free memory holds, by a measured trial of two."""
        if self.device.type != "cuda":
            return _CPU_LANE
        if objective not in self._sizes:
            trial = [(slot, rows[:1]) for _, slot, rows in members[:2]]
            store, self.store = self.store, tensors.apply(Tensor.clone, self.store)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            self._lane(work, objective, [slot for slot, _ in trial], [rows for _, rows in trial])
            self.store = store
            each = max(1, torch.cuda.max_memory_allocated(self.device) - before) / len(trial)
            torch.cuda.empty_cache()
            self._sizes[objective] = max(1, int(_MEMORY_SHARE * torch.cuda.mem_get_info(self.device)[0] / each))
        return self._sizes[objective]

    def _schedule(self, batches: list[list[Rows]]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(step, slots that run it together, their rows [S, batch]): one copy to the device for the whole lane."""
        groups: list[tuple[int, list[int], Rows]] = []
        for t in range(max(len(rows) for rows in batches)):
            sizes: dict[int, list[int]] = {}
            for position, rows in enumerate(batches):
                if t < len(rows):
                    sizes.setdefault(len(rows[t]), []).append(position)
            for members in sizes.values():
                groups.append((t, members, np.stack([batches[m][t] for m in members])))
        flat = torch.from_numpy(np.concatenate([rows.ravel() for _, _, rows in groups])).to(self.device)
        at = 0
        for t, members, chosen in groups:
            yield t, torch.tensor(members, device=self.device), flat[at : at + chosen.size].view(chosen.shape)
            at += chosen.size

    def map(self, function: Callable[..., Any], common: Tensors, *rows: Any) -> Any:
        return vmap(function, (None, *(0 for _ in rows)))(common, *rows)
