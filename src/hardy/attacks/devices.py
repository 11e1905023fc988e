"""Devices nobody trained on, as threats: not an attack but what deployment brings.

Each client's test images are taken by `devices` devices in turn, drawn from keys of the evaluation, which no training
device has. The figures are plain accuracies over all images: an image that was misread before may be read rightly now.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hardy.attacks.base import Attack, Forward
from hardy.core import random
from hardy.data.shifts import Camera, GaussianAffine, Shift
from hardy.errors import HardyError


@dataclass(frozen=True, kw_only=True)
class _Unseen(Shift, Attack):
    images_only, needs_gradient = True, False
    devices: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.devices < 1:
            raise HardyError(f"devices is {self.devices}; it must be 1 or more unseen devices a client.")

    @property
    def joint(self) -> bool:
        return True

    def perturb(self, forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        taken = [self.apply(x[number :: self.devices], random.fold(key, number)) for number in range(self.devices)]
        order = torch.cat([torch.arange(len(x), device=x.device)[n :: self.devices] for n in range(self.devices)])
        return torch.cat(taken)[order.argsort()]


@dataclass(frozen=True, kw_only=True)
class UnseenCamera(Camera, _Unseen):
    """The images as cameras unknown to training take them."""


@dataclass(frozen=True, kw_only=True)
class UnseenGaussianAffine(GaussianAffine, _Unseen):
    """The images under Gaussian affine shifts unknown to training."""


unseen_camera, unseen_gaussian_affine = UnseenCamera, UnseenGaussianAffine
__all__ = ["unseen_camera", "unseen_gaussian_affine"]
