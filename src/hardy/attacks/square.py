"""Black-box attacks, which see the logits and no gradient: random search with squares, greedy search over pixels."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hardy.attacks.balls import Ball, length, project
from hardy.attacks.base import Attack, Forward, margin
from hardy.core import random
from hardy.registry import part


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

    images_only, needs_gradient = True, False
    epsilon: float = 1.0
    steps: int = 7
    candidates: int = 128
    """pixels tried in a step"""
    pixels: int = 5
    """pixels changed in a step"""
    neighbourhood: int = 5
    """how many rows and columns away the next candidates may be"""

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

    images_only, needs_gradient = True, False
    epsilon: float = 8 / 255
    ball: Ball = "linf"
    queries: int = 5000
    """images shown to the network, at most"""
    share: float = 0.8
    """p, the share of the image that the first squares cover"""

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


local_search, square = LocalSearch, Square
__all__ = ["local_search", "square"]
