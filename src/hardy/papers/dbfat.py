"""DBFAT: attacked images near the decision boundary count for more, and the averaged network teaches them.

Zhang et al., Delving into the Adversarial Robustness of Federated Learning, AAAI 2023.

K steps of the attack · κ steps that x withstood, the measure of its distance to the boundary · ρ weight · f_g the
network as it was sent, f the client's
1. The server sends f_g.
2. A client attacks each batch by PGD and counts κ on the way.
3. Local re-weighting: ρ = 1 − a κ/K, divided by the mean over the batch.
4. Global regularisation: it steps on ρ CE(f(x̃), y) + β KL(f_g(x) ‖ f(x̃)).
5. The server takes the mean of the weights.

The form of ρ, linear in κ, is ours; see docs/methods/adversarial_field.md.
"""

from dataclasses import dataclass

from torch import Tensor

from hardy.attacks.base import Attack
from hardy.attacks.gradient import pgd
from hardy.core.method import Method
from hardy.core.net import Net
from hardy.core.protocols import Batch, Norm, Objective, Optimiser, StepResult
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.papers.fat import where_affordable
from hardy.papers.fedavg import fedavg
from hardy.parts.adversarial import Reweighted, adversarial, divergence
from hardy.parts.norms import batch
from hardy.parts.optimisers import sgd
from hardy.registry import part


@part("objective")
@dataclass(frozen=True, kw_only=True)
class BoundaryAware(Reweighted):
    """Weighs attacked images by 1 − a κ/K, and adds β KL(received network on clean ‖ own on attacked images)."""

    spread: float = 0.5
    """a: an image that withstood the whole attack counts 1 − a times as much as one that withstood no step"""
    strength: float = 1.0
    """β, weight of the divergence"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.spread < 1 or not self.strength >= 0:
            raise HardyError(
                f"boundary_aware takes a spread (a) in [0, 1) and a strength (β) of 0 or more; it got {self.spread} "
                f"and {self.strength}."
            )

    def gradient(
        self, outer: Objective, net: Net, private: Tensors, batch: Batch, key: Tensor, received: Tensors
    ) -> StepResult:
        return self.inner.gradient(outer, net.knowing(received), private, batch, key, received)

    def weigh(self, withstood: Tensor, steps: int) -> Tensor:
        return 1 - self.spread * withstood / steps

    def regularise(self, net: Net, batch: Batch, robust: Tensor) -> Tensor | float:
        if not self.strength:
            return 0.0
        return self.strength * divergence(net.sent()(batch.x).detach(), robust).mean()


boundary_aware = BoundaryAware


@part("method")
def dbfat(
    *,
    spread: float = 0.5,
    strength: float = 1.0,
    attack: Attack = pgd(steps=10),
    norm: Norm = batch(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg of clients that weigh attacked images by their distance to the boundary.

    spread: a, what an image that withstood the whole attack counts less
    strength: β, weight of the divergence from the averaged network
    """
    aware = boundary_aware(inner=adversarial(attack=attack, mix=1.0), spread=spread, strength=strength)
    return fedavg(norm=norm, objective=where_affordable(aware), optimiser=optimiser).replace(name="dbfat")


__all__ = ["boundary_aware", "dbfat"]
