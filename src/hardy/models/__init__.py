"""Networks by name, and the layers that Hardy's networks are made of."""

from collections.abc import Callable

from torch import nn

from hardy.core.layers import BatchNorm, Dropout, InputScale
from hardy.models.convert import adopt
from hardy.models.zoo.cifar import fbn_cnn, flra_alexnet, mini_inception, nin, small_cnn
from hardy.models.zoo.convnext import mini_convnext
from hardy.models.zoo.multi_domain import alexnet, digits_cnn
from hardy.models.zoo.residual import mini_resnet, preresnet18, resnet18
from hardy.models.zoo.small import mlp, tiny_cnn
from hardy.models.zoo.transformer import tiny_vit
from hardy.registry import PARTS

MODELS: dict[str, Callable[..., nn.Module]] = {
    "alexnet": alexnet,
    "digits_cnn": digits_cnn,
    "fbn_cnn": fbn_cnn,
    "flra_alexnet": flra_alexnet,
    "mini_convnext": mini_convnext,
    "mini_inception": mini_inception,
    "mini_resnet": mini_resnet,
    "mlp": mlp,
    "nin": nin,
    "preresnet18": preresnet18,
    "resnet18": resnet18,
    "small_cnn": small_cnn,
    "tiny_cnn": tiny_cnn,
    "tiny_vit": tiny_vit,
}

PARTS["model"] = MODELS

__all__ = [
    "MODELS",
    "BatchNorm",
    "Dropout",
    "InputScale",
    "adopt",
    "alexnet",
    "digits_cnn",
    "fbn_cnn",
    "flra_alexnet",
    "mini_convnext",
    "mini_inception",
    "mini_resnet",
    "mlp",
    "nin",
    "preresnet18",
    "resnet18",
    "small_cnn",
    "tiny_cnn",
    "tiny_vit",
]
