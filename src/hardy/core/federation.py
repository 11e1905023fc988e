"""Who takes part: the clients, and the images or feature vectors they hold."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hardy.errors import HardyError

Pixels = NDArray[np.uint8] | NDArray[np.float32]
"""bytes, which reach a network divided by 255, or numbers that reach it as they are"""
Labels = NDArray[np.int64]
Rows = NDArray[np.int64]
"""numbers of images"""


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
    clients: tuple[Client, ...]
    bounded: bool = True
    """whether inputs are in [0, 1], where attacks must stay"""
    held_out: tuple[Client, ...] = ()
    """domains that nobody trains on: their test rows, and training rows whose labels nobody looks at"""

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
        for number, client in enumerate(self.clients):
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
        domains = len({client.domain for client in self.clients})
        kind = "images" if len(self.shape) == 3 else "feature vectors"
        return (
            f"Federation {self.name!r}: {len(self.clients)} clients in {domains} domains, {len(self.x_train):,} "
            f"training and {len(self.x_test):,} test {kind} {self.shape}, {len(self.classes)} classes"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """(channel, height, width), or (features,)"""
        return self.x_train.shape[1:]


def affordable(capacity: float, unit: float) -> int:
    """⌊R/r⌋: how many networks of width `unit` fit into a capacity. 0.3 / 0.1, a hair below 3, counts as 3."""
    return int(capacity / unit + 1e-9)
