"""Stages that remember clients: a lie that is small in every round, or a cohort full of liars, then weighs less.

Δ_i = x_i − x of weights, how far client i moved; of running statistics the value itself, so that a remembered variance
cannot fall below 0 · m_i the momentum of client i · β how much of it is kept
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hardy.core import tensors
from hardy.core.messages import Slot, Updates
from hardy.core.partition import Role
from hardy.core.protocols import RoundContext
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.parts.aggregators.base import Stage
from hardy.parts.aggregators.distances import STEPPED
from hardy.registry import part


@part("stage")
@dataclass(frozen=True, kw_only=True)
class ClientMomentum(Stage):
    """Each client's move becomes the momentum of its moves: m ← β m + (1 − β) Δ (Karimireddy et al., ICML 2021).

    m starts at the first move. With β = 0.9, a client that moved by 1 and now moves by −9 counts as 0.9 − 0.9 = 0. The
    server keeps an update of every client.
    """

    momentum: float = 0.9
    """β, how much of the moves before is kept"""
    remembers_clients: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise HardyError(f"momentum (β) of {self} is {self.momentum}; it must be in [0, 1).")

    @property
    def changes_weights(self) -> bool:
        return False

    def memory(self, context: RoundContext) -> Tensors:
        each = {
            f"move.{n}": torch.zeros_like(t[:1]).expand(context.clients, *t.shape[1:]).clone()
            for n, t in context.shared.items()
        }
        figures = {name: torch.zeros(context.clients) for name in ("weights", "steps", "loss")}
        return {**each, **figures, "heard": torch.zeros(context.clients, dtype=torch.int64)}

    def apply(self, updates: Updates, context: RoundContext, memory: Tensors) -> tuple[Updates, Tensors]:
        cohort = tensors.send([slot.client for slot in updates.slots], updates.weights.device)
        known = memory["heard"][cohort] > 0
        kept = {**memory, "heard": memory["heard"].index_fill(0, cohort, 1)}
        for name, value in updates.shared.items():
            held, now = memory[f"move.{name}"], value
            if value.is_floating_point():
                now = (value - self._origin(name, updates, context)).to(held)
                before = held[cohort]
                now = torch.where(tensors.expand_trailing(known, now), torch.lerp(now, before, self.momentum), now)
            kept[f"move.{name}"] = held.index_copy(0, cohort, now.to(held))
        for name in ("weights", "steps", "loss"):
            figure = getattr(updates, name)
            kept[name] = memory[name].index_copy(0, cohort, figure.to(memory[name]))
        return self._remembered(updates, context, kept, cohort), kept

    def _remembered(self, updates: Updates, context: RoundContext, kept: Tensors, clients: Tensor) -> Updates:
        """The updates of some clients, as they are remembered."""
        base = updates.slots[0].base
        shared = {}
        for name, value in updates.shared.items():
            held = kept[f"move.{name}"][clients]
            origin = self._origin(name, updates, context) if value.is_floating_point() else 0
            shared[name] = (origin + held).to(value)
        return replace(
            updates,
            slots=[Slot(client, base) for client in clients.tolist()],
            shared=shared,
            reported={},
            weights=kept["weights"][clients].to(updates.weights),
            steps=kept["steps"][clients].to(updates.steps),
            loss=kept["loss"][clients].to(updates.loss),
        )

    def _origin(self, name: str, updates: Updates, context: RoundContext) -> Tensor:
        """Where a tensor's moves are counted from."""
        sent = context.shared[name][updates.slots[0].base]
        return sent if context.roles[name] in {*STEPPED, Role.CONTROL} else torch.zeros_like(sent)


@part("stage")
@dataclass(frozen=True, kw_only=True)
class DelayedMomentum(ClientMomentum):
    """DeMoA: the momenta of all clients, also of those not asked, as they were when they last answered (Otsuka et al.,
    ICML 2026).

    The rule then sees all clients that ever answered, so that its f counts hostile clients of all, and a cohort in
    which they are the majority is no majority. Of 50 clients, 5 a round, with f = 10 the trimmed mean starts when 21
    have answered. A client that never answered is left out. The paper remembers gradients; here these are the moves.
    """

    remembers_all: ClassVar[bool] = True

    def min_updates(self, after: int) -> int:
        return 1

    def apply(self, updates: Updates, context: RoundContext, memory: Tensors) -> tuple[Updates, Tensors]:
        _, kept = super().apply(updates, context, memory)
        return self._remembered(updates, context, kept, kept["heard"].nonzero().flatten()), kept


client_momentum, delayed_momentum = ClientMomentum, DelayedMomentum
__all__ = ["client_momentum", "delayed_momentum"]
