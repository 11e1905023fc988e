"""A step of gradient descent on the weights of many slots, in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hardy.core.tensors import Tensors


@triton.jit
def _descend(  # type: ignore[no-untyped-def]
    weight, gradient, velocity, rounded, rate, size, decay, momentum,
    MOVING: tl.constexpr, NESTEROV: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    w = tl.load(weight + at, mask=there)
    g = tl.load(gradient + at, mask=there) + decay * w
    if MOVING:
        v = momentum * tl.load(velocity + at, mask=there) + g
        tl.store(velocity + at, v, mask=there)
        g = g + momentum * v if NESTEROV else v
    w = w - tl.load(rate) * g
    tl.store(weight + at, w, mask=there)
    if ROUNDED:
        tl.store(rounded + at, w.to(rounded.dtype.element_ty), mask=there)


def descend(
    weights: Tensors,
    gradient: Tensors,
    rate: Tensor,
    rounded: Tensors,
    *,
    decay: float,
    velocity: Tensors | None,
    momentum: float,
    nesterov: bool,
) -> None:
    """SGD in place, and new rounded copies of the weights that have one."""
    for name, weight in weights.items():
        copy = rounded.get(name)
        alike = copy is not None and copy.stride() == weight.stride()
        slope, size = gradient[name].contiguous(), weight.numel()
        _descend[(triton.cdiv(size, _BLOCK),)](
            weight, slope, velocity[name] if velocity else weight, copy if alike else weight,
            rate, size, decay, momentum,
            MOVING=velocity is not None, NESTEROV=nesterov, ROUNDED=alike, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        if copy is not None and not alike:
            copy.copy_(weight)


_BLOCK = 4096


def round_all(weights: Tensors, names: list[str], dtype: torch.dtype) -> Tensors:
    """Rounded copies as products read them: of a convolution's weights [S, CO, CI, kh, kw] with channels last."""
    found = {}
    for name in names:
        half = weights[name].to(dtype)
        if half.dim() == 5:
            half = half.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)
        found[name] = half if half.data_ptr() != weights[name].data_ptr() else half.clone()
    return found
