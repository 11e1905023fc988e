"""Named tensors and their algebra.

Shape letters used everywhere: S slots, C clients, B bases (sub-networks; one for most methods), N examples.
Shared tensors are [B, ...], a client's own are [C, B, ...], updates are [S, ...].
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


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


def gather(tensors: Tensors, *index: Tensor | int) -> Tensors:
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


def finite(tensors: Tensors, rows: int, device: torch.device) -> Tensor:
    """Which rows hold only finite numbers, [S]."""
    sums = [t.flatten(1).sum(1) for t in tensors.values() if t.is_floating_point()]
    return torch.stack([torch.isfinite(s) for s in sums]).all(0) if sums else torch.ones(rows, device=device) > 0


def distance(rows: Tensors, origin: Tensors) -> Tensor:
    """The L2 distance of each row from its origin, over all floating tensors, [S]."""
    squares = [(t - origin[n]).flatten(1).square().sum(1) for n, t in rows.items() if t.is_floating_point()]
    return torch.stack(squares).sum(0).sqrt()


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
