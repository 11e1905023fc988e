"""Objectives of standard training, and two that go around any other. Adversarial ones are in `adversarial`."""

from dataclasses import dataclass, replace
from math import floor
from typing import Any

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F

from hardy.core import random
from hardy.core.method import Method
from hardy.core.net import Net
from hardy.core.protocols import Batch, Budget, Objective, Setting, StepResult, Wrapper, name_part, walk
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.registry import part


@part("objective")
@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Objective):
    """Standard training: the cross-entropy of the clean batch."""

    label_smoothing: float = 0.0
    """share of the label spread over all classes"""

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

    @property
    def mixes_examples(self) -> bool:
        return True

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        logits = net(batch.x, statistics="batch", key=key)
        present = (batch.y[:, None] == torch.arange(logits.shape[-1], device=logits.device)).any(0)
        return F.cross_entropy(torch.where(present, logits, 0.0 if self.as_published else -1e9), batch.y)


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Ramped(Wrapper):
    """The inner objective with one of its numbers moving over the rounds: `start` up to round `first`, from there along
    a line to the inner objective's own value, which it has from round `last` on.

    first = last - 1 switches at once. Rounds are counted from 1. With start = 0, an own value of 0.8, first = 1,
    last = 5 and levels = 2 it is 0, 0, 0.4, 0.4, 0.8, 0.8, ...
    """

    inner: Objective
    number: str
    """which one, such as "weight" of pnc or "attack.epsilon" of adversarial"""
    start: float = 0.0
    """its value until the line begins"""
    first: int = 1
    """round in which the line begins"""
    last: int
    """first round with the inner objective's own value"""
    levels: int = 8
    """steps of the line; each is an objective of its own, which a GPU captures anew"""

    def __post_init__(self) -> None:
        if not 1 <= self.first < self.last or self.levels < 1:
            raise HardyError(
                f"ramped goes from round first = {self.first} to round last = {self.last} in levels = {self.levels}; "
                "it takes 1 <= first < last and 1 level or more."
            )
        if self.end == self.start:
            raise HardyError(
                f"ramped has no effect: {self.number} of its inner objective is {self.end:g}, and so is start. Change "
                "one of them."
            )
        _with_number(self.inner, self.number, self.start)  # refuses what the inner objective refuses

    @property
    def end(self) -> float:
        """The inner objective's own value."""
        return _number(self.inner, self.number)

    def value(self, round_number: int) -> float:
        """What the number is in a round, counted from 0."""
        share = (round_number + 1 - self.first) / (self.last - self.first)
        level = floor(self.levels * min(max(share, 0.0), 1.0)) / self.levels
        return self.end if level == 1 else self.start + level * (self.end - self.start)

    def moves(self, part: object) -> bool:
        """Whether it is a number of this part that moves."""
        owner: Any = self.inner
        for name in self.number.split(".")[:-1]:
            owner = getattr(owner, name)
        return owner is part

    def for_client(self, kind: str, round_number: int) -> Objective:
        inner: Objective = _with_number(self.inner, self.number, self.value(round_number))
        return inner.for_client(kind, round_number)

    def alone(self) -> Objective:
        return self.inner.alone()


def _number(part: object, path: str) -> float:
    found: Any = part
    for name in path.split("."):
        found = getattr(found, name, None)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise HardyError(
            f"ramped number is {path!r}, but {type(part).__name__!r} has no such number. Name one of its options, such "
            'as "weight" of pnc, "mix" or "attack.epsilon" of adversarial.'
        )
    return found


def _with_number(part: Any, path: str, value: float) -> Any:
    name, _, rest = path.partition(".")
    return replace(part, **{name: _with_number(getattr(part, name), rest, value) if rest else value})


@dataclass(frozen=True, kw_only=True)
class Compared(Wrapper):
    """The inner objective, and strength times a term that compares the client's network with others on its images. The
    term is minimised; the loss reported is without it."""

    inner: Objective = CrossEntropy()
    strength: float = 1.0
    """weight of the term"""
    branch: str = "clean"
    """whose running statistics the networks answer with"""

    def apart(self, own: Net, sent: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        """How far the client's network is from where it should be; `sent` is the one it received."""
        raise NotImplementedError

    @property
    def branches(self) -> frozenset[str]:
        return self.inner.branches | {self.branch}

    @property
    def adds_rows(self) -> bool:
        return True

    def check(self, method: Method, setting: Setting) -> None:
        if type(method.budget).submodels is not Budget.submodels:
            raise HardyError(
                f"{name_part(self)} compares whole networks, but with budget {name_part(method.budget)!r} a client "
                "holds a part of one. Usual fix: budget full, or leave it out."
            )

    def gradient(
        self, outer: Objective, net: Net, private: Tensors, batch: Batch, key: Tensor, received: Tensors
    ) -> StepResult:
        found = self.inner.gradient(outer, net, private, batch, key, received)
        if not self.strength:
            return found
        sent = net.knowing(received).sent()

        def term(trained: Tensors) -> Tensor:
            return self.strength * self.apart(net.at(trained), sent, private, batch, key)

        pulled = grad(term)(net.trained)
        return found._replace(gradient={name: g + pulled[name] for name, g in found.gradient.items()})


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Distilled(Compared):
    """Adds strength · T² KL(received ‖ own) on the client's images: its network answers as the one that it was sent, in
    a branch with running statistics. The loss reported is without it.

    In the branch `adversarial` of FedRBN that is what the AT clients' statistics make of the weights, so that a client
    which cannot attack (ST) does not train it away. Norm layers that a client keeps are its own in both.
    """

    strength: float = 1.0
    """weight of the divergence"""
    temperature: float = 1.0
    """T, by which both logits are divided"""

    def __post_init__(self) -> None:
        if not self.strength > 0 or not self.temperature > 0:
            raise HardyError(
                f"distilled takes a strength and a temperature above 0; it got {self.strength} and {self.temperature}."
            )

    def apart(self, own: Net, sent: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        taught = F.log_softmax(sent(batch.x, branch=self.branch) / self.temperature, -1)
        learnt = own(batch.x, branch=self.branch, key=random.fold(key, "distillation"))
        answer = F.log_softmax(learnt / self.temperature, -1)
        return self.temperature**2 * F.kl_div(answer, taught, reduction="batchmean", log_target=True)


@dataclass(frozen=True, kw_only=True)
class Calibrated(Wrapper):
    """The inner objective on logits that are moved, class by class, by what the client holds of each class. Attacks
    inside climb the moved ones too; predictions are made with the plain ones."""

    inner: Objective = CrossEntropy()

    def offset(self, counts: Tensor) -> Tensor:
        """What is added to the logits, [K], for so many rows of each class."""
        raise NotImplementedError

    @property
    def mixes_examples(self) -> bool:
        return True

    def check(self, method: Method, setting: Setting) -> None:
        if method.pooled:
            raise HardyError(
                f"{name_part(self)} makes clients of unlike labels agree, but method {method.name!r} pools all rows. "
                "Leave one of them out."
            )
        for inner in walk(self.inner):
            if isinstance(inner, Calibrated):
                raise HardyError(
                    f"{name_part(self)} around {name_part(inner)} calibrates twice. Leave one of them out."
                )

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        moved = net.plus(self.offset(batch.label_counts))
        loss = self.inner.loss(moved, private, batch, key)
        net.buffers = moved.buffers
        return loss


cross_entropy, distilled, masked_cross_entropy, ramped = CrossEntropy, Distilled, MaskedCrossEntropy, Ramped
__all__ = ["cross_entropy", "distilled", "masked_cross_entropy", "ramped"]
