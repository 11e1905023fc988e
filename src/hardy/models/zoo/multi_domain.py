"""FedBN's networks, which FedRBN and Split-Mix share."""

from torch import nn

from hardy.core.layers import BatchNorm
from hardy.core.tensors import ImageShape
from hardy.models.blocks import HALF, MakeNorm, Scale, cells, entrance, named_sequential, widen
from hardy.models.stacked import Conv2d, Linear, MaxPool2d


def digits_cnn(
    *,
    norm: MakeNorm = BatchNorm,
    width: float = 1.0,
    classes: int = 10,
    shape: ImageShape = (3, 28, 28),
    scale: Scale = HALF,
) -> nn.Module:
    """FedBN's DigitModel: 14.2 M parameters, 47.8 M MACs. Split-Mix has no scale."""
    a, b, c, d, e = widen(width, 64, 64, 128, 2048, 512)
    return named_sequential(
        scale=entrance(shape, scale, smallest=4),
        conv1=Conv2d(shape[0], a, 5, padding=2),
        norm1=norm(a),
        pool1=MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=Conv2d(a, b, 5, padding=2),
        norm2=norm(b),
        pool2=MaxPool2d(2),
        relu2=nn.ReLU(),
        conv3=Conv2d(b, c, 5, padding=2),
        norm3=norm(c),
        relu3=nn.ReLU(),
        flat=nn.Flatten(),
        fc1=Linear(c * cells(shape, 4), d),
        norm4=norm(d),
        relu4=nn.ReLU(),
        fc2=Linear(d, e),
        norm5=norm(e),
        relu5=nn.ReLU(),
        fc3=Linear(e, classes),
    )


def _grid(size: int) -> int:
    """Side of AlexNet's last feature map."""
    for kernel, stride, padding in ((11, 4, 2), (3, 2, 0), (3, 2, 0), (3, 2, 0)):
        size = (size + 2 * padding - kernel) // stride + 1
    return size


def alexnet(
    *,
    norm: MakeNorm = BatchNorm,
    width: float = 1.0,
    classes: int = 10,
    shape: ImageShape = (3, 256, 256),
    scale: Scale = None,
) -> nn.Module:
    """AlexNet with norms for DomainNet: 57 M parameters, 923 M MACs, no dropout."""
    a, b, c, d, e, f, g = widen(width, 64, 192, 384, 256, 256, 4096, 4096)
    start = entrance(shape, scale, smallest=63)
    height, breadth = _grid(shape[1]), _grid(shape[2])
    return named_sequential(
        scale=start,
        conv1=Conv2d(shape[0], a, 11, stride=4, padding=2),
        norm1=norm(a),
        pool1=MaxPool2d(3, stride=2),
        relu1=nn.ReLU(),
        conv2=Conv2d(a, b, 5, padding=2),
        norm2=norm(b),
        pool2=MaxPool2d(3, stride=2),
        relu2=nn.ReLU(),
        conv3=Conv2d(b, c, 3, padding=1),
        norm3=norm(c),
        relu3=nn.ReLU(),
        conv4=Conv2d(c, d, 3, padding=1),
        norm4=norm(d),
        relu4=nn.ReLU(),
        conv5=Conv2d(d, e, 3, padding=1),
        norm5=norm(e),
        pool5=MaxPool2d(3, stride=2),
        relu5=nn.ReLU(),
        # AdaptiveAvgPool2d(6) on the 7x7 map of a 256x256 image, but with a deterministic backward on CUDA
        average=nn.AvgPool2d((max(1, height - 5), max(1, breadth - 5)), stride=1),
        flat=nn.Flatten(),
        fc1=Linear(e * min(height, 6) * min(breadth, 6), f),
        norm6=norm(f),
        relu6=nn.ReLU(),
        fc2=Linear(f, g),
        norm7=norm(g),
        relu7=nn.ReLU(),
        fc3=Linear(g, classes),
    )
