"""One slot after another: the readable reference, the debugger, and the choice for wide networks."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hardy.core import tensors
from hardy.core.client import begin, compute_gradients, finish, keys, move
from hardy.core.messages import Updates, Work
from hardy.engines.base import Engine


class Sequential(Engine):
    """A plain loop over slots."""

    name = "sequential"

    def train(self, work: Work) -> Iterator[Updates]:
        rate = torch.tensor(work.rate, dtype=self.dtype, device=self.device)
        for slot in work.slots:
            objective = self.plan.objective(self.data.clients[slot.client], work.round)
            frozen = self.plan.method.norm.frozen(work.round)
            received = tensors.gather(work.shared, slot.base)
            own = tensors.gather({**work.reported, **self.store}, slot.client, slot.base)
            first = begin(self.plan, received, own)
            state = first._replace(trained=tensors.copies(first.trained), private=tensors.copies(first.private))
            momentum = tensors.apply(torch.zeros_like, state.trained) if self.training.momentum else {}
            batches = self.batches(work.round, slot.client)
            noise = torch.from_numpy(keys(self.seed, work.round, self.numbered([slot]), len(batches)))[:, 0]
            losses = []
            for rows, key in zip(batches, noise, strict=True):
                batch = self.batch(torch.from_numpy(rows).to(self.device))
                with self.arithmetic():
                    found = compute_gradients(
                        self.plan, objective, received, state, batch, key.to(self.device), frozen=frozen
                    )
                state = move(self.training, objective, state, momentum, found, rate)
                losses.append(found.loss)
            steps = torch.tensor(len(batches), device=self.device)
            reply = finish(self.plan, objective, received, state, first.trained, steps, rate)
            self.keep([slot], tensors.stack([reply.private]))
            yield Updates(
                slots=[slot],
                shared=tensors.stack([reply.shared]),
                reported=tensors.stack([reply.reported]),
                weights=self.samples([slot]),
                steps=steps[None],
                loss=torch.stack(losses[-self.loss_window(work.round, len(batches)) :]).mean()[None],
            )

    def map(self, function: Callable[..., Any], common: Any, *rows: Any) -> Any:
        leaves, spec = pytree.tree_flatten(rows)
        results = [
            function(common, *pytree.tree_unflatten([leaf[i] for leaf in leaves], spec)) for i in range(len(leaves[0]))
        ]
        flat = [pytree.tree_flatten(result) for result in results]
        return pytree.tree_unflatten(
            [torch.stack(leaf) for leaf in zip(*(f[0] for f in flat), strict=True)], flat[0][1]
        )
