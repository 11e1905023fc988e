"""The plain networks of SFAT, FBN and FLRA for CIFAR-10 and SVHN."""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from hardy.core.layers import BatchNorm, Dropout
from hardy.core.tensors import ImageShape
from hardy.models.blocks import HALF, MakeNorm, Scale, cells, entrance, named_sequential, start, widen
from hardy.models.stacked import Conv2d, Linear, MaxPool2d

CIFAR: Scale = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def nin(
    *,
    norm: MakeNorm = nn.Identity,
    width: float = 1.0,
    classes: int = 10,
    shape: ImageShape = (3, 32, 32),
    scale: Scale = None,
    relu_logits: bool = False,
) -> nn.Module:
    """Network in Network, SFAT's for CIFAR-10: nine convolutions, dropout 0.5, weights from N(0, 0.05).

    SFAT's release has a ReLU on the maps that are averaged to logits: `relu_logits`.

    relu_logits: a ReLU on the maps that are averaged to logits
    """
    a, b, c, d = widen(width, 192, 160, 96, 192)

    def convolution(entering: int, leaving: int, kernel: int) -> nn.Module:
        conv = Conv2d(entering, leaving, kernel, padding=kernel // 2)
        return named_sequential(conv=conv, norm=norm(leaving), relu=nn.ReLU())

    logits = Conv2d(d, classes, 1)
    layers = named_sequential(
        scale=entrance(shape, scale),
        conv1=convolution(shape[0], a, 5),
        conv2=convolution(a, b, 1),
        conv3=convolution(b, c, 1),
        pool1=MaxPool2d(3, stride=2, padding=1),
        drop1=Dropout(0.5),
        conv4=convolution(c, d, 5),
        conv5=convolution(d, d, 1),
        conv6=convolution(d, d, 1),
        pool2=nn.AvgPool2d(3, stride=2, padding=1),
        drop2=Dropout(0.5),
        conv7=convolution(d, d, 3),
        conv8=convolution(d, d, 1),
        conv9=named_sequential(conv=logits, relu=nn.ReLU()) if relu_logits else logits,
        average=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
    )
    return start(layers, partial(nn.init.normal_, std=0.05))


def small_cnn(
    *,
    norm: MakeNorm = BatchNorm,
    width: float = 1.0,
    classes: int = 10,
    shape: ImageShape = (3, 32, 32),
    scale: Scale = None,
) -> nn.Module:
    """SmallCNN with norms, SFAT's for SVHN: three pairs of convolutions, as usual in adversarial training.

    TRADES' own SmallCNN, which SFAT cites, is a four-convolution network without norms for MNIST.
    """
    sides = widen(width, 64, 128, 196)
    layers: dict[str, nn.Module] = {}
    for number, (entering, leaving) in enumerate(pairwise([shape[0], *sides]), 1):
        layers[f"block{number}"] = named_sequential(
            conv1=Conv2d(entering, leaving, 3, padding=1),
            norm1=norm(leaving),
            relu1=nn.ReLU(),
            conv2=Conv2d(leaving, leaving, 3, padding=1),
            norm2=norm(leaving),
            pool=MaxPool2d(2),
            relu2=nn.ReLU(),
        )
    (hidden,) = widen(width, 256)
    return named_sequential(
        scale=entrance(shape, scale, smallest=8),
        **layers,
        flat=nn.Flatten(),
        fc1=Linear(sides[-1] * cells(shape, 8), hidden),
        relu=nn.ReLU(),
        fc2=Linear(hidden, classes),
    )


def fbn_cnn(
    *,
    norm: MakeNorm = BatchNorm,
    width: float = 1.0,
    classes: int = 10,
    shape: ImageShape = (3, 32, 32),
    scale: Scale = CIFAR,
) -> nn.Module:
    """FBN's network for CIFAR-10 (its table 1), which normalises after the ReLU. Gives logits."""
    a, b, hidden = widen(width, 64, 128, 128)
    return named_sequential(
        scale=entrance(shape, scale, smallest=4),
        conv1=Conv2d(shape[0], a, 3, padding=1),
        relu1=nn.ReLU(),
        norm1=norm(a),
        conv2=Conv2d(a, a, 3, padding=1),
        relu2=nn.ReLU(),
        norm2=norm(a),
        pool1=MaxPool2d(2),
        drop1=Dropout(0.25),
        conv3=Conv2d(a, b, 3, padding=1),
        relu3=nn.ReLU(),
        norm3=norm(b),
        conv4=Conv2d(b, b, 3, padding=1),
        relu4=nn.ReLU(),
        norm4=norm(b),
        pool2=MaxPool2d(2),
        drop2=Dropout(0.25),
        flat=nn.Flatten(),
        fc1=Linear(b * cells(shape, 4), hidden),
        relu5=nn.ReLU(),
        fc2=Linear(hidden, classes),
    )


def flra_alexnet(
    *,
    norm: MakeNorm = nn.Identity,
    width: float = 1.0,
    classes: int = 10,
    shape: ImageShape = (3, 32, 32),
    scale: Scale = HALF,
    lrn: bool = False,
) -> nn.Module:
    """FLRA's small AlexNet with Xavier weights; paddings as in TensorFlow's CIFAR-10 tutorial, its ancestor.

    `lrn` adds the local response norms that FLRA has for MNIST only.

    lrn: add local response norms
    """
    a, b, c, d = widen(width, 96, 256, 384, 192)

    def halve() -> nn.Module:
        smaller = named_sequential(pool=MaxPool2d(3, stride=2, ceil_mode=True), relu=nn.ReLU())
        return named_sequential(smaller=smaller, lrn=nn.LocalResponseNorm(5)) if lrn else smaller

    layers = named_sequential(
        scale=entrance(shape, scale, smallest=4),
        conv1=Conv2d(shape[0], a, 5, padding=2),
        norm1=norm(a),
        pool1=halve(),
        conv2=Conv2d(a, b, 5, padding=2),
        norm2=norm(b),
        pool2=halve(),
        flat=nn.Flatten(),
        fc1=Linear(b * cells(shape, 4), c),
        norm3=norm(c),
        relu3=nn.ReLU(),
        fc2=Linear(c, d),
        norm4=norm(d),
        relu4=nn.ReLU(),
        fc3=Linear(d, classes),
    )
    return start(layers, nn.init.xavier_uniform_)


class _Beside(nn.Module):
    """Two layers on one input, their channels one after the other."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(x)], 1)


def mini_inception(
    *,
    norm: MakeNorm = BatchNorm,
    width: float = 1.0,
    classes: int = 10,
    shape: ImageShape = (3, 32, 32),
    scale: Scale = HALF,
) -> nn.Module:
    """FLRA's Mini-Inception, taken to be the small Inception of Zhang et al. (2017): 1.65 M parameters.

    FLRA never moved its norms' statistics off 0 and 1: to repeat that, train with statistics="running", or without
    norms. He's weights are our choice: with Xavier's it then hardly moved in its first steps.
    """
    (side,) = widen(width, 96)

    def convolution(entering: int, leaving: int, kernel: int, stride: int = 1) -> nn.Module:
        conv = Conv2d(entering, leaving, kernel, stride=stride, padding=kernel // 2)
        return named_sequential(conv=conv, norm=norm(leaving), relu=nn.ReLU())

    def inception(ones: int, threes: int) -> nn.Module:
        nonlocal side
        entering, (a, b) = side, widen(width, ones, threes)
        side = a + b
        return _Beside(convolution(entering, a, 1), convolution(entering, b, 3))

    def downsample(channels: int) -> nn.Module:
        nonlocal side
        entering, (a,) = side, widen(width, channels)
        side += a
        return _Beside(convolution(entering, a, 3, stride=2), MaxPool2d(3, stride=2, padding=1))

    layers = named_sequential(
        scale=entrance(shape, scale),
        conv=convolution(shape[0], side, 3),
        mix1=inception(32, 32),
        mix2=inception(32, 48),
        down1=downsample(80),
        mix3=inception(112, 48),
        mix4=inception(96, 64),
        mix5=inception(80, 80),
        mix6=inception(48, 96),
        down2=downsample(96),
        mix7=inception(176, 160),
        mix8=inception(176, 160),
        average=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        fc=Linear(side, classes),
    )
    return start(layers, nn.init.kaiming_normal_)
