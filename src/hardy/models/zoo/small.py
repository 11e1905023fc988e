"""Networks for tests and for work without an accelerator."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import nn

from hardy.core.layers import BatchNorm
from hardy.core.tensors import ImageShape
from hardy.models.blocks import HALF, MakeNorm, Scale, cells, entrance, named_sequential, vector_entrance, widen
from hardy.models.stacked import Conv2d, Linear, MaxPool2d


def mlp(
    *,
    hidden: Sequence[int] = (64,),
    norm: MakeNorm = BatchNorm,
    width: float = 1.0,
    classes: int = 10,
    shape: ImageShape = (3, 28, 28),
    scale: Scale = HALF,
) -> nn.Module:
    """Linear layers with norm and ReLU, for images or feature vectors; hidden=() is softmax regression.

    hidden: features of each hidden layer
    """
    sizes = [prod(shape), *widen(width, *hidden)]
    layers = {
        f"hidden{number}": named_sequential(fc=Linear(entering, leaving), norm=norm(leaving), relu=nn.ReLU())
        for number, (entering, leaving) in enumerate(pairwise(sizes), 1)
    }
    first = vector_entrance(shape[0], scale) if len(shape) == 1 else entrance(shape, scale)
    return named_sequential(scale=first, flat=nn.Flatten(), **layers, fc=Linear(sizes[-1], classes))


def tiny_cnn(
    *,
    norm: MakeNorm = BatchNorm,
    width: float = 1.0,
    classes: int = 10,
    shape: ImageShape = (3, 28, 28),
    scale: Scale = HALF,
) -> nn.Module:
    """Two convolutions and a linear layer: 21 k parameters, 1.3 M MACs."""
    a, b = widen(width, 16, 32)
    return named_sequential(
        scale=entrance(shape, scale, smallest=4),
        conv1=Conv2d(shape[0], a, 3, padding=1),
        norm1=norm(a),
        pool1=MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=Conv2d(a, b, 3, padding=1),
        norm2=norm(b),
        pool2=MaxPool2d(2),
        relu2=nn.ReLU(),
        flat=nn.Flatten(),
        fc=Linear(b * cells(shape, 4), classes),
    )
