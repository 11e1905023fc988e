"""Augmentation: every training step sees its images changed at random; evaluation, statistics and serving never do.

An augmentation is a function of the images and the step's key, with as many images out as in and no look at their
values, so it runs under vmap and in captured steps, is the same on every engine, and a resumed run goes on with it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hardy.core import random
from hardy.core.training import Training
from hardy.errors import HardyError
from hardy.registry import kind, part


@kind("augmentation")
@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """The part that changes the images of a training step, each in its own way."""

    def check(self, shape: Sequence[int], training: Training) -> None:
        """Refuses data and training that it would not work on."""
        if len(shape) != 3:
            raise HardyError(
                f"data.augmentation changes images, but the data are vectors of {shape[0]} features. Leave it out."
            )
        if training.replays > 1:
            raise HardyError(
                f"training.replays is {training.replays}: it shows the same images again, and data.augmentation would "
                "change them each time. Leave one of them out."
            )

    def apply(self, x: Tensor, key: Tensor) -> Tensor:
        """Images [N, C, H, W] in [0, 1], changed; they stay in [0, 1]."""
        raise NotImplementedError


@part("augmentation")
@dataclass(frozen=True, kw_only=True)
class CropFlip(Augmentation):
    """A crop of each image padded with black, as large as the image, and a mirror image half of the time."""

    padding: int = 4
    """black pixels on each side, out of which the crop is taken: the most that an image is moved; 0: no crop"""
    flip: bool = True
    """mirror left and right with probability 1/2; leave it out for digits, letters and other things with a side"""

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise HardyError(f"padding of crop_flip is {self.padding}; it must be 0 or more pixels.")
        if not (self.padding or self.flip):
            raise HardyError("crop_flip has padding = 0 and flip = false, so it has no effect. Leave it out.")

    def check(self, shape: Sequence[int], training: Training) -> None:
        super().check(shape, training)
        if self.padding >= min(shape[1:]):
            raise HardyError(
                f"padding of crop_flip is {self.padding}, but images are {shape[1]}x{shape[2]}: some would be all "
                f"black. It must be below {min(shape[1:])}."
            )

    def apply(self, x: Tensor, key: Tensor) -> Tensor:
        count, channels, height, width = x.shape
        reach = 2 * self.padding + 1
        down, right, mirrored = (
            (random.uniform(random.fold(key, word), (count, 1)) * places).long()
            for word, places in (("down", reach), ("right", reach), ("flip", 2 if self.flip else 1))
        )
        across = torch.arange(width, device=x.device)
        across = torch.where(mirrored == 1, width - 1 - across, across) + right - self.padding
        along = torch.arange(height, device=x.device) + down - self.padding
        inside = ((along >= 0) & (along < height))[:, :, None] & ((across >= 0) & (across < width))[:, None]
        taken = along.clamp(0, height - 1)[:, :, None] * width + across.clamp(0, width - 1)[:, None]
        taken = taken.flatten(1)[:, None].expand(count, channels, height * width)
        return torch.where(inside[:, None], x.flatten(2).gather(2, taken).view(x.shape), 0.0)


@part("augmentation")
@dataclass(frozen=True, kw_only=True)
class PixelNoise(Augmentation):
    """Normal noise on every pixel, as networks need it that are to be certified by randomised smoothing (Cohen et al.
    2019). Pixels are cut off at 0 and 1, as in the noisy copies that are counted for certificates."""

    sigma: float = 0.25
    """σ, deviation of the noise, in pixels of [0, 1]; `hardy evaluate --certify` takes the same"""

    def __post_init__(self) -> None:
        if not (self.sigma > 0 and math.isfinite(self.sigma)):
            raise HardyError(f"sigma of pixel_noise is {self.sigma}; it must be above 0.")

    def apply(self, x: Tensor, key: Tensor) -> Tensor:
        return (x + self.sigma * random.normal(key, x.shape, torch.float32).to(x.dtype)).clamp(0.0, 1.0)


crop_flip, pixel_noise = CropFlip, PixelNoise
__all__ = ["Augmentation", "crop_flip", "pixel_noise"]
