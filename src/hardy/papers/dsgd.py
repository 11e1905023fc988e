"""DSGD: one gradient a round from every client.

Guerraoui et al., Overcoming the Challenges of Batch Normalization in Federated Learning, 2024, Algorithm 3; with
momentum kept by the clients, as in Farhadkhani et al., Byzantine Machine Learning Made Easy by Resilient Averaging of
Momentums, ICML 2022.

θ weights · g_i gradient of client i · m_i its momentum, kept from round to round · η rate · μ momentum
1. The server sends θ.
2. Client i takes g_i on one batch and m_i ← μ m_i + (1−μ) g_i.
3. It sends θ − η m_i, and the server takes the mean: θ ← θ − η · mean of m_i.

Take it with training.steps = 1. A robust rule on θ − η m_i is the rule on the momenta, since it moves with its inputs.
"""

from dataclasses import dataclass

import torch

from hardy.core.method import Method
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.parts.aggregators.base import Aggregator, mean
from hardy.parts.norms import Norm, batch
from hardy.parts.objectives import Objective, Shape, Wrapper, cross_entropy
from hardy.registry import part


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Dampened(Wrapper):
    """Steps along m ← μ m + (1−μ) g. Unlike training.momentum it is not born anew each round; it is kept, private, as
    `m.<weight>`."""

    inner: Objective = cross_entropy()
    momentum: float = 0.99
    """μ"""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise HardyError(f"momentum (μ) of dampened is {self.momentum}; it must be in [0, 1).")

    def private(self, trained: Tensors, shape: Shape) -> Tensors:
        momenta = {f"m.{name}": torch.zeros_like(w) for name, w in trained.items()}
        return {**self.inner.private(trained, shape), **momenta}

    def correct(self, gradient: Tensors, private: Tensors, received: Tensors) -> tuple[Tensors, Tensors]:
        gradient, private = self.inner.correct(gradient, private, received)
        moved = {
            f"m.{n}": torch.lerp(private[f"m.{n}"], g, 1 - self.momentum)
            for n, g in gradient.items()
            if f"m.{n}" in private
        }
        return {n: moved.get(f"m.{n}", g) for n, g in gradient.items()}, {**private, **moved}


dampened = Dampened


@part("method")
def dsgd(
    *,
    momentum: float = 0.99,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    aggregator: Aggregator = mean(weigh="uniform"),
) -> Method:
    """Distributed SGD with momentum on the clients; momentum is μ."""
    return Method(name="dsgd", norm=norm, objective=dampened(inner=objective, momentum=momentum), aggregator=aggregator)


__all__ = ["dampened", "dsgd"]
