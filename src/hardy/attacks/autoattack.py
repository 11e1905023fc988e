"""AutoAttack, written from the papers: attacks without a step size to tune.

APGD, the DLR loss and the ensemble: Croce and Hein, Reliable evaluation of adversarial robustness with an ensemble of
diverse parameter-free attacks, ICML 2020. FAB: Croce and Hein, Minimally distorted adversarial examples with a fast
adaptive boundary attack, ICML 2020. Restarts, steps and targets of the ensemble are those of the authors' `standard`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hardy.attacks.balls import Ball, length, project, random_start, steepest
from hardy.attacks.base import Attack, Ensemble, Forward, for_each, margin, pick
from hardy.attacks.square import square
from hardy.core import random
from hardy.errors import HardyError
from hardy.registry import part

_MOMENTUM = 0.75
"""α of APGD: the share of the gradient step; the rest is the last move"""


def _of(logits: Tensor, label: Tensor) -> Tensor:
    return logits.gather(1, label[:, None])[:, 0]


def _likeliest_wrong(logits: Tensor, y: Tensor, count: int) -> Tensor:
    """The `count` most likely wrong classes (all, if there are fewer), [T, N]."""
    wrong = logits.scatter(1, y[:, None], -torch.inf)
    return wrong.topk(min(count, logits.shape[1] - 1)).indices.T


def dlr(logits: Tensor, y: Tensor, target: Tensor | None = None) -> Tensor:
    """The difference of logits ratio of each image, which scaling the logits cannot hide; above 0 the net errs. It
    needs three classes, and four with a target (with three, it would be flat where the target is last): of fewer it is
    the plain difference of the logits."""
    first, _, *others = logits.sort(descending=True).values.unbind(1)
    if target is None:
        lead = margin(logits, y)
        return lead / (first - others[0] + 1e-12) if others else lead
    lead = _of(logits, target) - _of(logits, y)
    return lead / (first - (others[0] + others[1]) / 2 + 1e-12) if len(others) > 1 else lead


def checkpoints(steps: int) -> list[int]:
    """Numbers of steps w_j after which APGD looks back: 22 % of all, then ever closer (in whole per cents: exact)."""
    share, gap, found = 22, 22, []
    while share <= 100:
        found.append(-(-share * steps // 100))
        gap = max(gap - 3, 6)
        share += gap
    return found


class _Point(NamedTuple):
    """Where an ascent stands, and what one pass tells about it; each field has one entry an image."""

    x: Tensor
    gradient: Tensor
    loss: Tensor
    wrong: Tensor

    def where(self, mask: Tensor, other: "_Point") -> "_Point":
        """This point for the images of the mask, the other one for the rest."""
        return _Point(*(pick(mask, mine, its) for mine, its in zip(self, other, strict=True)))

    def beats(self, other: "_Point") -> Tensor:
        """A misclassified point beats one that is not; between equals the greater loss decides."""
        return (self.wrong & ~other.wrong) | ((self.wrong == other.wrong) & (self.loss > other.loss))


@part("attack")
@dataclass(frozen=True, kw_only=True)
class APGD(Attack):
    """Auto-PGD: momentum, and a step that is halved, image by image, when it no longer pays."""

    epsilon: float = 8 / 255
    ball: Ball = "linf"
    steps: int = 100
    restarts: int = 1
    """starts a target"""
    loss: Literal["cross_entropy", "dlr"] = "cross_entropy"
    targeted: int = 0
    """wrong classes to aim at, the likeliest first, all at once; 0: just away from the true one"""
    rho: float = 0.75
    """ρ, the share of steps that must raise the loss to keep their size"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.targeted < 0:
            raise HardyError(f"targeted is {self.targeted}; it must be 0 (no target) or more.")
        if self.targeted and self.loss != "dlr":
            raise HardyError(f"targeted is {self.targeted} with loss {self.loss!r}; set loss='dlr' or targeted=0.")

    @property
    def points(self) -> int:
        return max(1, self.targeted)

    @torch.no_grad()
    def perturb(self, forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        """Of all points visited, a misclassified one if there is any, and of those that with the greatest loss."""
        logits = forward(x)
        best = _Point(x, x, torch.full_like(logits[:, 0], -torch.inf), logits.argmax(1) != y)

        def climb(key: Tensor, target: Tensor | None = None) -> _Point:
            found = best
            for restart in range(self.restarts):
                start = random_start(random.fold(key, restart), x, self.epsilon, self.ball)
                found = self._climb(partial(self._look, forward, y, target), x, start, found)
            return found

        if not self.targeted:
            return climb(random.fold(key, 0)).x
        targets = _likeliest_wrong(logits, y, self.targeted)
        keys = random.fold(key, torch.arange(len(targets), device=x.device))
        for found in map(_Point, *for_each(climb, forward, x, keys, targets)):
            best = found.where(found.beats(best), best)
        return best.x

    def _look(self, forward: Forward, y: Tensor, target: Tensor | None, x: Tensor) -> _Point:
        def total(x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            logits = forward(x)
            plain = self.loss == "cross_entropy"
            loss = F.cross_entropy(logits, y, reduction="none") if plain else dlr(logits, y, target)
            return loss.sum(), (loss, logits.argmax(1) != y)

        gradient, (loss, wrong) = torch.func.grad(total, has_aux=True)(x)
        return _Point(x, gradient, loss, wrong)

    def _climb(self, look: Callable[[Tensor], _Point], x: Tensor, start: Tensor, best: _Point) -> _Point:
        """Algorithm 1 from one start; `best` is what earlier starts found.

        The paper looks back at w_j after the step that follows, and may then discard that step; here it is before.
        """
        inside = partial(project, x=x, epsilon=self.epsilon, ball=self.ball)
        top = at = look(start)
        best = at.where(at.beats(best), best)
        last = start
        size = torch.full_like(at.loss, 2 * self.epsilon)  # η
        rises, halved, looked_back, top_then = torch.zeros_like(size), torch.zeros_like(at.wrong), 0, top.loss
        marks = checkpoints(self.steps)
        for step in range(1, self.steps + 1):
            share = _MOMENTUM if step > 1 else 1.0
            stepped = inside(at.x + size.view(-1, *[1] * (x.dim() - 1)) * steepest(at.gradient, self.ball))
            new = look(inside(at.x + share * (stepped - at.x) + (1 - share) * (at.x - last)))
            rises = rises + (new.loss > at.loss)
            last, at = at.x, new
            top = at.where(at.loss > top.loss, top)
            best = at.where(at.beats(best), best)
            if step in marks:
                seldom = rises < self.rho * (step - looked_back)  # condition 1
                stuck = ~halved & (top.loss == top_then)  # condition 2
                halved = seldom | stuck
                size = torch.where(halved, size / 2, size)
                at = top.where(halved, at)
                rises, looked_back, top_then = torch.zeros_like(rises), step, top.loss
        return best


def to_plane(x: Tensor, normal: Tensor, offset: Tensor, ball: Ball) -> Tensor:
    """The shortest change that brings each row of x [N, D] onto the plane <normal, z - x> + offset = 0 and keeps it in
    the box; where the plane does not meet the box, the change that comes nearest.

    Every entry goes straight for the plane, at speed 1 (linf) or |normal| (l2), until it meets its wall. What has been
    gained by then is piecewise linear in time and bends where an entry stops, so sorting the stops solves it exactly.
    """
    scale = normal.abs().amax(1, keepdim=True).clamp_min(1e-12)
    normal, offset = normal / scale, offset[:, None] / scale
    towards = -normal.sign() * offset.sign()
    room = torch.where(towards > 0, 1 - x, x)
    worth = normal.abs()
    speed = torch.ones_like(worth) if ball == "linf" else worth
    stops, order = torch.where(speed > 0, room / speed.clamp_min(1e-12), 0.0).sort(1)
    none = torch.zeros_like(offset)
    stopped = torch.cat([none, (worth * room).gather(1, order).cumsum(1)], 1)
    rates = (worth * speed).gather(1, order)
    moving = torch.cat([rates.flip(1).cumsum(1).flip(1), none], 1)
    gained = stopped[:, 1:] + stops * moving[:, 1:]
    phase = (gained < offset.abs()).sum(1, keepdim=True)
    time = (offset.abs() - stopped.gather(1, phase)) / moving.gather(1, phase).clamp_min(1e-12)
    return towards * torch.minimum(time * speed, room)


@part("attack")
@dataclass(frozen=True, kw_only=True)
class FAB(Attack):
    """Targeted Fast Adaptive Boundary: looks for the nearest misclassified point, which counts if it is in the ball."""

    needs_box = True

    epsilon: float = 8 / 255
    ball: Ball = "linf"
    steps: int = 100
    targets: int = 9
    """wrong classes to aim at, the likeliest first, all at once"""
    alpha_max: float = 0.1
    """α_max, the most weight on the step from the original image"""
    eta: float = 1.05
    """η, how far to step, in distances to the boundary"""
    beta: float = 0.9
    """β, how much of the way from the image is kept once a point is misclassified"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.targets < 1:
            raise HardyError(f"targets is {self.targets}; it must be 1 or more.")

    @property
    def points(self) -> int:
        return self.targets

    @torch.no_grad()
    def perturb(self, forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        """The nearest misclassified point found, or x where none is in the ball. It starts at x and draws nothing."""
        logits = forward(x)
        held = x, torch.where(logits.argmax(1) != y, 0.0, torch.inf).to(x.dtype)

        def nearest(target: Tensor) -> tuple[Tensor, Tensor]:
            (found, distance), at = held, x
            for _ in range(self.steps):
                at = self._step(forward, x, y, target, at)
                wrong, away = forward(at).argmax(1) != y, length(at - x, self.ball).flatten()
                nearer = wrong & (away < distance)
                found, distance = pick(nearer, at, found), torch.where(nearer, away, distance)
                at = pick(wrong, (1 - self.beta) * x + self.beta * at, at)
            return found, distance

        found, distances = for_each(nearest, forward, x, _likeliest_wrong(logits, y, self.targets))
        distance, first = distances.min(0)
        return pick(distance <= self.epsilon, found[first, torch.arange(len(x), device=x.device)], x)

    def _step(self, forward: Forward, x: Tensor, y: Tensor, target: Tensor, at: Tensor) -> Tensor:
        """Past the boundary as linearised at `at`: from there, and a little from x, so as to stay near it."""

        def total(at: Tensor) -> tuple[Tensor, Tensor]:
            logits = forward(at)
            margin = _of(logits, y) - _of(logits, target)
            return margin.sum(), margin

        normal, margin = torch.func.grad(total, has_aux=True)(at)
        normal = normal.flatten(1)

        def change(z: Tensor) -> Tensor:
            offset = margin + (normal * (z - at).flatten(1)).sum(1)
            return to_plane(z.flatten(1), normal, offset, self.ball).view_as(z)

        here, there = change(at), change(x)
        near, far = length(here, self.ball), length(there, self.ball)
        weight = (near / (near + far).clamp_min(1e-12)).clamp_max(self.alpha_max)
        return ((1 - weight) * (at + self.eta * here) + weight * (x + self.eta * there)).clamp(0.0, 1.0)


@part("attack")
@dataclass(frozen=True, kw_only=True)
class AutoAttack(Ensemble):
    """The standard ensemble: APGD on cross-entropy, APGD at targets, FAB at targets, Square."""

    epsilon: float = 8 / 255
    ball: Ball = "linf"
    steps: int = 100
    """of each gradient attack, a target"""
    targets: int = 9
    queries: int = 5000
    """queries of the Square attack"""

    @property
    def points(self) -> int:
        return self.targets

    def stages(self) -> list[tuple[str, Attack]]:
        """The attacks in order. A point that fell to one needs none of those after it."""
        plain = APGD(epsilon=self.epsilon, ball=self.ball, steps=self.steps)
        return [
            ("apgd_ce", plain),
            ("apgd_t", replace(plain, loss="dlr", targeted=self.targets)),
            ("fab_t", FAB(epsilon=self.epsilon, ball=self.ball, steps=self.steps, targets=self.targets)),
            ("square", square(epsilon=self.epsilon, ball=self.ball, queries=self.queries)),
        ]


apgd = APGD
fab = FAB
auto_attack = AutoAttack
__all__ = ["apgd", "auto_attack", "checkpoints", "dlr", "fab", "to_plane"]
