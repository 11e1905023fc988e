"""Stages before a robust rule: updates are drawn together, or their moves cut short, so that fewer liars do less."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hardy.core import random, tensors
from hardy.core.messages import Slot, Updates
from hardy.core.protocols import RoundContext
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.parts.aggregators.base import Stage
from hardy.parts.aggregators.distances import (
    ToleratesByzantine,
    blend,
    move_lengths,
    sent_down,
    smallest,
    squared_distances,
)
from hardy.registry import part


@dataclass(frozen=True, kw_only=True)
class _Reshapes(Stage):
    """A stage whose effect is in the values of the updates."""

    @property
    def changes_weights(self) -> bool:
        return False


def _mix(share: Tensor, slots: Sequence[Slot], updates: Updates, context: RoundContext) -> Updates:
    """Each new update is a mean of the old ones, [T, S], and so are its figures. Counters take the largest value."""

    largest = {
        name: value.amax(0).expand(len(share), *value.shape[1:])
        for name, value in updates.shared.items()
        if not value.is_floating_point()
    }
    weights, steps, loss = (
        (share @ figure.double()).to(updates.weights) for figure in (updates.weights, updates.steps, updates.loss)
    )
    shared = updates.shared | largest
    mixed = replace(updates, slots=slots, shared=shared, weights=weights, steps=steps, loss=loss)
    return _with_matrix(blend(share, updates, context), mixed)


def _with_matrix(matrix: Tensor, updates: Updates) -> Updates:
    """The same with other values of the floating tensors."""
    return replace(updates, shared=updates.shared | tensors.unflatten(matrix, updates.shared), reported={})


@part("stage")
@dataclass(frozen=True, kw_only=True)
class NearestNeighbourMixing(ToleratesByzantine, _Reshapes):
    """NNM: each update becomes the mean of the n − f nearest to it, itself included (Allouah et al., AISTATS 2023)."""

    def min_updates(self, after: int) -> int:
        return max(after, 2 * self.f + 1)

    def apply(self, updates: Updates, context: RoundContext, memory: Tensors) -> tuple[Updates, Tensors]:
        (squared, keys), keep = squared_distances(updates, context), len(updates.slots) - self.f
        nearest = smallest(squared, keys, keep)
        return _mix(torch.zeros_like(squared).scatter(1, nearest, 1 / keep), updates.slots, updates, context), memory


@part("stage")
@dataclass(frozen=True, kw_only=True)
class Bucketing(_Reshapes):
    """Updates dealt at random into buckets, each of which becomes its mean (Karimireddy et al., ICLR 2022).

    A liar spoils its whole bucket, so the rule that follows still meets f of them, among fewer.
    """

    size: int
    """s, updates a bucket; the last may have fewer"""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise HardyError(f"bucketing size (s) is {self.size}; it must be 1 or more.")

    def min_updates(self, after: int) -> int:
        return self.size * (after - 1) + 1

    def apply(self, updates: Updates, context: RoundContext, memory: Tensors) -> tuple[Updates, Tensors]:
        slots = updates.slots
        rng = random.stream(context.seed, context.round, "buckets", slots[0].base)
        by_client = np.argsort([slot.client for slot in slots])  # the order in which they came must not matter
        dealt = by_client[rng.permutation(len(slots))]
        buckets = [dealt[first : first + self.size] for first in range(0, len(slots), self.size)]
        share = np.stack([np.bincount(bucket, minlength=len(slots)) / len(bucket) for bucket in buckets])
        here = tensors.send(torch.from_numpy(share), updates.weights.device)
        return _mix(here, [slots[bucket[0]] for bucket in buckets], updates, context), memory


def _clip(lengths: Tensor, radius: Tensor | float, updates: Updates, context: RoundContext) -> Updates:
    """No update further from what was sent down than the radius."""
    scale = torch.where(lengths > radius, radius / lengths, 1.0).to(updates.matrix)
    return _with_matrix((updates.matrix * scale).addcmul_(1 - scale, sent_down(updates, context)), updates)


@part("stage")
@dataclass(frozen=True, kw_only=True)
class Clipping(_Reshapes):
    """No update moves further than a radius from what was sent down."""

    radius: float
    """the furthest an update may move"""

    def __post_init__(self) -> None:
        if not self.radius > 0:
            raise HardyError(f"clipping radius is {self.radius}; it must be above 0.")

    def apply(self, updates: Updates, context: RoundContext, memory: Tensors) -> tuple[Updates, Tensors]:
        return _clip(move_lengths(updates, context), self.radius, updates, context), memory


@part("stage")
@dataclass(frozen=True, kw_only=True)
class AdaptiveClipping(ToleratesByzantine, _Reshapes):
    """ARC: the ⌊2 (f/n) (n − f)⌋ longest moves are cut to the length of the next (Allouah et al., ICLR 2025)."""

    def min_updates(self, after: int) -> int:
        return max(after, 2 * self.f + 1)

    def apply(self, updates: Updates, context: RoundContext, memory: Tensors) -> tuple[Updates, Tensors]:
        lengths, count = move_lengths(updates, context), len(updates.slots)
        clipped = 2 * self.f * (count - self.f) // count
        return _clip(lengths, lengths.sort(0).values[count - clipped - 1], updates, context), memory


nearest_neighbour_mixing, bucketing = NearestNeighbourMixing, Bucketing
clipping, adaptive_clipping = Clipping, AdaptiveClipping
__all__ = ["adaptive_clipping", "bucketing", "clipping", "nearest_neighbour_mixing"]
