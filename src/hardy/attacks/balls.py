"""Balls around inputs: projection, random start, steepest ascent.

Images are [N, C, H, W] in [0, 1]; feature vectors are [N, F], in a box only where their range is known.
"""

from typing import Literal

import torch
from torch import Tensor

from hardy.core import random
from hardy.core.box import clip_to_box

Ball = Literal["linf", "l2"]


def length(delta: Tensor, ball: Ball) -> Tensor:
    """The norm of each image's change, [N, 1, 1, 1]."""
    flat = delta.flatten(1)
    norm = flat.abs().amax(1) if ball == "linf" else flat.square().sum(1).sqrt()
    return norm.view(-1, *[1] * (delta.dim() - 1))


def project(adversarial: Tensor, x: Tensor, epsilon: float, ball: Ball) -> Tensor:
    """The nearest point in the ball around x, then in the box. As x is in the box, clipping stays in the ball."""
    delta = adversarial - x
    if ball == "linf":
        delta = delta.clamp(-epsilon, epsilon)
    else:
        delta = delta * torch.clamp(epsilon / length(delta, ball).clamp_min(1e-12), max=1.0)
    return clip_to_box(x + delta)


def random_start(key: Tensor, x: Tensor, epsilon: float, ball: Ball) -> Tensor:
    """A point drawn uniformly from the ball, clipped to the box."""
    if ball == "linf":
        delta = (2 * random.uniform(key, x.shape, x.dtype) - 1) * epsilon
    else:
        delta = random.normal(random.fold(key, 1), x.shape, x.dtype)
        radius = random.uniform(random.fold(key, 2), (x.shape[0], *[1] * (x.dim() - 1)), x.dtype)
        delta = delta / length(delta, ball).clamp_min(1e-12) * radius ** (1 / x[0].numel()) * epsilon
    return project(x + delta, x, epsilon, ball)


def steepest(gradient: Tensor, ball: Ball) -> Tensor:
    """The unit step that gains most: the sign, or the normalised gradient."""
    return gradient.sign() if ball == "linf" else gradient / length(gradient, ball).clamp_min(1e-12)
