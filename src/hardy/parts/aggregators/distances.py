"""Where the updates lie: lengths, distances and blends of the rows of a matrix [S, D].

x_i update of client i, a row · x what was sent down · Δ_i = x_i − x, how far client i moved

The products ⟨Δ_i, Δ_j⟩, [S, S] in float64, hold every norm and distance. A rule turns them into weights, however often
it iterates, and the result is weights times updates: the matrix is read twice, block by block.

Ties: where a rule has to choose between updates that are equally good (to 30 bits, since sums are rounded), it takes
the one with the smaller key, a weighted sum of its change. Equal updates have equal keys, and it makes no difference
which of them is taken, so the choice does not depend on the order of the clients.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hardy.core import tensors
from hardy.core.messages import Updates
from hardy.core.partition import Role
from hardy.core.protocols import RoundContext
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.parts.aggregators.base import largest_counters
from hardy.parts.aggregators.columns import column_blocks

Weigh = Literal["samples", "uniform"]
STEPPED = frozenset({Role.WEIGHT, Role.NORM_AFFINE})
"""tensors that training moves step by step, whose changes have a length and a direction; others are statistics"""


def sent_down(updates: Updates, context: RoundContext) -> Tensor:
    """x, [1, D]"""
    base = updates.slots[0].base
    return tensors.flatten(tensors.gather(context.shared, slice(base, base + 1)), updates.weights[:1])


def changes(updates: Updates, context: RoundContext) -> Iterator[Tensor]:
    """Δ in float64, block by block, each written over the one before."""
    matrix, sent = updates.matrix, sent_down(updates, context).double()
    buffer = None
    for block in column_blocks(matrix):
        here = matrix[:, block]
        buffer = torch.empty_like(here, dtype=torch.float64) if buffer is None else buffer
        yield torch.sub(here, sent[:, block], out=buffer[:, : here.shape[1]])


def move_lengths(updates: Updates, context: RoundContext) -> Tensor:
    """‖Δ_i‖, [S, 1]"""
    squares = updates.matrix.new_zeros(len(updates.slots), 1, dtype=torch.float64)
    for change in changes(updates, context):
        squares += change.square_().sum(1, keepdim=True)
    return squares.sqrt()


def products_of(updates: Updates, context: RoundContext) -> Tensor:
    """⟨Δ_i, Δ_j⟩, [S, S]. From where the round began, since far from there distances drown in rounding."""
    products = updates.matrix.new_zeros(len(updates.slots), len(updates.slots), dtype=torch.float64)
    for change in changes(updates, context):
        products.addmm_(change, change.T)
    return products


def squared_distances(updates: Updates, context: RoundContext) -> tuple[Tensor, Tensor]:
    """‖x_i − x_j‖², [S, S], and the keys that break ties, [S]"""
    products = updates.matrix.new_zeros(len(updates.slots), len(updates.slots), dtype=torch.float64)
    keys, first = products.new_zeros(len(products)), 1
    for change in changes(updates, context):
        products.addmm_(change, change.T)
        numbers = torch.arange(first, first + change.shape[1], dtype=torch.float64, device=keys.device)
        keys.addmv_(change, numbers.cos())
        first += change.shape[1]
    return (products.diagonal()[:, None] + products.diagonal() - 2 * products).clamp_min(0.0), keys


def smallest(scores: Tensor, keys: Tensor, count: int) -> Tensor:
    """The places of the smallest scores along the last axis, [..., S] -> [..., count]; ties go by the keys."""
    by_key = keys.argsort()
    return by_key[rounded(scores)[..., by_key].argsort(dim=-1, stable=True)[..., :count]]


def rounded(values: Tensor) -> Tensor:
    """To 30 bits: what differs by less differs by the rounding of a sum."""
    mantissa, exponent = torch.frexp(values)
    return torch.where(values.isfinite(), torch.ldexp((mantissa * 2.0**30).round(), exponent - 30), values)


def blend(weights: Tensor, updates: Updates, context: RoundContext) -> Tensor:
    """Σ w_i x_i + (1 − Σ w_i) x, [T, S] -> [T, D]"""
    with tensors.full_precision():
        blend = weights.to(updates.matrix) @ updates.matrix
    return blend.addcmul_(1 - weights.sum(1, keepdim=True).to(blend), sent_down(updates, context))


def as_tensors(row: Tensor, updates: Updates, context: RoundContext) -> Tensors:
    """A combined row as tensors; counters take the largest value."""
    base = updates.slots[0].base
    values = tensors.gather(tensors.unflatten(row[None], updates.shared), 0)
    return values | tensors.gather(largest_counters(context.shared, updates), base)


def shares_of(updates: Updates, weigh: Weigh) -> Tensor:
    weights = updates.weights.double() if weigh == "samples" else torch.ones_like(updates.weights, dtype=torch.float64)
    return weights / weights.sum()


def first_of(weights: Tensor, mass: Tensor) -> Tensor:
    """How much of each weight is among the first `mass` of its row, [..., S] -> [..., S].

    >>> first_of(torch.tensor([3.0, 1.0, 2.0]), torch.tensor(3.5))
    tensor([3.0000, 0.5000, 0.0000])
    """
    until = weights.cumsum(-1)
    return until.minimum(mass) - (until - weights).minimum(mass)


@dataclass(frozen=True, kw_only=True)
class ToleratesByzantine:
    """A part made for a number of liars."""

    f: int
    """f, the clients that may lie"""

    def __post_init__(self) -> None:
        if self.f < 0:
            raise HardyError(f"f is {self.f} in {self}; it must be 0 or more.")


class Weights(NamedTuple):
    """The weights of some updates, as a rule for f liars sees them."""

    each: Tensor
    """w, [S]"""
    total: Tensor
    """W"""
    hostile: Tensor
    """F, the weight of the f heaviest: no f liars have more"""
    lightest: Tensor
    """u"""


@dataclass(frozen=True, kw_only=True)
class ToleratesWeight(ToleratesByzantine):
    """A part made for a number of liars that may weigh its updates: a client of weight w counts like w clients.

    Whoever the f liars are, they weigh F at most, which is what the f heaviest weigh. F takes the place of f, the whole
    weight W that of n, and the lightest weight u that of one client. A part that needs n ≥ 2f + k needs W ≥ 2F + k u.
    """

    weigh: Weigh = "uniform"
    """uniform: all updates count the same; samples: by their weights, and f liars may be the f heaviest clients"""
    spare: ClassVar[int] = 1
    """k"""

    @property
    def least(self) -> int:
        """2f + k, the updates it needs."""
        return 2 * self.f + self.spare

    def weights(self, given: Tensor) -> Weights:
        each = given.double() if self.weigh == "samples" else torch.ones_like(given, dtype=torch.float64)
        lightest = torch.where(each > 0, each, torch.inf).min()
        return Weights(each, each.sum(), each.topk(min(self.f, len(each))).values.sum(), lightest)

    def tolerates(self, weights: Tensor) -> bool:
        if len(weights) < self.least or self.weigh == "uniform":
            return len(weights) >= self.least
        _, total, hostile, lightest = self.weights(weights)
        return bool(total * (1 + 1e-9) >= 2 * hostile + self.spare * lightest)
