"""Which engine runs an experiment: a rule of device, threads, network and batch. The same command gives the same
bits."""

import logging
import warnings
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor, nn

from hardy.core import tensors
from hardy.core.disk_store import DiskStore
from hardy.core.method import Plan
from hardy.core.modes import drawing_layer
from hardy.core.net import Net
from hardy.core.partition import Placement
from hardy.core.protocols import name_part
from hardy.core.store import ClientStore, MemoryStore
from hardy.core.tensors import Tensors
from hardy.core.training import Training
from hardy.engines.base import Engine
from hardy.engines.device_data import DeviceData, Precision
from hardy.engines.process_group import TIMEOUT
from hardy.engines.sequential import Sequential
from hardy.engines.vectorised import Vectorised, vmap
from hardy.errors import HardyError
from hardy.models.count import macs, parameters

_LOG = logging.getLogger("hardy")
_MANY, _MUCH = 10_000, 256 * 2**20
"""clients, and bytes of their tensors, above which these lie on disk"""
ENGINES: dict[str, type[Engine]] = {"sequential": Sequential, "vectorised": Vectorised}


def small_layer(threads: int) -> tuple[float, float]:
    """Multiply-accumulates of a layer on a batch, and weights of a layer, up to which a CPU gains by running slots
    together (benchmarks/auto.py). With one thread only where calls cost more than arithmetic and the weights of many
    slots fit into the caches; several threads share one large product better than many small ones."""
    return (800_000, 300_000) if threads == 1 else (20_000_000, inf)


def choose(plan: Plan, data: DeviceData, training: Training) -> type[Engine]:
    """Vectorised on a GPU, on a CPU for small layers, and wherever a norm ties clients together; else sequential."""
    if data.device.type == "cuda" or plan.synchronised:
        return Vectorised
    small = zip(layer_size(plan, data, training), small_layer(torch.get_num_threads()), strict=True)
    return Vectorised if all(size <= limit for size, limit in small) else Sequential


def layer_size(plan: Plan, data: DeviceData, training: Training) -> tuple[float, float]:
    """Multiply-accumulates of a linear layer or convolution in a forward pass over a batch, and its weights, on
    average."""
    layers = max(1, sum(isinstance(layer, nn.Linear | nn.Conv2d) for layer in plan.model.modules()))
    return training.batch * macs(plan.model, data.federation.shape) / layers, parameters(plan.model) / layers


def why_not_vectorised(plan: Plan, data: DeviceData) -> str:
    """What keeps the network from running for many slots at once, found by a dry run of two; empty: nothing."""
    if layer := drawing_layer(plan.model):
        return (
            f"{layer} draws random numbers by itself, as F.dropout does (hardy.models.Dropout draws one mask for each "
            "client)"
        )
    held = tensors.stack([plan.start, plan.start])
    trained, buffers = tensors.select(held, plan.trained), tensors.select(held, plan.buffers)
    like = next(iter(trained.values()))
    model = plan.model.to(like.device, like.dtype)
    noise = torch.Generator().manual_seed(0)
    x = torch.rand(2, 3, *data.federation.shape, generator=noise).to(like.device, like.dtype)
    keys = torch.arange(2, device=like.device)

    def loss(trained: Tensors, buffers: Tensors, x: Tensor, key: Tensor) -> Tensor:
        return Net(model, trained, buffers)(x, statistics="batch", key=key).square().mean()

    def step(trained: Tensors, buffers: Tensors, x: Tensor, key: Tensor) -> tuple[Tensors, Tensor]:
        return torch.func.grad(loss)(trained, buffers, x, key), Net(model, trained, buffers)(x)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about speed
            _, together = vmap(step, (0, 0, 0, 0))(trained, buffers, x, keys)
    except HardyError:
        raise
    except Exception as error:  # torch raises anything there
        return str(error).strip().partition("\n")[0].rstrip(".")
    alone = Net(model, tensors.gather(trained, 0), tensors.gather(buffers, 0))(x[0])
    if not torch.allclose(together[0], alone, rtol=1e-3, atol=1e-3 * float(alone.abs().max())):
        return "it answers differently when torch.vmap runs it for several clients"
    return ""


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """`[engine]`: how and where the work is done."""

    name: Literal["auto", "sequential", "vectorised", "distributed", "flower"] = "auto"
    """auto chooses by device, threads, network and batch size: vectorised on a GPU and for small steps, else
    sequential; distributed is auto on several workers"""
    device: str = "auto"
    """auto, cpu or cuda (cuda:1, ...)"""
    precision: Precision = "tf32"
    """float32, float64, tf32 (float32 with TF32 matrix products where the device has them), or bfloat16 (training steps
    in mixed precision; weights, statistics and evaluation as with tf32)"""
    lane: int | None = None
    """slots in one call of the vectorised engine; absent: as many as fit"""
    store: Literal["auto", "memory", "disk"] = "auto"
    """where the tensors lie that each client has of its own: in memory, or in files of rows of which a round reads and
    writes its cohort's. auto: on disk where there are more than 10,000 clients and they take more than 256 MiB"""
    kernels: bool = True
    """whether layers of many slots run by fused kernels on a GPU; false: by torch's own"""
    workers: int = 1
    """processes that share the clients, started here; under torchrun those that it has started"""
    timeout: float = TIMEOUT
    """seconds for which a worker waits for another one in a round, before the run ends"""

    def __post_init__(self) -> None:
        if self.lane is not None and self.lane < 1:
            raise HardyError(f"engine.lane is {self.lane}; it must be 1 or more, or absent.")
        if self.lane is not None and self.name not in ("auto", "vectorised"):
            raise HardyError(f"engine.lane is {self.lane}, but engine {self.name} has no lanes. Leave it out.")
        if self.workers < 1:
            raise HardyError(f"engine.workers is {self.workers}; it must be 1 or more.")
        if self.workers > 1 and self.name == "flower":
            raise HardyError(
                f"engine.workers is {self.workers}, but engine flower has a process for each client. Leave it out."
            )
        if not self.timeout > 0:
            raise HardyError(f"engine.timeout is {self.timeout:g}; it must be above 0 seconds.")
        if self.store == "disk" and self.name == "flower":
            raise HardyError("engine.store is disk, but engine flower leaves clients their tensors. Leave it out.")
        if not self.kernels and (self.name not in ("auto", "vectorised") or self.device == "cpu"):
            raise HardyError(
                f"engine.kernels is false, but engine {self.name} on device {self.device} has no fused kernels. "
                "Leave it out."
            )

    def make_store(self, first: Tensors, clients: int) -> ClientStore:
        """What holds tensors that so many clients have of their own, with first values [B, ...]."""
        large = clients > _MANY and clients * tensors.count_bytes(first) > _MUCH
        if first and (self.store == "disk" or (self.store == "auto" and large)):
            return DiskStore(first, clients)
        return MemoryStore.filled(first, clients)

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
        kind = ENGINES.get(self.name) or choose(plan, data, training)
        if plan.synchronised and (kind is not Vectorised or self.lane is not None):
            raise HardyError(
                f"norm {name_part(plan.method.norm)!r} needs all clients of a step in one call, but engine.name is "
                f"{self.name!r} and engine.lane {self.lane}. Take engine vectorised without a lane."
            )
        if kind is Vectorised and (why := why_not_vectorised(plan, data)):
            if self.name == "vectorised" or plan.synchronised:
                raise HardyError(
                    f"engine vectorised cannot train this network: {why}. Take engine auto or sequential, or change "
                    "the network."
                )
            _LOG.warning("Clients train one after another (engine sequential): %s.", why)
            kind = Sequential
        if self.store == "disk" and not (plan.names(Placement.PRIVATE) or plan.names(Placement.REPORTED)):
            raise HardyError(
                f"engine.store is disk, but clients keep nothing with method {plan.method.name!r}, so it has "
                "no effect. Leave it out."
            )
        return kind(plan, data, training, seed=seed, lane=self.lane, kernels=self.kernels, stores=self.make_store)
