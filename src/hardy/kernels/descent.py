"""A step of gradient descent on the weights of many slots, in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hardy.core.tensors import Tensors


@triton.jit
def _descend(
    weight, before, gradient, velocity, rounded, rate, slots, size, slot_before, decay, momentum,
    MOVING: tl.constexpr, NESTEROV: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one slot's weights. Neighbours are the same block of other slots, which may start from one tensor."""
    slot = (tl.program_id(0) % slots).to(tl.int64)
    own = tl.program_id(0) // slots * BLOCK + tl.arange(0, BLOCK)
    at, there = slot * size + own, own < size
    w = tl.load(before + slot * slot_before + own, mask=there)
    g = tl.load(gradient + at, mask=there) + decay * w
    if MOVING:
        v = momentum * tl.load(velocity + at, mask=there) + g
        tl.store(velocity + at, v, mask=there)
        g = g + momentum * v if NESTEROV else v
    w = w - tl.load(rate) * g
    tl.store(weight + at, w, mask=there)
    if ROUNDED:
        tl.store(rounded + at, w.to(rounded.dtype.element_ty), mask=there)


def descend_rounded(
    weights: Tensors,
    gradient: Tensors,
    rate: Tensor,
    rounded: Tensors,
    *,
    decay: float,
    velocity: Tensors | None,
    momentum: float,
    nesterov: bool,
    begin: Tensors,
) -> None:
    """SGD in place, and new rounded copies of the weights that have one. Weights in `begin` start from there: from one
    tensor for all slots."""
    for name, weight in weights.items():
        copy, first = rounded.get(name), begin.get(name)
        alike = copy is not None and copy.is_contiguous()
        slots = len(weight)
        slope, size = gradient[name].contiguous(), weight.numel() // slots
        _descend[(slots * triton.cdiv(size, _BLOCK),)](
            weight, weight if first is None else first.contiguous(), slope,
            velocity[name] if velocity else weight, copy if alike else weight,
            rate, slots, size, size if first is None else 0, decay, momentum,
            MOVING=velocity is not None, NESTEROV=nesterov, ROUNDED=alike, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        if copy is not None and not alike:
            _turn(weight, copy)


_BLOCK = 4096


@triton.jit
def _round_turned(weight, rounded, leaving, entering, BO: tl.constexpr, BI: tl.constexpr):
    slot = tl.program_id(2).to(tl.int64) * leaving * entering
    to, of = tl.program_id(0) * BO + tl.arange(0, BO), tl.program_id(1) * BI + tl.arange(0, BI)
    there = (to < leaving)[:, None] & (of < entering)[None, :]
    value = tl.load(weight + slot + to[:, None] * entering + of[None, :], mask=there)
    tl.store(rounded + slot + of[None, :] * leaving + to[:, None], value.to(rounded.dtype.element_ty), mask=there)


def _turn(weight: Tensor, rounded: Tensor) -> None:
    """Rounds weights [S, CO, CI, kh, kw] into a copy that lies as [S, CI, kh, kw, CO]."""
    slots, leaving = weight.shape[:2]
    entering = weight[0, 0].numel()
    assert rounded.stride(1) == 1 and weight.is_contiguous()
    _round_turned[triton.cdiv(leaving, 32), triton.cdiv(entering, 64), slots](
        weight, rounded, leaving, entering, BO=32, BI=64
    )


def round_all(weights: Tensors, names: list[str], dtype: torch.dtype) -> Tensors:
    """Rounded copies as products read them: those of a convolution lie as [S, CI, kh, kw, CO]."""
    found = {}
    for name in names:
        half = weights[name].to(dtype)
        if half.dim() == 5:
            half = half.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3)
        found[name] = half if half.data_ptr() != weights[name].data_ptr() else half.clone()
    return found
