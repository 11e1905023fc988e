"""Who takes part: the clients, and the images or feature vectors they hold."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from hardy.errors import HardyError

Pixels = NDArray[np.uint8] | NDArray[np.float32]
"""bytes, which reach a network divided by 255, or numbers that reach it as they are"""
Labels = NDArray[np.int64]
Rows = NDArray[np.int64]
"""numbers of images"""


MOST_MEASURED = 10_000
"""clients up to which all are measured and listed"""
LISTED = 1_000
"""clients that are where there are more, and the most that files and lines of a part of all clients list"""


@dataclass(frozen=True, kw_only=True)
class Client:
    """One client: its profile and its rows of the federation's training and test inputs."""

    domain: str
    train: Rows
    validation: Rows
    test: Rows
    kind: str = ""
    """AT can afford adversarial training, ST cannot; "" where nobody said: whatever the method asks for"""
    capacity: float = 1.0
    """share of the full width it can train"""
    triggered: Rows = field(default_factory=lambda: np.zeros(0, np.int64))
    """test rows that bear a backdoor's trigger, with the target as label"""


_Made = TypeVar("_Made")


class Lazy(Sequence[_Made], Generic[_Made]):
    """A sequence whose members are made when they are asked for."""

    def __init__(self, count: int, make: Callable[[int], _Made]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[_Made]:
        return map(self._make, range(self._count))

    @overload
    def __getitem__(self, at: int) -> _Made: ...
    @overload
    def __getitem__(self, at: slice) -> list[_Made]: ...
    def __getitem__(self, at: int | slice) -> _Made | list[_Made]:
        if isinstance(at, slice):
            return [self._make(number) for number in range(*at.indices(self._count))]
        if not -self._count <= at < self._count:
            raise IndexError(at)
        return self._make(at % self._count)


class LazyClients(Lazy[Client]):
    """Clients that are functions of their number: so many that nobody looks at all of them."""

    examples: Sequence[int]
    """training rows of each"""
    sorts: Sequence[Client]
    """clients of every domain, kind, capacity and number of rows that there can be"""


def examples_of(clients: Sequence[Client]) -> Sequence[int]:
    """The training rows of each client."""
    return clients.examples if isinstance(clients, LazyClients) else [len(client.train) for client in clients]


def sorts_of(clients: Sequence[Client]) -> Sequence[Client]:
    """Clients in which every kind, capacity and number of training rows is to be found."""
    return clients.sorts if isinstance(clients, LazyClients) else clients


def each_of(clients: Sequence[Client], get: Callable[[Client], _Made]) -> Sequence[_Made]:
    """A fact of each client."""
    if isinstance(clients, LazyClients):
        return Lazy(len(clients), lambda number: get(clients[number]))
    return [get(client) for client in clients]


@dataclass(frozen=True, kw_only=True)
class Federation:
    """The inputs of all domains in one array, and the clients who hold them.

    Images are [image, channel, height, width], bytes or float32 in [0, 1]; feature vectors are float32 [row, feature].
    """

    name: str
    classes: tuple[str, ...]
    x_train: Pixels
    y_train: Labels
    x_test: Pixels
    y_test: Labels
    clients: Sequence[Client]
    bounded: bool = True
    """whether inputs are in [0, 1], where attacks must stay"""
    held_out: tuple[Client, ...] = ()
    """domains that nobody trains on: their test rows, and training rows whose labels nobody looks at"""
    sample: tuple[int, ...] | None = None
    """numbers of the clients that are measured and listed, where these are not all"""

    def __post_init__(self) -> None:
        for x, y, name in ((self.x_train, self.y_train, "training"), (self.x_test, self.y_test, "test")):
            if x.dtype not in (np.uint8, np.float32) or x.ndim not in (2, 4) or len(x) != len(y):
                raise HardyError(
                    f"{name} inputs are {x.dtype} {x.shape} with {len(y)} labels; they must be uint8 or float32, "
                    "[image, channel, height, width] or [row, feature], with a label each. hardy.arrays makes "
                    "them from other arrays."
                )
            if len(y) and not 0 <= y.min() <= y.max() < len(self.classes):
                raise HardyError(
                    f"{name} labels run from {y.min()} to {y.max()}; there are {len(self.classes)} classes."
                )
        for number, client in enumerate(() if isinstance(self.clients, LazyClients) else self.clients):
            held = (
                (client.train, self.y_train),
                (client.validation, self.y_train),
                (client.test, self.y_test),
                (client.triggered, self.y_test),
            )
            for rows, y in held:
                if len(rows) and not 0 <= rows.min() <= rows.max() < len(y):
                    raise HardyError(f"client {number} holds row {rows.max()}, but there are only {len(y)} rows.")
            if not len(client.train):
                raise HardyError(f"client {number} holds no training row; it needs 1.")

    def __repr__(self) -> str:
        domains = len({client.domain for client in sorts_of(self.clients)})
        kind = "images" if len(self.shape) == 3 else "feature vectors"
        return (
            f"Federation {self.name!r}: {len(self.clients)} clients in {domains} domains, {len(self.x_train):,} "
            f"training and {len(self.x_test):,} test {kind} {self.shape}, {len(self.classes)} classes"
        )

    @property
    def measured(self) -> Sequence[int]:
        """The numbers of the clients that figures are given of."""
        return range(len(self.clients)) if self.sample is None else self.sample

    @cached_property
    def profiles(self) -> Sequence[Client]:
        """These clients."""
        return self.clients if self.sample is None else [self.clients[number] for number in self.sample]

    @property
    def listed(self) -> list[int]:
        """Which of the measured ones are listed in files and lines, by their places: all, or so many of more."""
        count = len(self.measured)
        if self.sample is None or count <= LISTED:
            return list(range(count))
        chosen: list[int] = np.linspace(0, count - 1, LISTED).astype(np.int64).tolist()
        return chosen

    @property
    def shape(self) -> tuple[int, ...]:
        """(channel, height, width), or (features,)"""
        return self.x_train.shape[1:]


def affordable(capacity: float, unit: float) -> int:
    """⌊R/r⌋: how many networks of width `unit` fit into a capacity. 0.3 / 0.1, a hair below 3, counts as 3."""
    return int(capacity / unit + 1e-9)
