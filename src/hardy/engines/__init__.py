"""Engines: the same round, run one slot after another, many at once, or over a network."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from hardy.core import tensors
from hardy.core.client import Training
from hardy.core.messages import Slot, Work
from hardy.core.method import Plan
from hardy.core.partition import Placement
from hardy.engines.base import DeviceData, Engine, Precision
from hardy.engines.sequential import Sequential
from hardy.engines.vectorised import Vectorised
from hardy.errors import HardyError

_SLOTS = 16
"""slots of a timed turn"""
ENGINES: dict[str, type[Engine]] = {"sequential": Sequential, "vectorised": Vectorised}


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """`[engine]`: how and where the work is done."""

    name: Literal["auto", "sequential", "vectorised", "flower"] = "auto"
    device: str = "auto"
    """auto, cpu or cuda (cuda:1, ...)"""
    precision: Precision = "tf32"
    """float32, float64, tf32 (float32 with TF32 matrix products where the device has them), or bfloat16 (training steps
    in mixed precision; weights, statistics and evaluation as with tf32)"""
    lane: int | None = None
    """slots in one call of the vectorised engine; absent: as many as fit"""

    def __post_init__(self) -> None:
        if self.lane is not None and self.lane < 1:
            raise HardyError(f"engine.lane is {self.lane}; it must be 1 or more, or absent.")

    def find_device(self) -> torch.device:
        cuda = torch.cuda.is_available()
        if self.device == "auto":
            return torch.device("cuda" if cuda else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise HardyError(f"unknown device {self.device!r}. Known: auto, cpu, cuda, cuda:N.") from error
        if device.type not in ("cpu", "cuda"):
            raise HardyError(f"unknown device {self.device!r}. Known: auto, cpu, cuda, cuda:N.")
        if device.type == "cuda" and (not cuda or (device.index or 0) >= torch.cuda.device_count()):
            raise HardyError(
                f"device {self.device!r} is not there ({torch.cuda.device_count()} GPUs seen); use cpu or auto."
            )
        return device

    def make(self, plan: Plan, data: DeviceData, training: Training, *, seed: int) -> Engine:
        """The engine asked for; `auto` lets both work in turns and takes the faster."""
        if self.name == "flower":
            raise HardyError("engine flower needs a network: `hardy run --engine flower`, or see docs/flower.md.")
        kinds = list(ENGINES.values()) if self.name == "auto" else [ENGINES[self.name]]
        engines = [kind(plan, data, training, seed=seed, lane=self.lane) for kind in kinds]
        return engines[0] if len(engines) == 1 else fastest(engines)


def fastest(engines: Sequence[Engine], *, turns: int = 5, budget: float = 6.0) -> Engine:
    """The engine with the quickest turn. Turns alternate, so that a busy moment falls on all; they are as long as a
    round's own steps, or as a fifth of the budget allows."""
    began, first = time.perf_counter(), engines[0]
    local = len(first.batches(0, 0))
    once = seconds_per_slot(first, slots=1, steps=1)
    steps = max(1, min(local, int(budget / 5 / once / min(_SLOTS, len(first.train_rows)))))
    best = dict.fromkeys(engines, float("inf"))
    for turn in range(turns):
        if turn and first.device.type != "cuda" and time.perf_counter() - began > budget:
            break
        for engine in engines:
            best[engine] = min(best[engine], seconds_per_slot(engine, steps=steps))
    return min(engines, key=lambda engine: best[engine])


def seconds_per_slot(engine: Engine, *, slots: int = _SLOTS, steps: int = 2) -> float:
    """The measured time of a slot's local steps in a round like the run's own, leaving the engine as it was."""
    plan, training, store = engine.plan, engine.training, engine.store
    bases = plan.method.budget.bases
    work = Work(
        round=0,
        rate=0.0,
        slots=[Slot(i % len(engine.train_rows), i % bases) for i in range(min(slots, len(engine.train_rows) * bases))],
        shared=engine.cast(plan.first(Placement.SHARED, bases)),
        reported=engine.cast(plan.first(Placement.REPORTED, len(engine.data.clients), bases)),
    )
    try:
        engine.training = replace(training, steps=steps)
        engine.store = tensors.apply(torch.clone, store)
        _synchronise(engine.device)
        began = time.perf_counter()
        for _ in engine.train(work):
            pass
        _synchronise(engine.device)
        return (time.perf_counter() - began) / len(work.slots)
    finally:
        engine.training, engine.store = training, store


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


__all__ = [
    "ENGINES",
    "DeviceData",
    "Engine",
    "EngineChoice",
    "Sequential",
    "Vectorised",
    "fastest",
    "seconds_per_slot",
]
