"""AFL: the mixture of clients that is worst for the model is the one it is trained on.

Mohri et al., Agnostic Federated Learning, ICML 2019 (Stochastic-AFL).

λ mixture weights, one a client, on the simplex · F_k loss of client k · γ step of the ascent · S cohort
1. Both players move at once: clients train, and the server takes the mean of w_k weighted by λ_k.
2. λ_k ← λ_k + γ F_k for k in S, the gradient of Σ λ_k F_k.
3. λ_S is projected onto the simplex of the mass it had, so that clients outside S keep their λ.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hardy.core import tensors
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
class Agnostic(Stage):
    """Weighs by a mixture λ that starts uniform and climbs the reported losses."""

    step: float = 0.01
    """γ, the rate of the ascent on the clients' weights"""

    def __post_init__(self) -> None:
        if not 0 <= self.step < float("inf"):
            raise HardyError(f"agnostic step (γ) is {self.step}; it must be 0 or more, and finite.")

    def memory(self, context: RoundContext) -> Tensors:
        return {"mixture": torch.full((context.clients,), 1 / context.clients, dtype=torch.float64)}

    def apply(self, updates: Updates, context: RoundContext, memory: Tensors) -> tuple[Updates, Tensors]:
        mixture = memory["mixture"]
        cohort = tensors.send([slot.client for slot in updates.slots], mixture.device)
        held = mixture[cohort]
        climbed = onto_simplex(held + self.step * updates.loss, held.sum())
        return replace(updates, weights=held), {"mixture": mixture.index_copy(0, cohort, climbed)}


def onto_simplex(point: Tensor, mass: Tensor) -> Tensor:
    """The nearest point with entries of 0 or more that sum to `mass`."""
    largest_first = point.sort(descending=True).values
    counts = torch.arange(1, len(point) + 1, device=point.device)
    threshold = ((largest_first.cumsum(0) - mass) / counts).max()  # the entries left above it sum to the mass
    return (point - threshold).clamp_min(0.0)


agnostic = Agnostic


@part("method")
def afl(
    *,
    step: float = 0.01,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg weighted by the worst mixture of clients, approached with steps of γ."""
    rule = pipeline(pre=(agnostic(step=step),))
    return Method(name="afl", norm=norm, objective=objective, optimiser=optimiser, aggregator=rule)


__all__ = ["afl", "agnostic", "onto_simplex"]
