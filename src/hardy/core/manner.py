"""How layers run: for one slot, or for many at once; and the weights that their products read.

In mixed precision a step rounds every weight once. Layers that are made for it (`reads_rounded`) take the rounded copy
from here and give gradients to the weight itself, in its own precision.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor, nn

from hardy.core.tensors import Tensors

Manner = Literal["one", "many", "fused"]
"""for one slot; for many; for many with the fused kernels where they can"""
_manner: ContextVar[Manner] = ContextVar("hardy_manner", default="one")
_rounded: ContextVar[Mapping[int, Tensor]] = ContextVar("hardy_rounded", default={})  # noqa: B039  # never written to


@contextmanager
def vectorising(manner: Manner = "many") -> Iterator[None]:
    """Tells the layers inside that they run for many slots at once."""
    token = _manner.set(manner)
    try:
        yield
    finally:
        _manner.reset(token)


def manner() -> Manner:
    return _manner.get()


def fused_products(model: nn.Module) -> dict[str, nn.Module]:
    """The weights whose layers read rounded copies, by name, with their layers."""
    return {f"{name}.weight": layer for name, layer in model.named_modules() if hasattr(layer, "reads_rounded")}


@contextmanager
def reading_rounded(trained: Tensors, rounded: Tensors) -> Iterator[None]:
    """Layers inside read the rounded copies in place of these weights."""
    token = _rounded.set({id(trained[name]): copy for name, copy in rounded.items()})
    try:
        yield
    finally:
        _rounded.reset(token)


def round_once(weight: Tensor) -> Tensor:
    """A weight as products read it: the copy of the step, or one made now. Those of a convolution lie as
    [CI, kh, kw, CO]."""
    if (copy := _rounded.get().get(id(weight))) is not None:
        return copy
    with torch.no_grad():
        half = weight.detach()
        if torch.is_autocast_enabled("cuda"):
            half = half.to(torch.get_autocast_dtype("cuda"))
        return half.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2) if half.dim() == 4 else half
