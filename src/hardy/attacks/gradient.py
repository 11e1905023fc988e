"""Evasion attacks: how images are changed, within a budget, so that a net errs.

Images are [N, C, H, W] in [0, 1] and budgets are in these units. Every attack is pure: noise is a function of the key,
loops have a fixed length, choices are made by torch.where, so it runs under vmap over clients. It differentiates the
sum of the losses, so an image's result does not depend on the other images; only `affine` finds one change for all.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F

from hardy.attacks.balls import Ball, length, project, random_start, steepest
from hardy.core import random
from hardy.errors import HardyError, unknown
from hardy.registry import kind, part

Forward = Callable[[Tensor], Tensor]
"""images [N, C, H, W] -> logits [N, K], also under vmap: attacks aim at several classes at once"""
Start = Literal["uniform", "normal", "none"]
"""where an ascent begins: uniform in the ball, at 0.001 N(0, 1) (TRADES, MART), or at the image"""
Loss = Literal["cross_entropy", "margin", "kl"]

_LEAST = {"epsilon": 0, "steps": 0, "rotation_radius": 0, "shift_radius": 0, "centre": 0, "decay": 0}
_LEAST |= {"restarts": 1, "queries": 1, "candidates": 1, "pixels": 1, "neighbourhood": 0}
_POSITIVE = {"step", "confidence", "share"}


@kind("attack")
@dataclass(frozen=True, kw_only=True)
class Attack:
    """The part that changes images so that a net errs."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise unknown(f"{name} of an attack", value, get_args(hint))
            if name in _LEAST and not (_LEAST[name] <= value and math.isfinite(value)):
                raise HardyError(f"{name} of an attack is {value}; it must be {_LEAST[name]} or more, and finite.")
            if name in _POSITIVE and not (value > 0 and math.isfinite(value)):
                raise HardyError(f"{name} of an attack is {value}; it must be above 0, and finite.")

    @property
    def passes(self) -> int:
        """Forward-and-backward passes over the images it makes, for the count of MACs."""
        return 1

    @property
    def points(self) -> int:
        """How many it climbs from at once, an image."""
        return 1

    common = False
    """whether it is found for the images of all clients together"""

    @property
    def joint(self) -> bool:
        """Whether one change is found for all images together, so that none may be left out or added."""
        return False

    def stages(self) -> "list[tuple[str, Attack]]":
        """The attacks it is made of, in order. A point that fell to one needs none of those after it."""
        return [("", self)]

    def perturb(self, forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        """The changed images. They are constants to whoever differentiates around the attack."""
        raise NotImplementedError


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """By how much the best wrong class leads, [N]: positive where the net errs."""
    own = torch.arange(logits.shape[-1], device=y.device) == y[:, None]
    return logits.masked_fill(own, -torch.inf).amax(-1) - (logits * own).sum(-1)


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
class _Ascent(Attack):
    """Projected steps along the gradient of a gain. `keep_best` returns the best point met instead of the last."""

    epsilon: float = 8 / 255
    step: float = 2 / 255
    steps: int = 7
    ball: Ball = "linf"
    start: Start = "uniform"
    restarts: int = 1
    keep_best: bool = False

    @property
    def passes(self) -> int:
        return self.steps * self.restarts

    def gain(self, forward: Forward, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        """What is climbed: logits -> [N]."""
        raise NotImplementedError

    def turn(self, gradient: Tensor, before: Tensor) -> Tensor:
        """The direction of a step, out of the gradient and the direction before."""
        return gradient

    @torch.no_grad()
    def perturb(self, forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        gain = self.gain(forward, x, y)

        def measure(z: Tensor) -> tuple[Tensor, _Found]:
            logits = forward(z)
            gains = gain(logits)
            return gains.sum(), _Found(z, gains, logits.argmax(-1) != y)

        best = None
        for restart in range(self.restarts):
            z = _begin(self.start, random.fold(key, restart), x, self.epsilon, self.ball)
            direction = torch.zeros_like(x)
            for _ in range(self.steps):
                gradient, met = grad(measure, has_aux=True)(z)
                if self.keep_best:
                    best = _better(best, met)
                direction = self.turn(gradient, direction)
                z = project(z + self.step * steepest(direction, self.ball), x, self.epsilon, self.ball)
            if self.restarts > 1 or self.keep_best:
                best = _better(best, measure(z)[1])
        return z if best is None else best.x


@part("attack")
@dataclass(frozen=True, kw_only=True)
class PGD(_Ascent):
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

    def turn(self, gradient: Tensor, before: Tensor) -> Tensor:
        size = gradient.flatten(1).abs().sum(1).clamp_min(1e-12)
        return self.decay * before + gradient / size.view(-1, *[1] * (gradient.dim() - 1))


@part("attack")
@dataclass(frozen=True, kw_only=True)
class CW(_Ascent):
    """CW-infinity: PGD on the margin, which stops to count beyond `confidence` (as SFAT evaluates, PGD-30)."""

    steps: int = 30
    confidence: float = 50.0

    def gain(self, forward: Forward, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda logits: margin(logits, y).clamp_max(self.confidence)


@part("attack")
@dataclass(frozen=True, kw_only=True)
class LocalSearch(Attack):
    """Greedy black-box search over single pixels (LSA, after Narodytska & Kasiviswanathan 2017).

    Each round tries `candidates` pixels one by one, changes for good the `pixels` that raise the loss most, and draws
    the next candidates around them (`neighbourhood` rows and columns away at most; others only if there are too few).
    An image that fools the net is left alone. The paper sets a pixel to an extreme, without a bound; here it moves by
    epsilon across mid-grey (dark pixels up, bright ones down) and stays in the box, so that epsilon = 1 is the
    paper's unbounded attack and a smaller one an L-infinity ball. It makes steps * (candidates + 1) queries.
    """

    epsilon: float = 1.0
    steps: int = 7
    candidates: int = 128
    pixels: int = 5
    neighbourhood: int = 5

    @torch.no_grad()
    def perturb(self, forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        count, _, height, width = x.shape
        tried = min(self.candidates, height * width)
        target = torch.where(x < 0.5, x + self.epsilon, x - self.epsilon).clamp(0.0, 1.0)
        changed = torch.zeros(count, height * width, dtype=torch.bool, device=x.device)
        near = torch.ones_like(changed)

        def paint(pixels: Tensor) -> Tensor:
            return torch.where(pixels.view(count, 1, height, width), target, x)

        for step in range(self.steps):
            fooled = forward(paint(changed)).argmax(-1) != y
            luck = random.uniform(random.fold(key, step), changed.shape, x.dtype)
            candidates = (luck + near.to(x.dtype) - 2 * changed.to(x.dtype)).topk(tried, -1).indices
            gains = [
                F.cross_entropy(forward(paint(changed.scatter(1, one, True))), y, reduction="none")
                for one in candidates.chunk(tried, -1)
            ]
            chosen = candidates.gather(1, torch.stack(gains, -1).topk(min(self.pixels, tried), -1).indices)
            fresh = torch.zeros_like(changed).scatter(1, chosen, True)
            changed = changed | (fresh & ~fooled[:, None])
            spread = fresh.view(count, 1, height, width).to(x.dtype)
            near = F.max_pool2d(spread, 2 * self.neighbourhood + 1, 1, self.neighbourhood).flatten(1) > 0
        return paint(changed)


@part("attack")
@dataclass(frozen=True, kw_only=True)
class Square(Attack):
    """Square attack: black-box random search with shrinking squares (Andriushchenko et al. 2020), on the margin.

    Squares cover at first a `share` (the paper's p) of the image, halved at the paper's points of 10,000 queries,
    rescaled to `queries`. Each image has squares of its own.
    """

    epsilon: float = 8 / 255
    ball: Ball = "linf"
    queries: int = 5000
    share: float = 0.8

    @torch.no_grad()
    def perturb(self, forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        begin, propose = (_stripes, _repaint) if self.ball == "linf" else (_tiles, _move_mass)
        best = begin(random.fold(key, 0), x, self.epsilon)
        gain = margin(forward(best), y)
        for query in range(1, self.queries):
            z = propose(random.fold(key, query), x, best, self.epsilon, self._share(query))
            gained = margin(forward(z), y)
            best = torch.where((gained > gain).view(-1, 1, 1, 1), z, best)
            gain = gain.maximum(gained)
        return best

    def _share(self, query: int) -> float:
        done = query / self.queries * 10_000
        return self.share * 0.5 ** sum(done > point for point in (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000))


def _signs(key: Tensor, shape: tuple[int, ...], x: Tensor) -> Tensor:
    return torch.where(random.uniform(key, shape, x.dtype) < 0.5, -1.0, 1.0).to(x.dtype)


def _side(share: float, x: Tensor, least: int) -> int:
    height, width = x.shape[-2:]
    return min(max(round(math.sqrt(share * height * width)), least), height, width)


class _Window(NamedTuple):
    """A square in each image: the offsets of its pixels from the corner, and which pixels lie inside."""

    rows: Tensor
    columns: Tensor
    inside: Tensor


def _window(key: Tensor, x: Tensor, side: int) -> _Window:
    count, _, *sizes = x.shape
    offsets = []
    for word, size in enumerate(sizes):
        corner = (random.uniform(random.fold(key, word), (count, 1)) * (size - side + 1)).long()
        offsets.append(torch.arange(size, device=x.device) - corner)
    rows, columns = offsets[0][:, :, None], offsets[1][:, None, :]
    inside = (rows >= 0) & (rows < side) & (columns >= 0) & (columns < side)
    return _Window(rows.clamp(0, side - 1), columns.clamp(0, side - 1), inside[:, None])


def _stripes(key: Tensor, x: Tensor, epsilon: float) -> Tensor:
    """L-infinity: vertical stripes of ±epsilon in each channel."""
    count, channels, _, width = x.shape
    return (x + epsilon * _signs(key, (count, channels, 1, width), x)).clamp(0.0, 1.0)


def _repaint(key: Tensor, x: Tensor, best: Tensor, epsilon: float, share: float) -> Tensor:
    """L-infinity: one square of ±epsilon in each channel."""
    window = _window(random.fold(key, 1), x, _side(share, x, 1))
    painted = (x + epsilon * _signs(random.fold(key, 2), (*x.shape[:2], 1, 1), x)).clamp(0.0, 1.0)
    return torch.where(window.inside, painted, best)


def _tiles(key: Tensor, x: Tensor, epsilon: float) -> Tensor:
    """L2: a grid of five by five bumps."""
    count, channels, height, width = x.shape
    side = max(min(height, width) // 5, 1)
    rows, columns = height // side, width // side
    signs = _signs(key, (count, channels, rows, columns), x)
    delta = signs.repeat_interleave(side, 2).repeat_interleave(side, 3) * _bumps(side, x)[0].repeat(rows, columns)
    over, across = height - rows * side, width - columns * side
    delta = F.pad(delta, (across // 2, across - across // 2, over // 2, over - over // 2))
    return project(x + delta / length(delta, "l2").clamp_min(1e-12) * epsilon, x, epsilon, "l2")


def _move_mass(key: Tensor, x: Tensor, best: Tensor, epsilon: float, share: float) -> Tensor:
    """L2: empties a second square and gives its norm, and what is not yet spent, to a bump in the first."""
    count, channels = x.shape[:2]
    side = _side(share, x, 3)
    window, second = (_window(random.fold(key, word), x, side) for word in (1, 2))
    turned = (random.uniform(random.fold(key, 3), (count, 1, 1)) < 0.5).long()
    bump = _bumps(side, x)[turned, window.rows, window.columns][:, None] * window.inside
    delta = best - x
    there = delta * window.inside
    fresh = bump * _signs(random.fold(key, 4), (count, channels, 1, 1), x) + there / _size(there).clamp_min(1e-12)
    either = window.inside | second.inside
    unspent = (epsilon**2 - length(delta, "l2").square()).clamp_min(0.0) / channels
    fresh = fresh / _size(fresh).clamp_min(1e-12) * (unspent + _size(delta * either).square()).sqrt()
    delta = delta * ~either + fresh
    return project(x + delta / length(delta, "l2").clamp_min(1e-12) * epsilon, x, epsilon, "l2")


def _size(delta: Tensor) -> Tensor:
    """The L2 norm of each channel."""
    return delta.square().sum((2, 3), keepdim=True).sqrt()


def _bumps(side: int, x: Tensor) -> Tensor:
    """The paper's η of unit norm and its transpose: two halves of opposite sign, each falling off from its middle."""

    def half(rows: int) -> np.ndarray:
        ring = np.maximum(abs(np.arange(rows) - rows // 2)[:, None], abs(np.arange(side) - side // 2))
        falling = np.cumsum(1.0 / np.arange(max(rows, side) // 2 + 1, 0, -1) ** 2)[::-1]
        heights: np.ndarray = falling[ring]
        return heights / max(float(np.linalg.norm(heights)), 1e-12)

    bump = np.concatenate([half(side // 2), -half(side - side // 2)])
    bump /= np.linalg.norm(bump)
    return torch.as_tensor(np.stack([bump, bump.T]), dtype=x.dtype, device=x.device)


cw, fgsm, local_search, mim, pgd, square = CW, FGSM, LocalSearch, MIM, PGD, Square
__all__ = [
    "Attack",
    "Ball",
    "Forward",
    "Loss",
    "Start",
    "cw",
    "fgsm",
    "local_search",
    "margin",
    "mim",
    "pgd",
    "square",
]
