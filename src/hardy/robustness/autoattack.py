"""AutoAttack, written from the papers: attacks without a step size to tune.

APGD, the DLR loss and the ensemble: Croce and Hein, Reliable evaluation of adversarial robustness with an ensemble of
diverse parameter-free attacks, ICML 2020. FAB: Croce and Hein, Minimally distorted adversarial examples with a fast
adaptive boundary attack, ICML 2020. Restarts, steps and targets of the ensemble are those of the authors' `standard`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hardy import random
from hardy.errors import HardyError
from hardy.registry import part
from hardy.robustness.attacks import Attack, Forward, square
from hardy.robustness.geometry import Ball, length, project, random_start, steepest

_MOMENTUM = 0.75
"""α of APGD: the share of the gradient step; the rest is the last move"""


def _where(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Chooses image by image; the mask is [N]."""
    return torch.where(mask.view(-1, *[1] * (a.dim() - 1)), a, b)


def _of(logits: Tensor, label: Tensor) -> Tensor:
    return logits.gather(1, label[:, None])[:, 0]


def _others(logits: Tensor, y: Tensor) -> Tensor:
    """The logits, with that of the true class out of the running."""
    return logits.masked_fill(F.one_hot(y, logits.shape[1]).bool(), -torch.inf)


def _likeliest_wrong(logits: Tensor, y: Tensor, count: int) -> tuple[Tensor, ...]:
    """The `count` most likely wrong classes (or all, if there are fewer), one [N] tensor each."""
    return _others(logits, y).topk(min(count, logits.shape[1] - 1)).indices.unbind(1)


def dlr(logits: Tensor, y: Tensor, target: Tensor | None = None) -> Tensor:
    """The difference of logits ratio of each image, which scaling the logits cannot hide; above 0 the image fell."""
    ordered = logits.sort(descending=True).values
    if target is None:
        other, scale = _others(logits, y).amax(1), ordered[:, 0] - ordered[:, 2]
    else:
        other, scale = _of(logits, target), ordered[:, 0] - (ordered[:, 2] + ordered[:, 3]) / 2
    return (other - _of(logits, y)) / (scale + 1e-12)


def checkpoints(steps: int) -> list[int]:
    """Numbers of steps w_j after which APGD looks back: 22 % of all, then ever closer (in whole per cents: exact)."""
    share, gap, found = 22, 22, []
    while share <= 100:
        found.append(-(-share * steps // 100))
        gap = max(gap - 3, 6)
        share += gap
    return found


class _Point(NamedTuple):
    """A point of the ascent, and what one pass tells about it."""

    x: Tensor
    gradient: Tensor
    loss: Tensor
    wrong: Tensor


def _choose(mask: Tensor, a: _Point, b: _Point) -> _Point:
    return _Point(*(_where(mask, one, other) for one, other in zip(a, b, strict=True)))


@part("attack")
@dataclass(frozen=True, kw_only=True)
class Apgd(Attack):
    """Auto-PGD: momentum, and a step that is halved, image by image, once the loss stops rising."""

    epsilon: float = 8 / 255
    ball: Ball = "linf"
    steps: int = 100
    restarts: int = 1
    loss: Literal["cross_entropy", "dlr"] = "cross_entropy"
    targeted: int = 0
    """wrong classes to aim at in turn, the likeliest first; 0: away from the true class"""
    rho: float = 0.75
    """share of steps that must raise the loss, or the step is halved"""

    def __post_init__(self) -> None:
        if self.targeted and self.loss != "dlr":
            raise HardyError(f"targeted={self.targeted} needs loss='dlr'; {self.loss!r} goes with targeted=0.")

    @torch.no_grad()
    def perturb(self, forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        """Per image a misclassified point if one was met, of greatest loss; otherwise the point of greatest loss."""
        logits = forward(x)
        self._check(logits.shape[1])
        targets = _likeliest_wrong(logits, y, self.targeted) if self.targeted else (None,)
        best: _Point | None = None
        for number, target in enumerate(targets):

            def losses(point: Tensor, target: Tensor | None = target) -> tuple[Tensor, tuple[Tensor, Tensor]]:
                logits = forward(point)
                by_ce = self.loss == "cross_entropy"
                each = F.cross_entropy(logits, y, reduction="none") if by_ce else dlr(logits, y, target)
                return each.sum(), (each, logits.argmax(1) != y)

            def look(point: Tensor, losses: Callable[..., Any] = losses) -> _Point:
                gradient, (loss, wrong) = torch.func.grad(losses, has_aux=True)(point)
                return _Point(point, gradient, loss, wrong)

            for restart in range(self.restarts):
                start = random_start(random.fold(key, number, restart), x, self.epsilon, self.ball)
                best = self._climb(look, x, start, best or look(x))
        return best.x
