"""What the models share: arguments, checks and the first layer."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import ceil

from torch import Tensor, nn

from hardy.core.layers import InputScale
from hardy.core.tensors import ImageShape
from hardy.errors import HardyError
from hardy.models.stacked import FusedSequential

MakeNorm = Callable[[int], nn.Module]
"""Features -> a layer that normalises [N, C] and [N, C, H, W], and tokens [N, T, C] in a transformer. `nn.Identity` is
no normalisation."""

Scale = tuple[Sequence[float], Sequence[float]] | None
"""Mean and std of the input, one number or one a channel (feature). None: the network sees pixels in [0, 1]."""

HALF: Scale = ((0.5,), (0.5,))


def named_sequential(**layers: nn.Module) -> FusedSequential:
    """Layers one after the other, under their names."""
    return FusedSequential(OrderedDict(layers))


def start(model: nn.Module, draw: Callable[[Tensor], Tensor]) -> nn.Module:
    """The model with weights drawn by one of `nn.init`, and biases of 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            draw(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def widen(width: float, *sizes: int) -> list[int]:
    """Hidden sizes of a network `width` times as wide, rounded up."""
    if not width > 0:
        raise HardyError(f"width {width} must be above 0; 1 is the network as published.")
    return [max(1, ceil(size * width - 1e-9)) for size in sizes]  # 0.07 * 100 is a hair above 7


def cells(shape: ImageShape, stride: int) -> int:
    """Cells of the grid that is left of an image after pools that shrink it `stride` times."""
    return (shape[1] // stride) * (shape[2] // stride)


def entrance(shape: ImageShape, scale: Scale, smallest: int = 1) -> nn.Module:
    """The first layer, from pixels in [0, 1]; refuses an image on which the network's grids would vanish."""
    if len(shape) == 1:
        raise HardyError(f"this network needs images, but the data are vectors of {shape[0]} features. Take model mlp.")
    channels, height, width = shape
    if min(height, width) < smallest:
        raise HardyError(
            f"image of {height}x{width} is too small: this network needs {smallest}x{smallest} or more. "
            "Resize the images or choose another model."
        )
    return _scaled(scale, channels, "channel", axes=2)


def vector_entrance(features: int, scale: Scale) -> nn.Module:
    """The first layer of a network for feature vectors. They come as they are: the usual scale, which is for pixels, is
    left out."""
    return _scaled(None if scale == HALF else scale, features, "feature", axes=0)


def _scaled(scale: Scale, count: int, unit: str, *, axes: int) -> nn.Module:
    if scale is None:
        return nn.Identity()
    mean, std = map(tuple, scale)
    if not {len(mean), len(std)} <= {1, count} or min(std) <= 0:
        raise HardyError(
            f"scale mean {mean}, std {std} does not fit {count} {unit}(s): "
            f"give 1 or {count} numbers each, std above 0, or scale=None."
        )
    return InputScale(mean, std, axes=axes)
