"""What travels between the server and an engine."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hardy.core import tensors
from hardy.core.store import ClientStore, Slot, as_store
from hardy.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a round asks of the clients."""

    round: int
    rate: float
    """learning rate of this round"""
    slots: Sequence[Slot]
    shared: Tensors
    """[B, ...]"""
    reported: ClientStore
    """[C, B, ...], as the server last left them"""
    examples: Sequence[int] = ()
    """[C], the training examples each client registered with; empty: no reply's count is doubted"""
    largest_weight: float = float("inf")
    """what a client counts at most"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reported", as_store(self.reported))

    @cached_property
    def asked(self) -> frozenset[Slot]:
        return frozenset(self.slots)

    @cached_property
    def matrix(self) -> Tensor:
        """All floating shared tensors of a base in one row, [B, D]."""
        return tensors.flatten(self.shared, next(iter(self.shared.values())))

    def sent_lengths(self, spans: tensors.Spans) -> Tensor:
        """How long the shared tensors are in these columns, [B]. Measured once a round."""
        if spans not in self._lengths:
            self._lengths[spans] = tensors.span_lengths(self.matrix, spans)
        return self._lengths[spans]

    @cached_property
    def _lengths(self) -> dict[tensors.Spans, Tensor]:
        return {}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back from one slot over a network, as it came. Nothing in it can be trusted."""

    slot: Slot
    round: Any
    shared: Mapping[str, Any]
    """name -> array, like those sent down"""
    reported: Mapping[str, Any]
    examples: Any
    steps: Any
    loss: Any


@dataclass(frozen=True, kw_only=True)
class Updates:
    """What came back from some slots, stacked: the shared tensors as each slot left them, and its figures."""

    slots: Sequence[Slot]
    shared: Tensors
    reported: Tensors
    weights: Tensor
    """[S], the number of training examples as the server knows it; weighing stages change it"""
    steps: Tensor
    loss: Tensor
    """[S], mean over the last local epoch, without penalties"""

    @cached_property
    def matrix(self) -> Tensor:
        """All floating shared tensors of a slot in one row, [S, D]."""
        return tensors.flatten(self.shared, self.weights)

    @cached_property
    def bases(self) -> Tensor:
        return tensors.send([slot.base for slot in self.slots], self.weights.device)

    def where(self, keep: Tensor) -> "Updates":
        """Only the slots marked true."""
        return self.take(keep.nonzero().flatten())

    def take(self, index: Tensor) -> "Updates":
        """The slots at these places, in this order."""
        return replace(
            self,
            slots=[self.slots[i] for i in index.tolist()],
            shared=tensors.gather(self.shared, index),
            reported=tensors.gather(self.reported, index),
            weights=self.weights[index],
            steps=self.steps[index],
            loss=self.loss[index],
        )

    def only(self, names: Iterable[str]) -> "Updates":
        """Only these shared tensors."""
        return self.holding(tensors.select(self.shared, names))

    def holding(self, shared: Tensors) -> "Updates":
        """The same replies with other shared tensors."""
        made = replace(self, shared=shared)
        made.__dict__["bases"] = self.bases  # on the device already
        return made

    @staticmethod
    def join(parts: Sequence["Updates"]) -> "Updates":
        if len(parts) == 1:
            return parts[0]
        return Updates(
            slots=[slot for part in parts for slot in part.slots],
            shared=tensors.concatenate([part.shared for part in parts]),
            reported=tensors.concatenate([part.reported for part in parts]),
            weights=torch.cat([part.weights for part in parts]),
            steps=torch.cat([part.steps for part in parts]),
            loss=torch.cat([part.loss for part in parts]),
        )


__all__ = ["Answer", "Slot", "Updates", "Work"]
