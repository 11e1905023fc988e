"""How large a model is."""

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from hardy.models.blocks import Shape


def parameters(model: nn.Module) -> int:
    """Trainable numbers; statistics and other buffers are not among them."""
    return sum(parameter.numel() for parameter in model.parameters())


def macs(model: nn.Module, shape: Shape, tensors: Mapping[str, Sequence[int]] | None = None) -> int:
    """Multiply-accumulates of convolutions and linear layers in one forward pass of one sample; `tensors` gives the
    model's other shapes, as in a narrower network."""
    model = deepcopy(model).to("meta").eval()  # without data: nothing is computed, and the model stays as it is
    for name, size in (tensors or {}).items():
        path, _, own = name.rpartition(".")
        held = getattr(model.get_submodule(path), own)
        held.data = torch.empty(tuple(size), dtype=held.dtype, device="meta")
    counts: list[int] = []

    def count(module: nn.Module, _: object, output: Tensor) -> None:
        assert isinstance(module.weight, Tensor)
        counts.append(output.numel() * module.weight[0].numel())

    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear):
            module.register_forward_hook(count)
    dtype = next((parameter.dtype for parameter in model.parameters()), None)
    model(torch.empty(1, *shape, dtype=dtype, device="meta"))
    return sum(counts)
