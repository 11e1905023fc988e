"""Per-FedAvg: a common model from which one step of its own takes every client far.

Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach,
NeurIPS 2020, Algorithm 1, first-order variant (FO).

w server weights · α rate of the virtual step · β rate of the real one (training.rate) · D, D′ independent batches
1. The server sends w to a cohort.
2. A client steps virtually on D: w̃ = w − α ∇f(w, D).
3. It steps on D′ at that point: w ← w − β ∇f(w̃, D′); the factor I − α∇²f is left out.
4. The server takes the mean of the clients' weights.
5. When they are used, every client takes a step of rate α of its own: `run.fine_tune(steps=1, rate=α)`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad

from hardy.core import random
from hardy.core.method import Method
from hardy.core.net import Net
from hardy.core.protocols import Batch, Norm, Objective, Optimiser, Wrapper
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.parts.norms import batch
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd
from hardy.registry import part


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Meta(Wrapper):
    """The inner loss of the second half of a batch, after a virtual step on the first half. The penalties of the
    inner objective stay where the weights are. Both halves move the statistics."""

    inner: Objective = cross_entropy()
    rate: float = 0.02
    """α, the rate of the inner step"""

    def __post_init__(self) -> None:
        if not 0 <= self.rate < float("inf"):
            raise HardyError(f"meta rate (α) is {self.rate}; it must be 0 or more, and finite.")

    def alone(self) -> Objective:
        return self.inner.alone()

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        first, second = halves(batch)

        def virtual(trained: Tensors) -> tuple[Tensor, Tensors]:
            here = net.on(trained, net.buffers)
            return self.inner.loss(here, private, first, random.fold(key, "virtual")), here.buffers

        with torch.no_grad():  # first order: to the real step the virtual one is a constant
            gradient, buffers = grad(virtual, has_aux=True)(net.trained)
        there = net.on({n: w - self.rate * gradient[n] for n, w in net.trained.items()}, buffers)
        loss = self.inner.loss(there, private, second, key)
        net.buffers = there.buffers
        return loss


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """D and D′. In a batch of three or less they overlap, since one example alone has no batch statistics."""
    size = len(batch.x)
    end, start = max(size // 2, 2), min(size // 2, max(size - 2, 0))
    return batch._replace(x=batch.x[:end], y=batch.y[:end]), batch._replace(x=batch.x[start:], y=batch.y[start:])


meta = Meta


@part("method")
def per_fedavg(
    *,
    rate: float = 0.02,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg of clients that look one step of rate α ahead."""
    ahead = meta(inner=objective, rate=rate)
    return Method(name="per_fedavg", norm=norm, objective=ahead, optimiser=optimiser)


__all__ = ["meta", "per_fedavg"]
