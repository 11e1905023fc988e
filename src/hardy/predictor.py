"""A trained network whose width and robustness are chosen in place (Split-Mix, Algorithm 1, line 11, and Eq. 2)."""

import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hardy import tensors
from hardy.afterwards import estimated
from hardy.errors import HardyError
from hardy.evaluation import order
from hardy.models.count import macs
from hardy.models.net import Mixture, Net
from hardy.robustness.evaluate import networks, refuse_robustness
from hardy.tensors import Tensors

if TYPE_CHECKING:
    from hardy.experiment import Run


class Predictor:
    """predictor(x) gives the logits of images in [0, 1], [N, C, H, W]; `customise` changes width and robustness.

    The bases lie in the host's memory; only those that the width needs are on the device, where each comes in one copy.
    """

    def __init__(self, run: "Run", *, width: float, robustness: float | None, client: int | None) -> None:
        common, own = networks(run.engine, run.state, order(run))
        norm = run.engine.plan.method.norm
        clients = len(run.engine.data.clients)
        if (own or norm.serving == "post") and client is None:
            raise HardyError(
                f"norm {type(norm).__name__!r} gives every client a network of its own; choose one of the {clients} "
                "(client = 0), or take run.newcomer for somebody who has none."
            )
        if client is not None and not 0 <= client < clients:
            raise HardyError(f"client {client} is not there; it must be in [0, {clients - 1}].")
        self.run, self.client, self.device = run, client, run.engine.device
        held = {**common, **tensors.gather(own, client or 0)}
        self.stored = tensors.apply(Tensor.cpu, held)
        self.loaded: list[Tensors] = []
        """the networks on the device, in the order in which they are mixed"""
        self._packed: dict[float, list[_Packed]] = {}
        for known in run.engine.plan.method.budget.widths:
            self._serve(known)
        self.width, self.robustness = width, robustness
        self.customise(width=width, robustness=robustness)

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.mixture(x.to(self.device, self.run.engine.dtype), robustness=self.robustness)

    def customise(self, *, width: float | None = None, robustness: float | None = None) -> "Predictor":
        """Changes width, robustness (λ) or both; what is not given stays. Loads or frees only the bases it needs."""
        norm = self.run.engine.plan.method.norm
        refuse_robustness(robustness, norm)
        if width is not None:
            served = self._serve(width)
            kept = [have for have, want in zip(self.loaded, served, strict=False) if _size(have) == want.size]
            self.loaded = [*kept, *map(self._load, served[len(kept) :])]
            plan = self.run.engine.plan
            nets = [Net(plan.model, tensors.select(b, plan.trained), tensors.select(b, plan.kept)) for b in self.loaded]
            self.mixture = Mixture(nets, statistics="batch" if norm.serving == "batch" else "running")
            self.width = width
        if robustness is not None:
            self.robustness = robustness
        return self

    def _serve(self, width: float) -> "list[_Packed]":
        if width not in self._packed:
            bases = self.run.engine.plan.method.budget.serve(self.stored, width)
            widest = max(self._packed.values(), key=len, default=[])
            # bases of one size are the same ones at every width
            shared = [have for have, want in zip(widest, bases, strict=False) if have.size == _size(want)]
            self._packed[width] = [*shared, *(_Packed(base, self.device) for base in bases[len(shared) :])]
        return self._packed[width]

    def _load(self, packed: "_Packed") -> Tensors:
        engine, client = self.run.engine, self.client
        base = packed.send()
        if engine.plan.method.norm.serving != "post" or client is None:
            return base
        rows = torch.from_numpy(engine.data.clients[client].train).to(self.device)
        return estimated(engine.plan.model, base, engine.resident.images("train", rows))

    def costs(self) -> dict[str, Any]:
        """What this setting takes: bases, multiply-accumulates an image, parameters, and bytes of its tensors."""
        plan, shape = self.run.engine.plan, self.run.engine.data.shape
        trained = [tensors.select(base, plan.trained) for base in self.loaded]
        return {
            "width": self.width,
            "robustness": self.robustness,
            "bases": len(self.loaded),
            "macs": sum(macs(plan.model, shape, tensors.shapes(base)) for base in self.loaded),
            "parameters": sum(value.numel() for base in trained for value in base.values()),
            "bytes": sum(map(tensors.count_bytes, self.loaded)),
        }

    def latency(self, images: int = 1, repeats: int = 20) -> float:
        """Seconds this setting takes for so many images here, the median of some calls."""
        x = torch.rand(images, *self.run.engine.data.shape, device=self.device)
        seconds = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            self(x)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - began)
        return median(seconds[1:])


class _Packed:
    """The tensors of a base side by side in the host's memory."""

    def __init__(self, base: Tensors, device: torch.device) -> None:
        self.base, self.device, self.size = tensors.apply(lambda t: t[None], base), device, _size(base)
        flat = tensors.flatten(self.base, next(iter(self.base.values())))
        self.flat = flat.pin_memory() if device.type == "cuda" else flat

    def send(self) -> Tensors:
        there = self.flat.to(self.device, non_blocking=True)
        return tensors.gather(tensors.unflatten(there, self.base), 0)


def _size(base: Tensors) -> int:
    return sum(value.numel() for value in base.values())
