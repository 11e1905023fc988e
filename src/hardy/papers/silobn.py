"""SiloBN: every client keeps the statistics of its BatchNorm; scale and shift are everybody's.

Andreux et al., Siloed Federated Learning for Multi-Centric Histopathology Datasets, DCL at MICCAI 2020.

1. Clients hold the running mean and variance of every BatchNorm layer themselves.
2. All else is trained and averaged as in FedAvg, scale and shift too.
3. Client k is served by the shared weights with its own statistics.
"""

from hardy.core.method import Method
from hardy.core.partition import Placement
from hardy.core.protocols import Norm, Objective, Optimiser
from hardy.papers.fedbn import local
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd
from hardy.registry import part


@part("method")
def silobn(
    *,
    norm: Norm = local(affine=Placement.SHARED),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg on everything but the statistics of BatchNorm."""
    return Method(name="silobn", norm=norm, objective=objective, optimiser=optimiser)


__all__ = ["silobn"]
