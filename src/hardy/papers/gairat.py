"""FedGAIRAT: adversarial training in which images near the decision boundary count for more.

Zhang et al., Geometry-aware Instance-reweighted Adversarial Training, ICLR 2021, within FedAvg, as the papers on CalFAT
and DBFAT compare themselves with it.

K steps of the attack · κ(x, y) steps that x withstood: how often it was still classified right before a step
1. The server sends the weights.
2. A client attacks each batch by PGD and counts κ on the way.                                    (Alg. 1)
3. It weighs x̃ by ω = (1 + tanh(λ + 5 (1 − 2κ/K))) / 2, divided by the mean over the batch.       (Eq. 6, Alg. 2)
4. It steps on the weighted loss; the server takes the mean of the weights.
"""

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from hardy.attacks.base import Attack
from hardy.attacks.gradient import pgd
from hardy.core.method import Method
from hardy.core.protocols import Norm, Objective, Optimiser
from hardy.errors import HardyError
from hardy.papers.fat import where_affordable
from hardy.papers.fedavg import fedavg
from hardy.parts.adversarial import Reweighted, adversarial
from hardy.parts.norms import batch
from hardy.parts.optimisers import sgd
from hardy.registry import part


@part("objective")
@dataclass(frozen=True, kw_only=True)
class GeometryAware(Reweighted):
    """Weighs attacked images by (1 + tanh(λ + 5 (1 − 2κ/K))) / 2: the fewer steps they withstood, the more."""

    shift: float = -1.0
    """λ; the larger, the more alike the weights"""
    warm_up: int = 0
    """rounds before it begins; until then all images count the same (the paper: the first half of training)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isfinite(self.shift) or self.warm_up < 0:
            raise HardyError(
                f"geometry_aware takes a finite shift (λ) and a warm_up of 0 or more; it got {self.shift} and "
                f"{self.warm_up}. At a shift of inf all weights are the same: leave it out."
            )

    def for_client(self, kind: str, round_number: int) -> Objective:
        return self.inner if round_number < self.warm_up else self

    def weigh(self, withstood: Tensor, steps: int) -> Tensor:
        return (1 + torch.tanh(self.shift + 5 * (1 - 2 * withstood / steps))) / 2


geometry_aware = GeometryAware


@part("method")
def fedgairat(
    *,
    shift: float = -1.0,
    warm_up: int = 0,
    attack: Attack = pgd(steps=10),
    norm: Norm = batch(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg of clients that weigh attacked images by how many steps they withstood.

    shift: λ; the larger, the more alike the weights
    warm_up: rounds before it begins
    """
    weighted = geometry_aware(inner=adversarial(attack=attack, mix=1.0), shift=shift, warm_up=warm_up)
    return fedavg(norm=norm, objective=where_affordable(weighted), optimiser=optimiser).replace(name="fedgairat")


__all__ = ["fedgairat", "geometry_aware"]
