"""Stages before a robust rule: updates are drawn together, or their moves cut short, so that fewer liars do less."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

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
    STEPPED,
    ToleratesByzantine,
    ToleratesWeight,
    blend,
    first_of,
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
class NearestNeighbourMixing(ToleratesWeight, _Reshapes):
    """NNM: each update becomes the mean of the n − f nearest to it, itself included (Allouah et al., AISTATS 2023).

    By samples: the weighted mean of the nearest of weight W − F, and each keeps its own weight. It holds while F < W/2.
    """

    def min_updates(self, after: int) -> int:
        return max(after, self.least)

    def apply(self, updates: Updates, context: RoundContext, memory: Tensors) -> tuple[Updates, Tensors]:
        (squared, keys), keep = squared_distances(updates, context), len(updates.slots) - self.f
        if self.weigh == "samples":
            each, total, hostile, _ = self.weights(updates.weights)
            order = smallest(squared, keys, len(each))
            share = torch.zeros_like(squared).scatter(1, order, first_of(each[order], total - hostile))
            mixed = _mix(share / (total - hostile), updates.slots, updates, context)
            return replace(mixed, weights=updates.weights), memory
        nearest = smallest(squared, keys, keep)
        return _mix(torch.zeros_like(squared).scatter(1, nearest, 1 / keep), updates.slots, updates, context), memory


@part("stage")
@dataclass(frozen=True, kw_only=True)
class TruncatedWeights(ToleratesByzantine, Stage):
    """Weights are cut at the largest cap with which no f clients have more than a share (Portnoy et al., 2020).

    With f = 1, a share of 0.4 and the weights 60, 20, 10, 10 the cap is 26.67: of 26.67 + 40 it is 0.4. A claimed
    number of rows can then buy no more than the share, and rows above the cap count for nothing.
    """

    share: float
    """α*, the most that the f heaviest may have together, less than what the rule breaks down at"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.f < 1 or not 0 < self.share < 1:
            raise HardyError(f"{self}: f must be 1 or more, and share in (0, 1).")

    def min_updates(self, after: int) -> int:
        return max(after, int(self.f / self.share) + 1)

    def apply(self, updates: Updates, context: RoundContext, memory: Tensors) -> tuple[Updates, Tensors]:
        return replace(updates, weights=self.reweigh(updates.weights)), memory

    def reweigh(self, weights: Tensor) -> Tensor:
        heaviest = weights.double().sort(descending=True).values
        cut = torch.arange(1, len(heaviest) + 1).to(heaviest)  # k, how many are capped
        below = heaviest.sum() - heaviest.cumsum(0)
        uncut = (heaviest[: self.f].sum() - heaviest.cumsum(0)).clamp_min(0.0)  # of the f heaviest, what is not capped
        caps = (self.share * below - uncut) / (cut.clamp_max(self.f) - self.share * cut)
        holds = caps >= torch.cat([heaviest[1:], heaviest.new_zeros(1)]) * (1 - 1e-12)
        cap = caps[holds.int().argmax()]  # the smallest k: the largest cap
        tame = heaviest[: self.f].sum() <= self.share * heaviest.sum()
        return torch.where(tame, weights, weights.minimum(cap.to(weights)))


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
    """No update lies further than a radius from what was sent down, x, or from where the last round's move leads.

    Around the last move, and with client_momentum before it and the mean after it, this is the centred clipping of
    Karimireddy et al. (ICML 2021): v + (Δ − v) min(1, τ/‖Δ − v‖), where v is by how much weights moved in the last
    round. With v = (3, 0), τ = 2 and Δ = (−7, 0) it is (1, 0). Running statistics are clipped around x.
    """

    radius: float
    """τ, the furthest an update may lie from the centre"""
    around: Literal["sent", "last_move"] = "sent"
    """the centre: what was sent down, or that plus the weights' move in the round before"""

    def __post_init__(self) -> None:
        if not self.radius > 0:
            raise HardyError(f"clipping radius is {self.radius}; it must be above 0.")

    def memory(self, context: RoundContext) -> Tensors:
        if self.around == "sent":
            return {}
        before = {f"sent.{n}": torch.zeros_like(t[0]) for n, t in _stepped(context).items()}
        return {"rounds": torch.zeros((), dtype=torch.int64), **before}

    def apply(self, updates: Updates, context: RoundContext, memory: Tensors) -> tuple[Updates, Tensors]:
        if self.around == "sent":
            return _clip(move_lengths(updates, context), self.radius, updates, context), memory
        base, known = updates.slots[0].base, memory["rounds"] > 0
        here = {n: t[base] for n, t in _stepped(context).items()}
        moved = {n: torch.where(known, 2 * t - memory[f"sent.{n}"], t) for n, t in here.items()}
        led = {n: moved.get(n, t[base])[None] for n, t in context.shared.items()}
        centre = tensors.flatten(led, updates.weights[:1])
        away = updates.matrix - centre
        lengths = torch.linalg.vector_norm(away.double(), dim=1, keepdim=True)
        scale = torch.where(lengths > self.radius, self.radius / lengths, 1.0).to(away)
        sent = {f"sent.{n}": t for n, t in here.items()}
        return _with_matrix(centre + scale * away, updates), {"rounds": memory["rounds"] + 1, **sent}


def _stepped(context: RoundContext) -> Tensors:
    """The shared weights and affine parameters."""
    return {n: t for n, t in context.shared.items() if context.roles[n] in STEPPED}


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


nearest_neighbour_mixing, bucketing, truncated_weights = NearestNeighbourMixing, Bucketing, TruncatedWeights
clipping, adaptive_clipping = Clipping, AdaptiveClipping
__all__ = ["adaptive_clipping", "bucketing", "clipping", "nearest_neighbour_mixing", "truncated_weights"]
