"""Which engine runs an experiment: a rule of device, network and batch. The same command gives the same bits."""

from dataclasses import dataclass
from typing import Literal

import torch

from hardy.core.method import Plan
from hardy.core.training import Training
from hardy.engines.base import Engine
from hardy.engines.device_data import DeviceData, Precision
from hardy.engines.sequential import Sequential
from hardy.engines.vectorised import Vectorised
from hardy.errors import HardyError
from hardy.models.count import macs

ENGINES: dict[str, type[Engine]] = {"sequential": Sequential, "vectorised": Vectorised}
_SMALL_STEP = 20_000_000
"""multiply-accumulates of a forward pass over a batch up to which a CPU gains by running slots together: the calls cost
more than the arithmetic (benchmarks/results/auto_cpu-2-cores)"""


def choose(plan: Plan, data: DeviceData, training: Training) -> type[Engine]:
    """Vectorised on a GPU, and on a CPU for steps so small that calling costs more than computing; else sequential."""
    if data.device.type == "cuda":
        return Vectorised
    step = training.batch * macs(plan.model, data.federation.shape)
    return Vectorised if step <= _SMALL_STEP else Sequential


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """`[engine]`: how and where the work is done."""

    name: Literal["auto", "sequential", "vectorised", "flower"] = "auto"
    """auto chooses by device, network and batch size: vectorised on a GPU and for small steps, else sequential"""
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
        if self.lane is not None and self.name not in ("auto", "vectorised"):
            raise HardyError(f"engine.lane is {self.lane}, but engine {self.name} has no lanes. Leave it out.")

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
        """The engine asked for, or the one the rule chooses."""
        if self.name == "flower":
            raise HardyError("engine flower needs a network: `hardy run --engine flower`, or see docs/flower.md.")
        kind = choose(plan, data, training) if self.name == "auto" else ENGINES[self.name]
        return kind(plan, data, training, seed=seed, lane=self.lane)
