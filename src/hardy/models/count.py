"""How large a model is."""

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hardy.core.tensors import ImageShape


def parameters(model: nn.Module) -> int:
    """Trainable numbers; statistics and other buffers are not among them."""
    return sum(parameter.numel() for parameter in model.parameters())


def macs(model: nn.Module, shape: ImageShape, tensors: Mapping[str, Sequence[int]] | None = None) -> int:
    """Multiply-accumulates of convolutions, linear layers, attention and other matrix products in one forward pass of
    one sample; `tensors` gives the model's other shapes, as in a narrower network."""
    model = deepcopy(model).to("meta").eval()  # without data: nothing is computed, and the model stays as it is
    for name, size in (tensors or {}).items():
        path, _, own = name.rpartition(".")
        held = getattr(model.get_submodule(path), own)
        held.data = torch.empty(tuple(size), dtype=held.dtype, device="meta")
    model.requires_grad_(True)  # nn.MultiheadAttention then makes plain products, which can be counted
    dtype = next((parameter.dtype for parameter in model.parameters()), None)
    with FlopCounterMode(display=False) as counter, torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.empty(1, *shape, dtype=dtype, device="meta"))
    return int(counter.get_total_flops()) // 2
