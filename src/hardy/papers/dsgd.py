"""DSGD: one gradient per round from every client.

Guerraoui et al., Overcoming the Challenges of Batch Normalization in Federated Learning, 2024, Algorithm 3; with
momentum kept by the clients, as in Farhadkhani et al., Byzantine Machine Learning Made Easy by Resilient Averaging of
Momentums, ICML 2022.

θ weights · g_i gradient of client i · m_i its momentum, kept from round to round · η rate · μ momentum
1. The server sends θ.
2. Client i takes g_i on one batch and m_i ← μ m_i + (1−μ) g_i.
3. It sends θ − η m_i, and the server takes the mean: θ ← θ − η · mean of m_i.

Take it with training.steps = 1. A robust rule on θ − η m_i is the rule on the momenta, since it moves with its inputs.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from hardy.core.method import Method
from hardy.core.protocols import Aggregator, Norm, Objective, Optimiser
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.parts.aggregators.base import mean
from hardy.parts.norms import batch
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import chain, sgd
from hardy.registry import part


@part("optimiser")
@dataclass(frozen=True, kw_only=True)
class Dampened(Optimiser):
    """Turns g into m ← μ m + (1−μ) g, which the client keeps from round to round."""

    momentum: float = 0.99
    """μ, how much of the gradients before is kept"""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise HardyError(f"momentum (μ) of dampened is {self.momentum}; it must be in [0, 1).")

    @property
    def kept(self) -> bool:
        return True

    def init(self, trained: Tensors, shared: Collection[str]) -> Tensors:
        return {f"m.{n}": torch.zeros_like(w) for n, w in trained.items()}

    def update(
        self, gradient: Tensors, state: Tensors, params: Tensors, received: Tensors, rate: Tensor, key: Tensor
    ) -> tuple[Tensors, Tensors]:
        moved = {n: torch.lerp(state[f"m.{n}"], g, 1 - self.momentum) for n, g in gradient.items()}
        return moved, {**state, **{f"m.{n}": m for n, m in moved.items()}}


dampened = Dampened


@part("method")
def dsgd(
    *,
    momentum: float = 0.99,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
    aggregator: Aggregator = mean(weigh="uniform"),
) -> Method:
    """Distributed SGD with momentum on the clients; momentum is μ."""
    steps = chain(dampened(momentum=momentum), optimiser)
    return Method(name="dsgd", norm=norm, objective=objective, optimiser=steps, aggregator=aggregator)


__all__ = ["dampened", "dsgd"]
