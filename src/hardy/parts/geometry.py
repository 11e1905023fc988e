"""Where the updates lie: lengths, distances and blends of the rows of a matrix [S, D].

x_i update of client i, a row · x what was sent down · Δ_i = x_i − x, how far client i moved

The products ⟨Δ_i, Δ_j⟩, [S, S] in float64, hold every norm and distance. A rule turns them into weights, however often
it iterates, and the result is weights times updates: the matrix is read twice, block by block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hardy import tensors
from hardy.errors import HardyError
from hardy.messages import Updates
from hardy.parts.aggregation import Frame, largest_counters
from hardy.parts.columns import blocks
from hardy.tensors import Tensors

Weigh = Literal["samples", "uniform"]


def sent_down(updates: Updates, frame: Frame) -> Tensor:
    """x, [1, D]"""
    base = updates.slots[0].base
    return tensors.flatten(tensors.gather(frame.shared, slice(base, base + 1)), updates.weights[:1])


def changes(updates: Updates, frame: Frame) -> Iterator[Tensor]:
    """Δ in float64, block by block, each written over the one before."""
    matrix, sent = updates.matrix, sent_down(updates, frame).double()
    buffer = None
    for block in blocks(matrix):
        here = matrix[:, block]
        buffer = torch.empty_like(here, dtype=torch.float64) if buffer is None else buffer
        yield torch.sub(here, sent[:, block], out=buffer[:, : here.shape[1]])


def products_of(updates: Updates, frame: Frame) -> Tensor:
    """⟨Δ_i, Δ_j⟩, [S, S]. From where the round began, since far from there distances drown in rounding."""
    products = updates.matrix.new_zeros(len(updates.slots), len(updates.slots), dtype=torch.float64)
    for change in changes(updates, frame):
        products.addmm_(change, change.T)
    return products


def squared_distances(updates: Updates, frame: Frame) -> Tensor:
    """‖x_i − x_j‖², [S, S]"""
    products = products_of(updates, frame)
    return (products.diagonal()[:, None] + products.diagonal() - 2 * products).clamp_min(0.0)


def blend(weights: Tensor, updates: Updates, frame: Frame) -> Tensor:
    """Σ w_i x_i + (1 − Σ w_i) x, [T, S] -> [T, D]"""
    with tensors.full_precision():
        blend = weights.to(updates.matrix) @ updates.matrix
    return blend.addcmul_(1 - weights.sum(1, keepdim=True).to(blend), sent_down(updates, frame))


def named(row: Tensor, updates: Updates, frame: Frame) -> Tensors:
    """A combined row as tensors; counters take the largest value."""
    base = updates.slots[0].base
    values = tensors.gather(tensors.unflatten(row[None], updates.shared), 0)
    return values | tensors.gather(largest_counters(frame.shared, updates), base)


def shares_of(updates: Updates, weigh: Weigh) -> Tensor:
    weights = updates.weights.double() if weigh == "samples" else torch.ones_like(updates.weights, dtype=torch.float64)
    return weights / weights.sum()


@dataclass(frozen=True, kw_only=True)
class Withstands:
    """A part made for a number of liars."""

    f: int
    """f, the clients that may lie"""

    def __post_init__(self) -> None:
        if self.f < 0:
            raise HardyError(f"f is {self.f} in {self}; it must be 0 or more.")
