"""Synchronised BatchNorm: in every step, layer by layer, all clients' batches are normalised as one.

Wang, Shi & Chang, Why Batch Normalization Damages Federated Learning on Non-IID Data? (FedTAN), arXiv 2023, whose
clients agree on statistics and on their gradients layer by layer; here in every step, not in the first alone.

n_i values of a channel in client i's batch · Σ over all clients that take the step
1. A layer's mean is Σ_i Σ x / Σ_i n_i, its variance the same of (x − mean)².
2. Gradients pass through both, so that a client's gradient is that of the sum of all clients' losses.
3. Running statistics move to these, and are the same everywhere.

With one local step and equal batches this is one machine that sees all batches; it is the reference for what norms with
less talk leave on the table. It takes two messages a layer and step, forward and back, which the bytes of a summary
leave out.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hardy.core.layers import AffineParameters, Statistics, scale_and_shift
from hardy.core.method import Method
from hardy.core.protocols import Setting
from hardy.errors import HardyError
from hardy.parts.norms import BatchNormalisation
from hardy.registry import part


class _SumOfAll(torch.autograd.Function):
    """A tensor summed over all slots of the call, who all get the sum; so does its gradient."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _sum_of_all(gradient)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int]:
        slots = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        return slots.sum(0, keepdim=True).expand_as(slots).clone(), 0


def _sum_of_all(x: Tensor) -> Tensor:
    out: Tensor = _SumOfAll.apply(x)  # type: ignore[no-untyped-call]
    return out


class SynchronisedStatistics(Statistics):
    """Statistics of the batches of all clients together."""

    def normalise(self, x: Tensor, affine: AffineParameters, eps: float) -> Tensor:
        over, taken = [axis for axis in range(x.dim()) if axis != 1], x.to(self.mean.dtype)
        middle = taken.sum(over)
        count = _sum_of_all(torch.zeros_like(middle.detach()) + x.numel() / x.shape[1])
        mean = _sum_of_all(middle) / count
        shape = 1, -1, *[1] * (x.dim() - 2)
        var = _sum_of_all((taken - mean.view(shape)).square().sum(over)) / count
        self._move(mean.detach(), (var * count / (count - 1).clamp_min(1.0)).detach())
        return scale_and_shift(x, mean, var, affine, eps)


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Synchronised(BatchNormalisation):
    """BatchNorm over the batches of all clients of a step; it needs them in one call of the vectorised engine."""

    keeps: ClassVar[type[Statistics]] = SynchronisedStatistics

    @property
    def synchronised(self) -> bool:
        return True

    def check(self, method: Method, setting: Setting) -> None:
        super().check(method, setting)
        if self.noise or self.inference_statistics != "running":
            raise HardyError(
                "norm synchronised takes no noise and inference_statistics = running: its statistics are everybody's. "
                "Leave them out, or take norm batch."
            )
        fewest = min(len(client.train) for client in setting.sorts)
        if setting.training.steps is None or fewest < setting.training.batch:
            raise HardyError(
                "norm synchronised needs steps that all clients take together with batches of one size, but "
                f"training.steps is {setting.training.steps}, training.batch {setting.training.batch} and the smallest "
                f"client has {fewest} rows. Set training.steps, and a batch of at most {fewest}."
            )


synchronised = Synchronised
__all__ = ["synchronised"]
