"""How large a model is."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hardy.core.tensors import ImageShape


class MacCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the multiply-accumulates of convolutions, matrix products and attention inside, forward and backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func._overloadpacket):
            self.total += int(count(*args, **(kwargs or {}), out_val=out)) // 2
        return out


def count_macs(work: Callable[[str], object]) -> int:
    """The multiply-accumulates of work(device). It is tried on tensors without data (device meta), where nothing is
    computed; a model that looks at its data, as in `if x.sum() > 0`, is run on the CPU."""
    try:
        with MacCounter() as counter:
            work("meta")
    except (RuntimeError, NotImplementedError):
        with MacCounter() as counter:
            work("cpu")
    total: int = counter.total
    return total


def parameters(model: nn.Module) -> int:
    """Trainable numbers; statistics and other buffers are not among them."""
    return sum(parameter.numel() for parameter in model.parameters())


def macs(model: nn.Module, shape: ImageShape, tensors: Mapping[str, Sequence[int]] | None = None) -> int:
    """Multiply-accumulates of convolutions, linear layers, attention and other matrix products in one forward pass of
    one sample; `tensors` gives the model's other shapes, as in a narrower network."""

    def forward(device: str) -> None:
        here = deepcopy(model).to(device).eval()  # the model stays as it is
        for name, size in (tensors or {}).items():
            path, _, own = name.rpartition(".")
            held = getattr(here.get_submodule(path), own)
            held.data = torch.zeros(tuple(size), dtype=held.dtype, device=device)
        here.requires_grad_(True)  # nn.MultiheadAttention then makes plain products, which can be counted
        dtype = next((parameter.dtype for parameter in here.parameters()), None)
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            here(torch.zeros(1, *shape, dtype=dtype, device=device))

    return count_macs(forward)
