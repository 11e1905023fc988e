"""FedBN: every client keeps its own BatchNorm.

Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.

1. Clients hold the affine parameters and the statistics of every BatchNorm layer themselves.
2. All other weights are trained and averaged as in FedAvg.
3. Client k is served by the shared weights with its own BatchNorm.
"""

from dataclasses import dataclass

from hardy.core.method import Method
from hardy.core.partition import Placement, Role, Tag
from hardy.core.protocols import Norm, Objective, Optimiser
from hardy.parts.norms import BatchNormalisation
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd
from hardy.registry import part


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Local(BatchNormalisation):
    """BatchNorm that stays with its client."""

    affine: Placement = Placement.PRIVATE
    """who owns scale and shift; shared = only the statistics stay local"""
    statistics: Placement = Placement.PRIVATE
    """reported = the server is shown them, as FedRBN needs"""

    def placement(self, tag: Tag) -> Placement:
        return self.affine if tag.role is Role.NORM_AFFINE else self.statistics


local = Local


@part("method")
def fedbn(*, norm: Norm = local(), objective: Objective = cross_entropy(), optimiser: Optimiser = sgd()) -> Method:
    """FedAvg on everything but BatchNorm."""
    return Method(name="fedbn", norm=norm, objective=objective, optimiser=optimiser)


__all__ = ["fedbn", "local"]
