"""What the playground's own runs are made of: a small network, and training on images that are moved a little."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hardy.core import random
from hardy.core.layers import BatchNorm
from hardy.core.net import Net
from hardy.core.protocols import Batch, Objective, Wrapper
from hardy.core.tensors import Tensors
from hardy.models.blocks import HALF, MakeNorm, entrance, named_sequential, widen
from hardy.models.stacked import Conv2d
from hardy.parts.objectives import cross_entropy


def strided_cnn(
    *, norm: MakeNorm = BatchNorm, width: float = 1.0, classes: int = 10, shape: Sequence[int] = (3, 28, 28)
) -> nn.Module:
    """Four convolutions, three of them with a stride, so that a browser attacks it quickly; for 28x28 images."""
    a, b, c, d = widen(width, 64, 128, 192, 192)
    return named_sequential(
        scale=entrance(tuple(shape), HALF),
        conv1=Conv2d(shape[0], a, 5, stride=2, padding=2),
        norm1=norm(a),
        relu1=nn.ReLU(),
        conv2=Conv2d(a, b, 3, stride=2, padding=1),
        norm2=norm(b),
        relu2=nn.ReLU(),
        conv3=Conv2d(b, c, 3, padding=1),
        norm3=norm(c),
        relu3=nn.ReLU(),
        conv4=Conv2d(c, d, 3, stride=2, padding=1),
        norm4=norm(d),
        relu4=nn.ReLU(),
        flat=nn.Flatten(),
        fc=nn.Linear(d * 16, classes),
    )


@dataclass(frozen=True, kw_only=True)
class Moved(Wrapper):
    """The inner objective on images that are turned, scaled and moved a little, each in a way of its own."""

    inner: Objective = field(default_factory=cross_entropy)
    turn: float = 0.17
    """largest angle, in radians"""
    scale: float = 0.1
    """largest change of size, as a share"""
    shift: float = 0.14
    """largest move, as a share of half the image's side"""

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        count = len(batch.x)
        draw = 2 * random.uniform(random.fold(key, "moved"), (4, count), batch.x.dtype) - 1
        angle, size = self.turn * draw[0], 1 + self.scale * draw[1]
        rows = [size * angle.cos(), -size * angle.sin(), self.shift * draw[2]]
        rows += [size * angle.sin(), size * angle.cos(), self.shift * draw[3]]
        grid = F.affine_grid(torch.stack(rows, -1).reshape(count, 2, 3), list(batch.x.shape), align_corners=False)
        moved = F.grid_sample(batch.x, grid, padding_mode="border", align_corners=False).clamp(0, 1)
        return self.inner.loss(net, private, Batch(moved, batch.y), key)
