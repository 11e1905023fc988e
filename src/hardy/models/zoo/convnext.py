"""A small ConvNeXt."""

import torch
from torch import Tensor, nn

from hardy.core.tensors import ImageShape
from hardy.errors import HardyError
from hardy.models.blocks import HALF, MakeNorm, Scale, entrance, named_sequential, widen
from hardy.models.stacked import Conv2d, Linear

_FIRST_SCALE = 0.1
"""of what a block adds; the paper's 1e-6 is for networks of many more blocks"""


def _one_group(features: int) -> nn.Module:
    """LayerNorm over all of an image's features, with a scale for each channel."""
    return nn.GroupNorm(1, features)


class _Depthwise(Conv2d):
    """A convolution of each channel alone, of as many as its weights have: a narrower network can be cut out."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight, self.bias, padding=self.padding, groups=len(self.weight))


class ConvNextBlock(nn.Module):
    """7x7 convolution of each channel alone, norm, 1x1 to four times as many, GELU, 1x1 back, a learnt scale of each
    channel; plus the input."""

    def __init__(self, features: int, norm: MakeNorm, kernel: int) -> None:
        super().__init__()
        self.spread = _Depthwise(features, features, kernel, padding=kernel // 2, groups=features)
        self.norm = norm(features)
        self.widen = Conv2d(features, 4 * features, 1)
        self.narrow = Conv2d(4 * features, features, 1)
        self.scale = nn.Parameter(torch.full((features, 1, 1), _FIRST_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.narrow(nn.functional.gelu(self.widen(self.norm(self.spread(x)))))
        out: Tensor = x + self.scale * inner
        return out


def mini_convnext(
    *,
    norm: MakeNorm = _one_group,
    width: float = 1.0,
    classes: int = 10,
    shape: ImageShape = (3, 28, 28),
    scale: Scale = HALF,
    blocks: int = 2,
    kernel: int = 7,
) -> nn.Module:
    """ConvNeXt (Liu et al. 2022) in two stages, for images of 28 or 32 pixels: a 2x2 stem, blocks, norm and 2x2
    convolution between the stages, mean, norm, linear layer. `norm` is LayerNorm over each image's features where
    the paper has it over channels; other norms take its place.

    blocks: blocks of a stage
    kernel: side of the window of a block's first convolution, odd
    """
    if blocks < 1 or kernel < 1 or kernel % 2 == 0:
        raise HardyError(
            f"mini_convnext has blocks = {blocks} and kernel = {kernel}; blocks must be 1 or more, kernel odd."
        )
    first, second = widen(width, 24, 48)
    return named_sequential(
        scale=entrance(shape, scale, smallest=4),
        stem=Conv2d(shape[0], first, 2, stride=2),
        norm1=norm(first),
        stage1=nn.Sequential(*(ConvNextBlock(first, norm, kernel) for _ in range(blocks))),
        norm2=norm(first),
        down=Conv2d(first, second, 2, stride=2),
        stage2=nn.Sequential(*(ConvNextBlock(second, norm, kernel) for _ in range(blocks))),
        average=nn.AdaptiveAvgPool2d(1),
        norm3=norm(second),
        flat=nn.Flatten(),
        fc=Linear(second, classes),
    )
