"""The middle of each column of a matrix [S, D], one row an update.

Working copies are cut into blocks of columns (`_MIB`), so memory beyond the updates does not grow with the model.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

_MIB = {"cpu": 4, "cuda": 512}
"""working copy of one block of columns: on the CPU it should stay in the cache, on a GPU outlast a kernel's launch"""
_NETWORK = {"cpu": 32, "cuda": 64}
"""updates up to which comparing whole rows beats sorting columns"""


_ALONE = 32767
"""numbers up to which torch leaves an operation to one thread, so that each thread can take a block of its own"""


def column_blocks(matrix: Tensor, most: int | None = None) -> list[slice]:
    """Columns in pieces of `_MIB`, or of so many at most."""
    width = max(1, _MIB[matrix.device.type] * 2**20 // (len(matrix) * matrix.element_size()))
    width = min(width, most or width)
    return [slice(first, first + width) for first in range(0, matrix.shape[1], width)]


def middle_mean(matrix: Tensor, trim: int) -> Tensor:
    """The mean of each column without its `trim` smallest and largest values, [S, D] -> [D]."""
    if len(matrix) <= _NETWORK[matrix.device.type]:
        return _by_network(matrix, trim)
    return _by_sorting_on_cpu(matrix, trim) if matrix.device.type == "cpu" else _by_sorting(matrix, trim)


def weighted_median(matrix: Tensor, weights: Tensor) -> Tensor:
    """The value of each column with half of the weight on either side, [S, D] -> [D]; where it ends between two, their
    mean.

    >>> column = torch.tensor([[1.0], [2.0], [9.0]])
    >>> weighted_median(column, torch.tensor([1.0, 1.0, 3.0])), weighted_median(column, torch.tensor([2.0, 1.0, 3.0]))
    (tensor([9.]), tensor([5.5000]))
    """
    half = weights.sum() / 2
    near = half * 1e-9  # sums of weights are rounded

    def middle(values: Tensor, sorted_weights: Tensor) -> Tensor:
        until = sorted_weights.cumsum(0)
        counts = (until >= half - near) & (until - sorted_weights <= half + near) & (sorted_weights > 0)
        return torch.where(counts, values, 0.0).sum(0) / counts.sum(0)

    return _by_sorted_columns(matrix, weights, middle)


def weighted_trimmed_mean(matrix: Tensor, weights: Tensor, trim: Tensor) -> Tensor:
    """The weighted mean of each column without the weight `trim` at either end, [S, D] -> [D].

    Of the weights 1, 2, 1 in the order of the values, a trim of 1.5 leaves half of the second and half of the third
    quarter, both of the value in the middle:
    >>> column = torch.tensor([[1.0], [2.0], [9.0]])
    >>> weighted_trimmed_mean(column, torch.tensor([1.0, 2.0, 1.0]), torch.tensor(1.5))
    tensor([2.])
    """
    most = weights.sum() - trim

    def middle(values: Tensor, sorted_weights: Tensor) -> Tensor:
        until = sorted_weights.cumsum(0)
        kept = until.clamp(trim, most) - (until - sorted_weights).clamp(trim, most)
        return (values * kept).sum(0) / kept.sum(0)

    return _by_sorted_columns(matrix, weights, middle)


def _by_sorted_columns(matrix: Tensor, weights: Tensor, middle: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    found, each = matrix.new_empty(matrix.shape[1]), weights.double()
    for block in column_blocks(matrix):
        values, order = matrix[:, block].sort(0)
        found[block] = middle(values.double(), each[order]).to(found)
    return found


def _by_network(matrix: Tensor, trim: int) -> Tensor:
    """Compares whole rows, elementwise: no gather, no branch, and nearly at the speed of memory."""
    count, middle = len(matrix), matrix.new_empty(matrix.shape[1])

    def sum_middle(block: slice) -> None:
        *rows, spare = torch.cat([matrix[:, block], matrix[:1, block]]).unbind()
        for low, high, least, greatest in _network(count, trim):
            if least and greatest:
                torch.minimum(rows[low], rows[high], out=spare)
                torch.maximum(rows[low], rows[high], out=rows[high])
                rows[low], spare = spare, rows[low]
            elif least:
                torch.minimum(rows[low], rows[high], out=rows[low])
            else:
                torch.maximum(rows[low], rows[high], out=rows[high])
        total = rows[trim]
        for row in rows[trim + 1 : count - trim]:
            total += row
        torch.div(total, count - 2 * trim, out=middle[block])

    if matrix.device.type == "cpu":
        _by_threads(sum_middle, column_blocks(matrix, _ALONE))
    else:
        for block in column_blocks(matrix):
            sum_middle(block)
    return middle


def _by_threads(work: Callable[[slice], None], pieces: list[slice]) -> None:
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(work, pieces))


@cache
def _network(count: int, trim: int) -> tuple[tuple[int, int, bool, bool], ...]:
    """Batcher's odd-even merge sort without what the sum of the middle rows does not need.

    (low, high, is the smaller value needed, is the greater one), in order. Going backwards, a comparison is left out
    while both of its rows are thrown away, or both only summed.
    """
    compared, merged = [], 1
    while merged < count:
        stride = merged
        while stride:
            for first in range(stride % merged, count - stride, 2 * stride):
                for low in range(first, min(first + stride, count - stride)):
                    if low // (2 * merged) == (low + stride) // (2 * merged):
                        compared.append((low, low + stride))
            stride //= 2
        merged *= 2
    fate = ["summed" if trim <= row < count - trim else "dropped" for row in range(count)]
    kept = []
    for low, high in reversed(compared):
        if fate[low] != fate[high] or fate[low] == "compared":
            kept.append((low, high, fate[low] != "dropped", fate[high] != "dropped"))
            fate[low] = fate[high] = "compared"
    return tuple(reversed(kept))


def _by_sorting(matrix: Tensor, trim: int) -> Tensor:
    keep, middle = slice(trim, len(matrix) - trim), matrix.new_empty(matrix.shape[1])
    for block in column_blocks(matrix):
        torch.mean(matrix[:, block].sort(0).values[keep], 0, out=middle[block])
    return middle


def _by_sorting_on_cpu(matrix: Tensor, trim: int) -> Tensor:
    """numpy sorts short contiguous rows ten times as fast as torch sorts columns, and lets other threads run."""
    keep, middle = slice(trim, len(matrix) - trim), matrix.new_empty(matrix.shape[1])
    short = matrix.dtype == torch.bfloat16  # numpy has none; a float32 holds it exactly

    def sort(block: slice) -> None:
        values = matrix[:, block].float() if short else matrix[:, block]
        columns = np.ascontiguousarray(values.numpy().T)
        columns.sort(axis=1)
        middle[block] = torch.from_numpy(columns[:, keep].mean(axis=1))

    _by_threads(sort, column_blocks(matrix))
    return middle
