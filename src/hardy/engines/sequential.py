"""One slot after another: the readable reference, the debugger, and the choice for wide networks."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hardy.core import tensors
from hardy.core.client import apply_gradients, compute_gradients, fresh_copies, init_client, make_reply, step_keys
from hardy.core.federation import Rows
from hardy.core.messages import Updates, Work
from hardy.core.protocols import Batch
from hardy.engines.base import Engine

_STEPS = 16
"""steps whose images are gathered at once"""


class Sequential(Engine):
    """A plain loop over slots."""

    name = "sequential"

    def train(self, work: Work) -> Iterator[Updates]:
        rate = torch.tensor(work.rate, dtype=self.dtype, device=self.device)
        frozen, sent = self.plan.method.norm.frozen(work.round), self.sent(work)
        planned = [self.batches(work.round, slot.client) for slot in work.slots]
        keys = torch.from_numpy(
            step_keys(self.seed, work.round, self.numbered(work.slots), max(map(len, planned), default=0))
        ).to(self.device)
        for slot, batches, own_keys in zip(work.slots, planned, keys.unbind(1), strict=True):
            objective = self.plan.objective(self.data.clients[slot.client], work.round)
            received = tensors.gather(sent, slot.base)
            own = tensors.gather({**work.reported.read([slot]), **self.store.read([slot])}, 0)
            first = init_client(self.plan, received, own, self.label_counts([slot.client])[0])
            state, losses = fresh_copies(first), []
            for some in self._gathered(batches, own_keys, first.label_counts):
                with self.arithmetic():
                    for batch, key in some:
                        found = compute_gradients(
                            self.plan, objective, received, state, batch, key, rate, frozen=frozen
                        )
                        state = apply_gradients(self.plan.method.optimiser, objective, state, found, rate)
                        losses.append(found.loss)
            steps = torch.tensor(len(batches), device=self.device)
            reply = make_reply(self.plan, objective, received, state, first.trained, steps, rate)
            self.keep([slot], tensors.stack([reply.private]))
            yield Updates(
                slots=[slot],
                shared=tensors.stack([reply.shared]),
                reported=tensors.stack([reply.reported]),
                weights=self.samples([slot]),
                steps=steps[None],
                loss=torch.stack(losses[-self.loss_window(work.round, len(batches)) :]).mean()[None],
            )

    def _gathered(
        self, batches: Sequence[Rows], keys: Tensor, label_counts: Tensor
    ) -> Iterator[list[tuple[Batch, Tensor]]]:
        """Batch and key of each step, some steps at a time, whose images are gathered at once."""
        for start in range(0, len(batches), _STEPS):
            some = batches[start : start + _STEPS]
            rows, sizes = torch.from_numpy(np.concatenate(some)).to(self.device), list(map(len, some))
            x = torch.split(self.device_data.images("train", rows), sizes)
            y = torch.split(self.device_data.y["train"][rows], sizes)
            steps = zip(x, y, keys[start : start + len(some)], strict=True)
            yield [(Batch(self.augmented(x, key), y, label_counts), key) for x, y, key in steps]

    def map(self, function: Callable[..., Any], common: Any, *rows: Any) -> Any:
        leaves, spec = pytree.tree_flatten(rows)
        with self.arithmetic(training=False):
            results = [
                function(common, *pytree.tree_unflatten([leaf[i] for leaf in leaves], spec))
                for i in range(len(leaves[0]))
            ]
        flat = [pytree.tree_flatten(result) for result in results]
        return pytree.tree_unflatten(
            [torch.stack(leaf) for leaf in zip(*(f[0] for f in flat), strict=True)], flat[0][1]
        )
