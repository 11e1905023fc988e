"""How large a model is."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
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


def macs(
    model: nn.Module,
    shape: ImageShape,
    tensors: Mapping[str, Sequence[int]] | None = None,
    kept: Mapping[str, float] | None = None,
) -> int:
    """Multiply-accumulates of convolutions, linear layers, attention and other matrix products in one forward pass of
    one sample; `tensors` gives the model's other shapes, as in a narrower network, and `kept` the shares of the weights
    that are not zero: only these take products."""

    def forward(device: str) -> None:
        here = deepcopy(model).to(device).eval()  # the model stays as it is
        for name, size in (tensors or {}).items():
            path, _, own = name.rpartition(".")
            held = getattr(here.get_submodule(path), own)
            held.data = torch.zeros(tuple(size), dtype=held.dtype, device=device)
        here.requires_grad_(True)  # nn.MultiheadAttention then makes plain products, which can be counted
        dtype = next((parameter.dtype for parameter in here.parameters()), None)
        for path, layer in here.named_modules() if kept else ():
            if kept and f"{path}.weight" in kept:
                layer.register_forward_hook(partial(skip, share=kept[f"{path}.weight"]))
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            here(torch.zeros(1, *shape, dtype=dtype, device=device))

    skipped: list[float] = []

    def skip(layer: nn.Module, given: tuple[torch.Tensor, ...], out: torch.Tensor, *, share: float) -> None:
        skipped.append((1 - share) * out.numel() * layer.get_parameter("weight")[0].numel())

    return count_macs(forward) - round(sum(skipped))


def shares_kept(model: nn.Module, held: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The share of every layer's weights that is not zero."""
    layers = [p for p, m in model.named_modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear)]
    names = (f"{path}.weight" for path in layers)
    return {name: int(held[name].count_nonzero()) / held[name].numel() for name in names if name in held}
