"""Named tensors and their algebra.

Shape letters used everywhere: S slots, C clients, B bases (sub-networks; one for most methods), N examples.
Shared tensors are [B, ...], a client's own are [C, B, ...], updates are [S, ...].
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

Tensors = dict[str, Tensor]


def send(values: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """Onto a device without waiting for the work already queued there."""
    here = torch.as_tensor(values)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def send_all(numbers: Sequence[ArrayLike], device: torch.device) -> list[Tensor]:
    """Whole numbers of any shapes onto a device in one copy."""
    arrays = [np.asarray(some, np.int64) for some in numbers]
    flat = send(torch.from_numpy(np.concatenate([array.ravel() for array in arrays])), device)
    parts = torch.split(flat, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def apply(function: Callable[[Tensor], Tensor], tensors: Tensors) -> Tensors:
    return {name: function(tensor) for name, tensor in tensors.items()}


def select(tensors: Tensors, names: Iterable[str]) -> Tensors:
    return {name: tensors[name] for name in names}


def stack(rows: Sequence[Tensors]) -> Tensors:
    """One [S, ...] tensor a name out of S rows."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}


def concatenate(parts: Sequence[Tensors]) -> Tensors:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


def repeat(tensors: Tensors, *counts: int) -> Tensors:
    """The same values on new leading axes."""
    return apply(lambda t: t.expand(*counts, *t.shape).clone(), tensors)


def copies(tensors: Tensors) -> Tensors:
    """Tensors of their own with the same values, without gaps."""
    fresh = apply(lambda t: torch.empty_like(t, memory_format=torch.contiguous_format), tensors)
    copy(list(fresh.values()), list(tensors.values()))
    return fresh


def copy(target: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Copies in few launches: one for all pairs that lie alike in memory."""
    pairs = list(zip(target, source, strict=True))
    for alike in (True, False):
        if chosen := [(to, what) for to, what in pairs if (to.stride() == what.stride()) is alike]:
            torch._foreach_copy_([to for to, _ in chosen], [what for _, what in chosen])


def gather(tensors: Tensors, *index: Tensor | int | slice) -> Tensors:
    """Rows along the leading axes."""
    return apply(lambda t: t[index], tensors)


def scatter(tensors: Tensors, rows: Tensors, *index: Tensor | int) -> Tensors:
    """A copy of `tensors` with `rows` written at the index of the leading axes; names without rows are unchanged."""
    return {
        name: tensor.clone().index_put_(tuple(torch.as_tensor(i, device=tensor.device) for i in index), rows[name])
        if name in rows
        else tensor
        for name, tensor in tensors.items()
    }


def flatten(tensors: Tensors, like: Tensor) -> Tensor:
    """The floating tensors as one matrix with the rows of `like`, [S, D], in the order of their names."""
    rows = like.shape[0]
    flat = [t.reshape(rows, -1) for _, t in sorted(tensors.items()) if t.is_floating_point()]
    return torch.cat(flat, 1) if flat else like.new_zeros(rows, 0)


def unflatten(matrix: Tensor, like: Tensors) -> Tensors:
    """Views of a matrix with the names and trailing shapes of the floating tensors of `like`."""
    floating = {name: tensor for name, tensor in sorted(like.items()) if tensor.is_floating_point()}
    parts = torch.split(matrix, [tensor[0].numel() for tensor in floating.values()], 1)
    return {n: part.view(-1, *t.shape[1:]) for part, (n, t) in zip(parts, floating.items(), strict=True)}


def over(scale: Tensor, like: Tensor) -> Tensor:
    """A scalar, or one number a row, shaped to multiply `like`."""
    return scale.reshape(*scale.shape, *[1] * (like.dim() - scale.dim()))


def shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def count_bytes(tensors: Tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


@contextmanager
def full_precision() -> Iterator[None]:
    """Sums of models are exact to float32: no TF32 rounding inside."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
