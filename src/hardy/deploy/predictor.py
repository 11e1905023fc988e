"""A trained network whose width and robustness are chosen in place (Split-Mix, Algorithm 1, line 11, and Eq. 2)."""

import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hardy.core import tensors
from hardy.core.method import Plan
from hardy.core.net import Mixture, Net
from hardy.core.tensors import Tensors
from hardy.deploy.personalise import estimated
from hardy.errors import HardyError
from hardy.evaluation.measure import networks, refuse_robustness
from hardy.models.count import macs
from hardy.runs.evaluate import order

if TYPE_CHECKING:
    from hardy.runs.run import Run


class Predictor:
    """predictor(x) gives the logits of images in [0, 1], [N, C, H, W]; `customise` changes width and robustness.

    The bases lie in the host's memory; only those that the width needs are on the device, where each comes in one copy.
    """

    def __init__(self, run: "Run", *, width: float, robustness: float | None, client: int | None) -> None:
        common, own = networks(run.engine, run.state, order(run))
        norm = run.engine.plan.method.norm
        clients = len(run.engine.data.clients)
        if (own or norm.inference_statistics == "recomputed") and client is None:
            raise HardyError(
                f"norm {type(norm).__name__!r} gives every client a network of its own; choose one of the {clients} "
                "(client = 0), or take run.network_for_new_client for somebody who has none."
            )
        if client is not None and not 0 <= client < clients:
            raise HardyError(f"client {client} is not there; it must be in [0, {clients - 1}].")
        self.run, self.client, self.device = run, client, run.engine.device
        held = {**common, **tensors.gather(own, client or 0)}
        self.stored = tensors.apply(Tensor.cpu, held)
        self.loaded: list[Tensors] = []
        """the networks on the device, in the order in which they are mixed; those that leave it must not be used"""
        self._bases: dict[float, list[_Base]] = {}
        for known in run.engine.plan.method.budget.widths:
            self._serve(known)
        self._here: list[_Base] = []
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
            before, self._here = self._here, self._serve(width)
            for base in before:
                if base not in self._here:
                    base.free()
            for base in self._here:
                if base not in before:
                    base.load()
            self.loaded = [base.held for base in self._here]
            nets = [base.net for base in self._here]
            self.mixture = Mixture(nets, statistics="images" if norm.inference_statistics == "batch" else "running")
            self.width = width
        if robustness is not None:
            self.robustness = robustness
        return self

    def _serve(self, width: float) -> "list[_Base]":
        if width not in self._bases:
            bases = self.run.engine.plan.method.budget.serve(self.stored, width)
            widest = max(self._bases.values(), key=len, default=[])
            # bases of one size are the same ones at every width
            shared = [have for have, want in zip(widest, bases, strict=False) if _size(have.held) == _size(want)]
            plan, new = self.run.engine.plan, map(self._finished, bases[len(shared) :])
            self._bases[width] = [*shared, *(_Base(plan, base, self.device) for base in new)]
        return self._bases[width]

    def _finished(self, base: Tensors) -> Tensors:
        """With the statistics that the client's images have, where these are measured after training."""
        engine, client = self.run.engine, self.client
        if engine.plan.method.norm.inference_statistics != "recomputed" or client is None:
            return base
        rows = torch.from_numpy(engine.data.clients[client].train).to(self.device)
        return estimated(engine.plan.model, engine.cast(base), engine.device_data.images("train", rows))

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


class _Base:
    """A base whose tensors lie side by side: in the host's memory, and on the device while it is loaded.

    Its tensors and its net are made once. Freeing takes the memory from under them, and loading gives it back, filled
    by one copy: what makes dozens of views at every change takes longer than the copy.
    """

    def __init__(self, plan: Plan, base: Tensors, device: torch.device) -> None:
        rows = tensors.apply(lambda t: t[None], base)
        flat = tensors.flatten(rows, next(iter(rows.values()))).cpu()
        self.host = flat.pin_memory() if device.type == "cuda" else flat
        self.there = _room(self.host, device)
        self.held = tensors.gather(tensors.unflatten(self.there, rows), 0)
        self.net = Net(plan.model, tensors.select(self.held, plan.trained), tensors.select(self.held, plan.buffers))
        self.free()

    def load(self) -> None:
        if self.there is not self.host:
            self.there.untyped_storage().resize_(self.host.untyped_storage().nbytes())
            self.there.copy_(self.host, non_blocking=True)

    def free(self) -> None:
        if self.there is not self.host:
            self.there.untyped_storage().resize_(0)


def _room(host: Tensor, device: torch.device) -> Tensor:
    """A place for these values on a device; a CPU has them already."""
    return host if device.type == "cpu" else torch.empty_like(host, device=device)


def _size(base: Tensors) -> int:
    return sum(value.numel() for value in base.values())
