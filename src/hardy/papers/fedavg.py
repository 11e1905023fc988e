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
from hardy.core.partition import Placement
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.papers.fedbn import local
from hardy.parts.norms import Norm, batch
from hardy.parts.objectives import Objective, Wrapper, cross_entropy, squared_distance
from hardy.registry import part


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Proximal(Wrapper):
    """Adds μ/2 ‖w − w_t‖², squared as in the paper, over the trained tensors that were received."""

    inner: Objective = cross_entropy()
    strength: float = 0.01
    """μ"""

    def __post_init__(self) -> None:
        if self.strength < 0:
            raise HardyError(f"proximal strength (μ) is {self.strength}; it must be 0 or more.")

    def penalty(self, trained: Tensors, received: Tensors) -> Tensor | float:
        pulled = {name: value for name, value in trained.items() if name in received}
        held_back = self.strength / 2 * squared_distance(pulled, received) if pulled and self.strength else 0.0
        return self.inner.penalty(trained, received) + held_back


@part("method")
def fedavg(*, norm: Norm = batch(), objective: Objective = cross_entropy()) -> Method:
    """Local SGD and a weighted mean."""
    return Method(name="fedavg", norm=norm, objective=objective)


@part("method")
def fedprox(*, strength: float = 0.01, norm: Norm = batch(), objective: Objective = cross_entropy()) -> Method:
    """FedAvg with a proximal term of strength μ."""
    return Method(name="fedprox", norm=norm, objective=Proximal(inner=objective, strength=strength))


@part("method")
def local_only(*, objective: Objective = cross_entropy()) -> Method:
    """Every client trains alone: the reference that says what federating is worth."""
    return Method(name="local_only", norm=local(), objective=objective, weights=Placement.PRIVATE)


@part("method")
def centralised(*, norm: Norm = batch(), objective: Objective = cross_entropy()) -> Method:
    """One model trained on everybody's data in one place: the reference that federating would like to reach."""
    return Method(name="centralised", norm=norm, objective=objective, pooled=True)


proximal = Proximal
__all__ = ["centralised", "fedavg", "fedprox", "local_only", "proximal"]
