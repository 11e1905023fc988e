"""The worst affine shift of a device: unlike the other attacks, one change for all images together."""

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F

from hardy.attacks.base import Attack, Ensemble, Forward
from hardy.errors import HardyError
from hardy.registry import part

_MAX_FULL = 1 << 14
"""pixels of the largest image a full Λ is made for: 1 GiB in float32"""
_PUBLISHED_STEP = 0.05
_RANGES = {0.0: 1.0, 0.5: 2.0}
"""centre -> length of the range of pixels that the authors have: [0, 1], or [-1, 1]"""


@dataclass(frozen=True, kw_only=True)
class _AffineShifts(Attack):
    """Which shifts x·Λ + δ there are to choose from."""

    images_only = True
    rotation_radius: float = 0.4
    """bound on ‖Λ − I‖_F"""
    shift_radius: float = 1.0
    """bound on ‖δ‖₂"""
    steps: int = 100
    form: Literal["full", "channel", "diagonal"] = "full"
    """Λ: a d x d matrix, a C x C mix of channels, or a diagonal"""
    centre: float = 0.0
    """the grey that Λ leaves where it is; 0.5 for images thought of as in [-1, 1]"""
    clip: bool = False
    """keep the shifted images in [0, 1]"""
    common: bool = False
    """in an evaluation: one shift for the images of all clients together, who must have the same network; it can fit
    itself to them less than one of each client's to that client's few"""

    @property
    def joint(self) -> bool:
        return True


@part("attack")
@dataclass(frozen=True, kw_only=True)
class Affine(_AffineShifts):
    """The worst affine shift x·Λ + δ, one for all images given (FedRobust, Reisizadeh et al. 2020).

    Found by projected ascent within ‖Λ − I‖_F ≤ rotation_radius and ‖δ‖₂ ≤ shift_radius. Λ acts on flat images from
    the right: d x d, a C x C mix of channels, or a diagonal. The radius bounds the d x d matrix that a form stands
    for, so the small forms are special cases of the full one.
    """

    step: float = 0.1
    """length of a step, as a share of the radius"""
    loss: Literal["error", "cross_entropy"] = "error"
    """what is climbed: the mean probability of an error, or the mean cross-entropy, which grows on without bound on
    images that are lost already"""
    as_published: bool = False
    """the authors' steps: 0.05 times the gradient of the mean cross-entropy, in their range of pixels, which is [0, 1]
    with centre 0 and [-1, 1] with centre 0.5"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.as_published and self.loss != "error":
            raise HardyError(
                f"as_published climbs the cross-entropy anyway; loss={self.loss} has no effect. Leave it out."
            )
        if self.as_published and self.centre not in _RANGES:
            raise HardyError(
                f"centre of an affine attack as_published is {self.centre:g}; the authors' pixels are in [0, 1] "
                "(centre 0) or [-1, 1] (centre 0.5). Take one of them."
            )

    @torch.no_grad()
    def perturb(self, forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        return self._shifted(x, *self.find(forward, x, y, key))

    @torch.no_grad()
    def find(self, forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """(Λ, δ): Λ [d, d], [C, C] or [C, H, W] as its form, δ [C, H, W]."""
        start = self._identity(x)
        radius = self.rotation_radius / (math.sqrt(x[0, 0].numel()) if self.form == "channel" else 1.0)

        def loss(shift: tuple[Tensor, Tensor]) -> Tensor:
            logits = forward(self._shifted(x, *shift))
            if self.as_published or self.loss == "cross_entropy":
                return F.cross_entropy(logits, y)
            return 1 - logits.softmax(-1).gather(-1, y[:, None]).mean()

        def stride(slope: Tensor, radius: float, published: float) -> Tensor:
            return published * slope if self.as_published else slope * (self.step * radius / _length(slope))

        # in a range of length r, δ is r times as long and its gradient 1/r times; Λ is the same
        push_step = _PUBLISHED_STEP / _RANGES.get(self.centre, 1.0) ** 2
        matrix, offset = start, torch.zeros_like(x[0])
        for _ in range(self.steps):
            turn, push = grad(loss)((matrix, offset))
            matrix = start + _shrink(matrix + stride(turn, radius, _PUBLISHED_STEP) - start, radius)
            offset = _shrink(offset + stride(push, self.shift_radius, push_step), self.shift_radius)
        return matrix, offset

    def _identity(self, x: Tensor) -> Tensor:
        if self.form == "diagonal":
            return torch.ones_like(x[0])
        size = x.shape[1] if self.form == "channel" else x[0].numel()
        if self.form == "full" and size > _MAX_FULL:
            raise HardyError(
                f"a full Λ for images of {size} values has {size}² entries; the limit is {_MAX_FULL} values. "
                "Use form='channel' or form='diagonal'."
            )
        return torch.eye(size, dtype=x.dtype, device=x.device)

    def _shifted(self, x: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
        shifted = affine_shift(x - self.centre, matrix, offset) + self.centre
        return shifted.clamp(0.0, 1.0) if self.clip else shifted


@part("attack")
@dataclass(frozen=True, kw_only=True)
class AffineWorst(_AffineShifts, Ensemble):
    """The worst of all affine attacks, image by image: right are images that are classified rightly as they are and
    under each of `affine`, `affine` on the cross-entropy, and `affine` as published."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stages()  # refuses what one of them refuses

    def stages(self) -> list[tuple[str, Attack]]:
        plain = Affine(**{field.name: getattr(self, field.name) for field in fields(_AffineShifts)})
        return [
            ("error", plain),
            ("cross_entropy", replace(plain, loss="cross_entropy")),
            ("as_published", replace(plain, as_published=True)),
        ]


def affine_shift(x: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """x·Λ + δ for flat images; the shape of Λ tells its form: [C, H, W] diagonal, [d, d] full, [C, C] channel."""
    if matrix.dim() == 3:
        return x * matrix + offset
    if matrix.shape[0] == x[0].numel():
        return (x.flatten(1) @ matrix).view(x.shape) + offset
    return torch.einsum("nchw,ck->nkhw", x, matrix) + offset


def _shrink(value: Tensor, radius: float) -> Tensor:
    """The nearest point in the L2 ball around 0."""
    return value * torch.clamp(radius / _length(value), max=1.0)


def _length(value: Tensor) -> Tensor:
    return value.square().sum().sqrt().clamp_min(1e-12)


affine, affine_worst = Affine, AffineWorst
__all__ = ["affine", "affine_shift", "affine_worst"]
