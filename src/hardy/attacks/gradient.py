"""Attacks that climb the gradient of a loss: FGSM, PGD, MIM and CW."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F

from hardy.attacks.balls import Ball, project, random_start, steepest
from hardy.attacks.base import Attack, Forward, margin
from hardy.core import random
from hardy.errors import HardyError
from hardy.registry import part

Start = Literal["uniform", "normal", "none"]
"""where an ascent begins: uniform in the ball, at 0.001 N(0, 1) (TRADES, MART), or at the image"""
Loss = Literal["cross_entropy", "margin", "kl"]


class _Found(NamedTuple):
    x: Tensor
    gain: Tensor
    fooled: Tensor


def _better(held: _Found | None, new: _Found) -> _Found:
    """Image by image: the first that fools the net, else the one with the highest gain."""
    if held is None:
        return new
    taken = ~held.fooled & (new.fooled | (new.gain > held.gain))
    return _Found(
        torch.where(taken.view(-1, *[1] * (new.x.dim() - 1)), new.x, held.x),
        torch.where(taken, new.gain, held.gain),
        held.fooled | new.fooled,
    )


def _begin(start: Start, key: Tensor, x: Tensor, epsilon: float, ball: Ball) -> Tensor:
    if start == "uniform":
        return random_start(key, x, epsilon, ball)
    return project(x + 0.001 * random.normal(key, x.shape, x.dtype), x, epsilon, ball) if start == "normal" else x


@part("attack")
@dataclass(frozen=True, kw_only=True)
class FGSM(Attack):
    """One step to the edge of the ball (Goodfellow et al. 2015)."""

    epsilon: float = 8 / 255
    ball: Ball = "linf"
    start: Start = "none"

    @torch.no_grad()
    def perturb(self, forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        begin = _begin(self.start, random.fold(key, 0), x, self.epsilon, self.ball)
        gradient = grad(lambda z: F.cross_entropy(forward(z), y, reduction="sum"))(begin)
        return project(begin + self.epsilon * steepest(gradient, self.ball), x, self.epsilon, self.ball)


@dataclass(frozen=True, kw_only=True)
class Ascent(Attack):
    """Projected steps along the gradient of a gain. `keep_best` returns the best point met instead of the last."""

    epsilon: float = 8 / 255
    step: float = 2 / 255
    steps: int = 7
    ball: Ball = "linf"
    start: Start = "uniform"
    restarts: int = 1
    keep_best: bool = False

    def gain(self, forward: Forward, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        """What is climbed: logits -> [N]."""
        raise NotImplementedError

    def turn(self, gradient: Tensor, before: Tensor) -> Tensor:
        """The direction of a step, out of the gradient and the direction before."""
        return gradient

    def perturb(self, forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        return self.climb(forward, x, y, key)[0]

    @torch.no_grad()
    def climb(self, forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The changed images; and of each in how many steps, of one restart, it was still classified rightly before the
        step: from 0, where the start fools the network, to `steps`."""
        gain, held = self.gain(forward, x, y), x.new_full((len(x),), float(self.steps))

        def measure(z: Tensor) -> tuple[Tensor, _Found]:
            logits = forward(z)
            gains = gain(logits)
            return gains.sum(), _Found(z, gains, logits.argmax(-1) != y)

        best = None
        for restart in range(self.restarts):
            z = _begin(self.start, random.fold(key, restart), x, self.epsilon, self.ball)
            direction, withstood = torch.zeros_like(x), x.new_zeros(len(x))
            for _ in range(self.steps):
                gradient, met = grad(measure, has_aux=True)(z)
                if self.keep_best:
                    best = _better(best, met)
                withstood = withstood + ~met.fooled
                direction = self.turn(gradient, direction)
                z = project(z + self.step * steepest(direction, self.ball), x, self.epsilon, self.ball)
            held = torch.minimum(held, withstood)
            if self.restarts > 1 or self.keep_best:
                best = _better(best, measure(z)[1])
        return z if best is None else best.x, held


@part("attack")
@dataclass(frozen=True, kw_only=True)
class PGD(Ascent):
    """Projected gradient ascent (Madry et al. 2018); loss="kl" climbs the divergence from the clean prediction."""

    loss: Loss = "cross_entropy"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss == "kl" and self.start == "none":
            raise HardyError("loss='kl' has no gradient at start='none'; use start='normal' or 'uniform'.")

    def gain(self, forward: Forward, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        if self.loss == "kl":
            clean = F.log_softmax(forward(x), -1)
            return lambda z: F.kl_div(F.log_softmax(z, -1), clean, reduction="none", log_target=True).sum(-1)
        if self.loss == "margin":
            return lambda logits: margin(logits, y)
        return lambda logits: F.cross_entropy(logits, y, reduction="none")


@part("attack")
@dataclass(frozen=True, kw_only=True)
class MIM(PGD):
    """Ascent with momentum over gradients of unit L1 norm (MI-FGSM, Dong et al. 2018; FedRBN calls it MIA)."""

    steps: int = 20
    start: Start = "none"
    decay: float = 1.0
    """how much of the gradients before is kept"""

    def turn(self, gradient: Tensor, before: Tensor) -> Tensor:
        size = gradient.flatten(1).abs().sum(1).clamp_min(1e-12)
        return self.decay * before + gradient / size.view(-1, *[1] * (gradient.dim() - 1))


@part("attack")
@dataclass(frozen=True, kw_only=True)
class CW(Ascent):
    """CW-infinity: PGD on the margin, which stops to count beyond `confidence` (as SFAT evaluates, PGD-30)."""

    steps: int = 30
    confidence: float = 50.0
    """margin beyond which an image counts no more"""

    def gain(self, forward: Forward, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda logits: margin(logits, y).clamp_max(self.confidence)


cw, fgsm, mim, pgd = CW, FGSM, MIM, PGD
__all__ = ["cw", "fgsm", "mim", "pgd"]
