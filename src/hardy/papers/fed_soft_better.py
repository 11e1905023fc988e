"""FedSoftBetter: clients with a smaller loss count for more.

Ben Mansour et al., Federated Learning Aggregation: New Robust Algorithms with Guarantees, arXiv 2022.

n_k examples of client k · F_k its loss · F_k* the least loss it can reach · T temperature
1. Clients train as in FedAvg and report F_k.
2. The server takes the mean of w_k with weights proportional to n_k exp(−(F_k − F_k*) / T). T = ∞ is FedAvg.
"""

from dataclasses import dataclass, replace

import torch

from hardy.core.messages import Updates
from hardy.core.method import Method
from hardy.core.protocols import Norm, Objective, Optimiser, RoundContext
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.parts.aggregators.base import Stage, pipeline
from hardy.parts.norms import batch
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd
from hardy.registry import part


@part("stage")
@dataclass(frozen=True, kw_only=True)
class SoftBetter(Stage):
    """Multiplies weights by exp(−F/T), taking F* = 0: a network large enough fits its data, and no gap is negative,
    whatever a client reports."""

    temperature: float = 1.0
    """T; small: the best client alone, inf: nothing changes"""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise HardyError(f"soft_better temperature (T) is {self.temperature}; it must be above 0.")

    def apply(self, updates: Updates, context: RoundContext, memory: Tensors) -> tuple[Updates, Tensors]:
        gap = updates.loss.clamp_min(0.0)
        tilt = torch.exp((gap.min() - gap) / self.temperature)  # 1 for the best, so that not all vanish
        return replace(updates, weights=updates.weights * tilt), memory


soft_better = SoftBetter


@part("method")
def fed_soft_better(
    *,
    temperature: float = 1.0,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg tilted towards the clients with smaller losses by a softmax of temperature T."""
    rule = pipeline(pre=(soft_better(temperature=temperature),))
    return Method(name="fed_soft_better", norm=norm, objective=objective, optimiser=optimiser, aggregator=rule)


__all__ = ["fed_soft_better", "soft_better"]
