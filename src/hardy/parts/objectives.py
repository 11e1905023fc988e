"""Objectives: what a client minimises in one step, and what it keeps for itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hardy.core.net import Net
from hardy.core.tensors import Tensors
from hardy.registry import kind, part

Shape = tuple[int, int, int]
"""(channel, height, width) of an image"""


class Batch(NamedTuple):
    """Images in [0, 1] and labels of one step."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a client's round went, for `Objective.finish`."""

    start: Tensors
    """trained tensors as received"""
    end: Tensors
    received: Tensors
    private: Tensors
    steps: Tensor
    rate: Tensor


@dataclass(frozen=True, kw_only=True)
class DiagnosisContext:
    """What `Objective.diagnose` can ask of a federation between two rounds."""

    each: Callable[[Callable[[Net, Tensors, Batch, Tensor], Any]], Any]
    """runs a function for some clients, on each one's network, private tensors and first training rows; pure, it may
    run under vmap. Results are stacked"""
    shared: frozenset[str]
    """the trained tensors all clients have in common"""
    clients: int
    rate: float
    """of the round before, η"""
    steps: int
    """local steps a round, τ"""


@kind("objective")
@dataclass(frozen=True, kw_only=True)
class Objective:
    """The part that says what a step minimises. Its methods are pure; those of a step run under vmap."""

    @property
    def passes(self) -> int:
        """Forward-and-backward passes one step makes over its batch, for the count of MACs."""
        return 1

    @property
    def branches(self) -> frozenset[str]:
        """The branches of statistics its passes go through."""
        return frozenset({"clean"})

    @property
    def has_adversary(self) -> bool:
        """Whether the gradient with respect to the private tensors is wanted by `step_adversary`."""
        return False

    def of(self, kind: str, round: int = 0) -> "Objective":
        """The objective of a client of this kind (AT or ST) in a round."""
        return self

    @property
    def personal(self) -> "Objective":
        """What a client goes on with alone, when the federation is over."""
        return self

    def within(self, capacity: float) -> "Objective":
        """The objective of a client that can afford this share of the full width."""
        return self

    def corner(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """The part of each tensor, from its first entries on, that a client with this objective holds and sends."""
        return {name: tuple(shape) for name, shape in shapes.items()}

    def nets(self, shapes: Mapping[str, Sequence[int]]) -> list[dict[str, tuple[int, ...]]]:
        """The shapes of each network that a pass runs, for the count of MACs."""
        return [self.corner(shapes)]

    def shared(self, trained: Tensors) -> Tensors:
        """Shared tensors this objective adds, with their first values; `trained` are the shared trained ones."""
        return {}

    def private(self, trained: Tensors, shape: Shape) -> Tensors:
        """Private tensors this objective adds, with their first values."""
        return {}

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        """What is reported as the client's loss, and minimised together with the penalty."""
        raise NotImplementedError

    def penalty(self, trained: Tensors, received: Tensors) -> Tensor | float:
        """What is minimised besides the loss, but not reported."""
        return 0.0

    def correct(self, gradient: Tensors, private: Tensors, received: Tensors) -> tuple[Tensors, Tensors]:
        """The gradient to descend along, and the private tensors it leaves."""
        return gradient, private

    def step_adversary(self, private: Tensors, gradient: Tensors) -> None:
        """A step of ascent on the private tensors along their gradient, in place. Unlike the methods above it runs
        without vmap, on one slot or on a stack of them: figures broadcast with `tensors.expand_trailing`."""

    def finish(self, outcome: Outcome) -> tuple[Tensors, Tensors]:
        """(private tensors to keep, values of the added shared tensors to send up); runs as `step_adversary` does."""
        return outcome.private, {}

    def diagnose(self, context: DiagnosisContext) -> dict[str, Any]:
        """RunTotals to follow over the rounds besides loss and accuracy, where `evaluation.diagnose` asks for them;
        `broken_conditions` is a list of warnings."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Wrapper(Objective):
    """An objective around another one; what it does not change is the inner one's."""

    inner: Objective

    @property
    def passes(self) -> int:
        return self.inner.passes

    @property
    def branches(self) -> frozenset[str]:
        return self.inner.branches

    @property
    def has_adversary(self) -> bool:
        return self.inner.has_adversary

    def of(self, kind: str, round: int = 0) -> "Objective":
        return replace(self, inner=self.inner.of(kind, round))

    def within(self, capacity: float) -> "Objective":
        return replace(self, inner=self.inner.within(capacity))

    def corner(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        return self.inner.corner(shapes)

    def nets(self, shapes: Mapping[str, Sequence[int]]) -> list[dict[str, tuple[int, ...]]]:
        return self.inner.nets(shapes)

    def shared(self, trained: Tensors) -> Tensors:
        return self.inner.shared(trained)

    def private(self, trained: Tensors, shape: Shape) -> Tensors:
        return self.inner.private(trained, shape)

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        return self.inner.loss(net, private, batch, key)

    def penalty(self, trained: Tensors, received: Tensors) -> Tensor | float:
        return self.inner.penalty(trained, received)

    def correct(self, gradient: Tensors, private: Tensors, received: Tensors) -> tuple[Tensors, Tensors]:
        return self.inner.correct(gradient, private, received)

    def step_adversary(self, private: Tensors, gradient: Tensors) -> None:
        self.inner.step_adversary(private, gradient)

    def finish(self, outcome: Outcome) -> tuple[Tensors, Tensors]:
        return self.inner.finish(outcome)

    def diagnose(self, context: DiagnosisContext) -> dict[str, Any]:
        return self.inner.diagnose(context)


@part("objective")
@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Objective):
    """Standard training: the cross-entropy of the clean batch."""

    label_smoothing: float = 0.0

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        logits = net(batch.x, statistics="batch", key=key)
        return F.cross_entropy(logits, batch.y, label_smoothing=self.label_smoothing)


@part("objective")
@dataclass(frozen=True, kw_only=True)
class MaskedCrossEntropy(Objective):
    """Cross-entropy for clients that lack classes: logits of classes absent from the batch do not take part, so that
    what the client never sees is not pushed down."""

    as_published: bool = False
    """HeteroFL and Split-Mix set those logits to 0, which leaves them e⁰ in the sum, instead of leaving them out"""

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        logits = net(batch.x, statistics="batch", key=key)
        present = (batch.y[:, None] == torch.arange(logits.shape[-1], device=logits.device)).any(0)
        return F.cross_entropy(torch.where(present, logits, 0.0 if self.as_published else -1e9), batch.y)


def squared_distance(a: Tensors, b: Tensors) -> Tensor:
    """The squared L2 distance over the names of `a`."""
    return torch.stack([(a[name] - b[name]).square().sum() for name in a]).sum()


cross_entropy, masked_cross_entropy = CrossEntropy, MaskedCrossEntropy
__all__ = [
    "Batch",
    "DiagnosisContext",
    "Objective",
    "Outcome",
    "Shape",
    "Wrapper",
    "cross_entropy",
    "masked_cross_entropy",
    "squared_distance",
]
