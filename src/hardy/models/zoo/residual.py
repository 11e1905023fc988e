"""Residual networks for 32x32 images."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hardy.core.layers import BatchNorm
from hardy.core.tensors import ImageShape
from hardy.models.blocks import HALF, MakeNorm, Scale, entrance, named_sequential, start, widen
from hardy.models.stacked import Conv2d, Linear, in_turn

_RELU = nn.ReLU()


def _shortcut(entering: int, leaving: int, stride: int) -> nn.Module | None:
    """A 1x1 projection where the shape changes."""
    if (entering, 1) == (leaving, stride):
        return None
    return Conv2d(entering, leaving, 1, stride=stride, bias=False)


class _Block(nn.Module):
    """conv, norm, ReLU, conv, norm; plus the shortcut; ReLU."""

    def __init__(self, entering: int, leaving: int, stride: int, norm: MakeNorm, bias: bool = False) -> None:
        super().__init__()
        self.conv1 = Conv2d(entering, leaving, 3, stride=stride, padding=1, bias=bias)
        self.norm1 = norm(leaving)
        self.conv2 = Conv2d(leaving, leaving, 3, padding=1, bias=bias)
        self.norm2 = norm(leaving)
        projection = _shortcut(entering, leaving, stride)
        self.shortcut = nn.Identity() if projection is None else named_sequential(conv=projection, norm=norm(leaving))

    def forward(self, x: Tensor) -> Tensor:
        inner = in_turn(x, self.conv1, self.norm1, _RELU, self.conv2, self.norm2)
        return torch.relu(inner + self.shortcut(x))


class _PreBlock(nn.Module):
    """norm, ReLU, conv, norm, ReLU, conv; plus the shortcut, whose projection sees the activated input."""

    def __init__(self, entering: int, leaving: int, stride: int, norm: MakeNorm) -> None:
        super().__init__()
        self.norm1 = norm(entering)
        self.conv1 = Conv2d(entering, leaving, 3, stride=stride, padding=1, bias=False)
        self.norm2 = norm(leaving)
        self.conv2 = Conv2d(leaving, leaving, 3, padding=1, bias=False)
        self.shortcut = _shortcut(entering, leaving, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = in_turn(x, self.norm1, _RELU)
        kept: Tensor = x if self.shortcut is None else self.shortcut(active)
        return in_turn(active, self.conv1, self.norm2, _RELU, self.conv2) + kept


def _stages(channels: Sequence[int], blocks: int, block: Callable[[int, int, int], nn.Module]) -> dict[str, nn.Module]:
    """Stages of equal blocks; each but the first halves the grid."""
    stages: dict[str, nn.Module] = {}
    entering = channels[0]
    for number, leaving in enumerate(channels, 1):
        strides = [1 if number == 1 else 2] + [1] * (blocks - 1)
        sides = [entering] + [leaving] * (blocks - 1)
        stages[f"stage{number}"] = nn.Sequential(
            *(block(side, leaving, stride) for side, stride in zip(sides, strides, strict=True))
        )
        entering = leaving
    return stages


def preresnet18(
    *,
    norm: MakeNorm = BatchNorm,
    width: float = 1.0,
    classes: int = 10,
    shape: ImageShape = (3, 32, 32),
    scale: Scale = None,
) -> nn.Module:
    """Split-Mix's pre-activation ResNet-18 (that of HeteroFL): 11.2 M parameters, 555 M MACs."""
    channels = widen(width, 64, 128, 256, 512)
    return named_sequential(
        scale=entrance(shape, scale),
        conv1=Conv2d(shape[0], channels[0], 3, padding=1, bias=False),
        **_stages(channels, 2, partial(_PreBlock, norm=norm)),
        norm=norm(channels[-1]),
        relu=nn.ReLU(),
        average=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        fc=Linear(channels[-1], classes),
    )


def resnet18(
    *,
    norm: MakeNorm = BatchNorm,
    width: float = 1.0,
    classes: int = 10,
    shape: ImageShape = (3, 32, 32),
    scale: Scale = None,
) -> nn.Module:
    """ResNet-18 as usual on CIFAR (3x3 stem, no first pool); SFAT's for CIFAR-100."""
    channels = widen(width, 64, 128, 256, 512)
    return named_sequential(
        scale=entrance(shape, scale),
        conv1=Conv2d(shape[0], channels[0], 3, padding=1, bias=False),
        norm1=norm(channels[0]),
        relu1=nn.ReLU(),
        **_stages(channels, 2, partial(_Block, norm=norm)),
        average=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        fc=Linear(channels[-1], classes),
    )


def mini_resnet(
    *,
    norm: MakeNorm = nn.Identity,
    width: float = 1.0,
    classes: int = 10,
    shape: ImageShape = (3, 32, 32),
    scale: Scale = HALF,
    as_published: bool = False,
) -> nn.Module:
    """FLRA's Mini-ResNet-32: He et al.'s ResNet-32 for CIFAR without norms, shortcuts projected. Xavier
    weights are our choice: with PyTorch's own it did not train, with He's it diverged.

    `as_published` has FLRA's 128 channels in the last stage, where a ResNet-32 has 64.

    as_published: FLRA's 128 channels in the last stage
    """
    channels = widen(width, 16, 32, 128 if as_published else 64)
    layers = named_sequential(
        scale=entrance(shape, scale),
        conv1=Conv2d(shape[0], channels[0], 3, padding=1),
        norm1=norm(channels[0]),
        relu1=nn.ReLU(),
        # without norms nothing else shifts the activations, so the convolutions have a bias
        **_stages(channels, 5, partial(_Block, norm=norm, bias=True)),
        average=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        fc=Linear(channels[-1], classes),
    )
    return start(layers, nn.init.xavier_uniform_)
