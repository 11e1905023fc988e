"""The network of the sub-network tables in small: four convolutions, so that it can be cut in four depths."""

from torch import nn

from hardy.core.layers import BatchNorm


def four_convolutions(norm=BatchNorm, width=1.0, classes=10, shape=(3, 28, 28)):
    """0.9 M multiply-accumulates and 17 k parameters at ×1."""
    a, b, c, d = (max(1, round(width * channels)) for channels in (16, 16, 32, 32))
    layers = {
        "conv1": nn.Conv2d(shape[0], a, 3, stride=2, padding=1),
        "norm1": norm(a),
        "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(a, b, 3, stride=2, padding=1),
        "norm2": norm(b),
        "relu2": nn.ReLU(),
        "conv3": nn.Conv2d(b, c, 3, padding=1),
        "norm3": norm(c),
        "relu3": nn.ReLU(),
        "conv4": nn.Conv2d(c, d, 3, padding=1),
        "norm4": norm(d),
        "relu4": nn.ReLU(),
        "average": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
        "fc": nn.Linear(d, classes),
    }
    net = nn.Sequential()
    for name, layer in layers.items():
        net.add_module(name, layer)
    return net
