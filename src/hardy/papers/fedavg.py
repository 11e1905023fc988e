"""FedAvg and FedProx, and the two references every federated figure is read against.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.
Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.

1. The server sends w to a cohort.
2. Client k runs local SGD on h_k(w) = F_k(w) + μ/2 ‖w − w_t‖² (FedAvg: μ = 0).
3. The server takes the mean of the clients' weights, weighted by their number of examples.
"""

from dataclasses import dataclass

from torch import Tensor

from hardy.core.method import Method
from hardy.core.net import Net
from hardy.core.partition import Placement
from hardy.core.protocols import Batch, Norm, Objective, Optimiser, StepResult, Wrapper
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.papers.fedbn import local
from hardy.parts.norms import batch
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd
from hardy.registry import part


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Proximal(Wrapper):
    """Adds μ (w − w_t), the gradient of μ/2 ‖w − w_t‖², for the trained tensors that were received; the loss reported
    is without it."""

    inner: Objective = cross_entropy()
    strength: float = 0.01
    """μ, how strongly the weights are held to those received"""

    def __post_init__(self) -> None:
        if self.strength < 0:
            raise HardyError(f"proximal strength (μ) is {self.strength}; it must be 0 or more.")

    def gradient(
        self, outer: Objective, net: Net, private: Tensors, batch: Batch, key: Tensor, received: Tensors
    ) -> StepResult:
        found = self.inner.gradient(outer, net, private, batch, key, received)
        pulled = {
            name: g + self.strength * (net.trained[name] - received[name]) if name in received and self.strength else g
            for name, g in found.gradient.items()
        }
        return found._replace(gradient=pulled)


@part("method")
def fedavg(*, norm: Norm = batch(), objective: Objective = cross_entropy(), optimiser: Optimiser = sgd()) -> Method:
    """Local SGD and a weighted mean."""
    return Method(name="fedavg", norm=norm, objective=objective, optimiser=optimiser)


@part("method")
def fedprox(
    *,
    strength: float = 0.01,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg with a proximal term of strength μ."""
    pulled = Proximal(inner=objective, strength=strength)
    return Method(name="fedprox", norm=norm, objective=pulled, optimiser=optimiser)


@part("method")
def local_only(*, objective: Objective = cross_entropy(), optimiser: Optimiser = sgd()) -> Method:
    """Every client trains alone: the reference that says what federating is worth."""
    return Method(name="local_only", norm=local(), objective=objective, optimiser=optimiser, weights=Placement.PRIVATE)


@part("method")
def centralised(
    *, norm: Norm = batch(), objective: Objective = cross_entropy(), optimiser: Optimiser = sgd()
) -> Method:
    """One model trained on everybody's data in one place: the reference that federating would like to reach."""
    return Method(name="centralised", norm=norm, objective=objective, optimiser=optimiser, pooled=True)


proximal = Proximal
__all__ = ["centralised", "fedavg", "fedprox", "local_only", "proximal"]
