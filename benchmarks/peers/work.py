"""The work every framework is given, with torch and numpy alone: sizes, data, network, and how a run reports."""

import json
import os
import sys
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

SMOKE = "--smoke" in sys.argv
CLIENTS, IMAGES, COHORT, BATCH, RATE = (4, 20, 2, 10, 0.1) if SMOKE else (50, 50, 10, 10, 0.1)
WARM_UP, ROUNDS = (1, 2) if SMOKE else (2, int(os.environ.get("PEERS_ROUNDS", "20")))
STEPS = COHORT * IMAGES // BATCH
"""SGD steps a round: one local epoch of every client of the cohort"""


@cache
def pixels() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Noisy copies of one picture a class, [image, channel, height, width]: enough for a loss to fall."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, CLIENTS * IMAGES)
    pictures = rng.normal(128, 64, (10, 3, 28, 28))
    return (pictures[labels] + rng.normal(0, 32, (len(labels), 3, 28, 28))).clip(0, 255).astype(np.uint8), labels


@cache
def tensors() -> tuple[Tensor, Tensor]:
    x, y = pixels()
    return torch.from_numpy(x).float().div_(255), torch.from_numpy(y)


def client(number: int) -> tuple[Tensor, Tensor]:
    rows = slice(number * IMAGES, (number + 1) * IMAGES)
    x, y = tensors()
    return x[rows], y[rows]


def net() -> nn.Module:
    """Hardy's tiny_cnn without norms (pfl refuses batch norm): 21 k parameters, the same for everybody."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def epoch(model: nn.Module, x: Tensor, y: Tensor) -> int:
    """One local epoch as anybody would write it; returns its steps."""
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    batches = torch.randperm(len(y)).split(BATCH)
    for rows in batches:
        optimiser.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()
    return len(batches)


class Run:
    """A contestant's side: `lap()` before the first round and after every one, then `report`."""

    def __init__(self) -> None:
        self.out, self.option = Path(sys.argv[1]), sys.argv[2]
        self.laps: list[float] = []
        self.busy: list[float] = []
        """CPU seconds of this process so far, which other work on the machine adds little to"""

    def lap(self) -> None:
        self.laps.append(time.monotonic())
        self.busy.append(time.process_time())

    def report(self, *, steps: int, model: nn.Module, packages: tuple[str, ...] = (), **more: Any) -> None:
        with torch.no_grad():
            x, y = tensors()
            loss = F.cross_entropy(model(x), y).item()
        versions = {name: version(name) for name in ("torch", *packages)}
        found = {"laps": self.laps, "busy": self.busy, "steps": steps, "loss": loss, "versions": versions, **more}
        self.out.write_text(json.dumps(found), encoding="utf-8")
