"""Named tensors and their algebra.

Shape letters used everywhere: S slots, C clients, B bases (sub-networks; one for most methods), N examples.
Shared tensors are [B, ...], a client's own are [C, B, ...], updates are [S, ...].
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

Tensors = dict[str, Tensor]
Spans = tuple[tuple[int, int], ...]
"""columns of a matrix: first ones, and those after the last"""
ImageShape = tuple[int, ...]
"""(channel, height, width), or (features,) where inputs are plain vectors"""


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


def apply(function: Callable[[Tensor], Tensor], tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: function(tensor) for name, tensor in tensors.items()}


def select(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensors:
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
    """Copies in few launches: one for all pairs that lie alike in memory. What is its own source is left alone."""
    alike, unlike = [], []
    for to, what in zip(target, source, strict=True):
        if to.stride() != what.stride():
            unlike.append((to, what))
        elif to.data_ptr() != what.data_ptr():
            alike.append((to, what))
    for chosen in (alike, unlike):
        if chosen:
            torch._foreach_copy_([to for to, _ in chosen], [what for _, what in chosen])


def begin_at(weights: Tensors, begin: Tensors) -> None:
    """Sets some weights of a stack of slots to what all of them begin with."""
    for name, value in begin.items():
        weights[name].copy_(value)


def descend(
    weights: Tensors,
    gradient: Tensors,
    rate: Tensor | float,
    *,
    decay: float = 0.0,
    velocity: Tensors | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    up: bool = False,
) -> None:
    """A step of SGD in place, down the gradient or up it, on tensors that lie in memory without gaps."""
    names = list(weights)
    moved, slopes = [weights[name] for name in names], [gradient[name].contiguous() for name in names]
    speeds = [velocity[name] for name in names] if velocity else []
    if moved[0].dtype == torch.float32:
        torch._fused_sgd_(  # one pass over memory, where what follows takes three
            moved,
            slopes,
            speeds,
            weight_decay=decay,
            momentum=momentum,
            lr=rate,
            dampening=0.0,
            nesterov=nesterov,
            maximize=up,
            is_first_step=False,
        )
        return
    for at, (w, g) in enumerate(zip(moved, slopes, strict=True)):  # the fused kernel reads its rate as float32
        g = torch.add(-g if up else g, w, alpha=decay)
        if speeds:
            v = speeds[at].mul_(momentum).add_(g)
            g = torch.add(g, v, alpha=momentum) if nesterov else v
        w.sub_(g * rate)


def gather(tensors: Mapping[str, Tensor], *index: Tensor | int | slice) -> Tensors:
    """Rows along the leading axes."""
    return apply(lambda t: t[index], tensors)


def scatter(tensors: Mapping[str, Tensor], rows: Tensors, *index: Tensor | int) -> Tensors:
    """A copy of `tensors` with `rows` written at the index of the leading axes; names without rows are unchanged."""
    return {
        name: tensor.clone().index_put_(tuple(torch.as_tensor(i, device=tensor.device) for i in index), rows[name])
        if name in rows
        else tensor
        for name, tensor in tensors.items()
    }


def flatten(tensors: Tensors, like: Tensor) -> Tensor:
    """The floating tensors as one matrix with the rows of `like`, [S, D], in the order of their names. Where they are
    views of such a matrix already (see `unflatten`), it is that matrix: it may be as large as all updates."""
    rows = like.shape[0]
    parts = [t for _, t in sorted(tensors.items()) if t.is_floating_point()]
    whole = _viewed(parts, rows)
    if whole is not None:
        return whole
    return torch.cat([t.reshape(rows, -1) for t in parts], 1) if parts else like.new_zeros(rows, 0)


def _viewed(parts: Sequence[Tensor], rows: int) -> Tensor | None:
    """The matrix [S, D] that these are adjacent column blocks of, or None."""
    if len(parts) < 2:
        return None
    width, first = sum(part[0].numel() for part in parts), parts[0]
    at, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for part in parts:
        dense = part[0].is_contiguous() and part.stride(0) == width and part.dtype == first.dtype
        if not dense or part.storage_offset() != at or part.untyped_storage().data_ptr() != storage:
            return None
        at += part[0].numel()
    return first.as_strided((rows, width), (width, 1), first.storage_offset())


def unflatten(matrix: Tensor, like: Tensors) -> Tensors:
    """Views of a matrix with the names and trailing shapes of the floating tensors of `like`."""
    floating = {name: tensor for name, tensor in sorted(like.items()) if tensor.is_floating_point()}
    parts = torch.split(matrix, [tensor[0].numel() for tensor in floating.values()], 1)
    return {n: part.view(-1, *t.shape[1:]) for part, (n, t) in zip(parts, floating.items(), strict=True)}


def expand_trailing(scale: Tensor, like: Tensor) -> Tensor:
    """A scalar, or one number a row, shaped to multiply `like`."""
    return scale.reshape(*scale.shape, *[1] * (like.dim() - scale.dim()))


def row_lengths(rows: Tensor) -> Tensor:
    """L2, [S]."""
    found: Tensor = torch.linalg.vector_norm(rows.reshape(len(rows), -1), dim=1)
    return found


def span_lengths(rows: Tensor, spans: Spans) -> Tensor:
    """L2 of these columns together, [S]."""
    found = [row_lengths(rows[:, start:end]) for start, end in spans]
    return found[0] if len(found) == 1 else row_lengths(torch.stack(found, 1))


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
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
