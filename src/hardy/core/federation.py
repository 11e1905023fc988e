"""Who takes part: the clients, and the images they hold."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hardy.errors import HardyError

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]
Rows = NDArray[np.int64]
"""numbers of images"""


@dataclass(frozen=True, kw_only=True)
class Client:
    """One client: its profile and its rows of the federation's training and test images."""

    domain: str
    train: Rows
    validation: Rows
    test: Rows
    kind: str = ""
    """AT can afford adversarial training, ST cannot; "" where nobody said: whatever the method asks for"""
    capacity: float = 1.0
    """share of the full width it can train"""


@dataclass(frozen=True, kw_only=True)
class Federation:
    """The images of all domains in one array, [image, channel, height, width], and the clients who hold them."""

    name: str
    classes: tuple[str, ...]
    x_train: Pixels
    y_train: Labels
    x_test: Pixels
    y_test: Labels
    clients: tuple[Client, ...]

    def __post_init__(self) -> None:
        for x, y, name in ((self.x_train, self.y_train, "training"), (self.x_test, self.y_test, "test")):
            if x.dtype != np.uint8 or x.ndim != 4 or len(x) != len(y):
                raise HardyError(
                    f"{name} images are {x.dtype} {x.shape} with {len(y)} labels; they must be uint8 "
                    "[image, channel, height, width] with a label each. hardy.arrays makes them from other arrays."
                )
            if len(y) and not 0 <= y.min() <= y.max() < len(self.classes):
                raise HardyError(
                    f"{name} labels run from {y.min()} to {y.max()}; there are {len(self.classes)} classes."
                )
        for number, client in enumerate(self.clients):
            held = ((client.train, self.y_train), (client.validation, self.y_train), (client.test, self.y_test))
            for rows, y in held:
                if len(rows) and not 0 <= rows.min() <= rows.max() < len(y):
                    raise HardyError(f"client {number} holds row {rows.max()}, but there are only {len(y)} rows.")
            if not len(client.train):
                raise HardyError(f"client {number} holds no training row; it needs 1.")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channel, height, width)"""
        channel, height, width = self.x_train.shape[1:]
        return channel, height, width


def affordable(capacity: float, unit: float) -> int:
    """⌊R/r⌋: how many networks of width `unit` fit into a capacity. 0.3 / 0.1, a hair below 3, counts as 3."""
    return int(capacity / unit + 1e-9)
