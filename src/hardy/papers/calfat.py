"""CalFAT: logits calibrated by a client's own label counts, in the attack and in the loss.

Chen et al., CalFAT: Calibrated Federated Adversarial Training with Label Skewness, NeurIPS 2022.

n_y rows of class y that a client holds · π_y = n_y / Σ n its class priors · f logits, q(x) = softmax(f(x) + log π)
1. The server sends the weights.
2. A client attacks each batch by the calibrated divergence: x̃ climbs KL(q(x) ‖ q(x̃)).        (calibrated KL)
3. It steps on −log q_y(x̃): a class that it rarely sees needs a larger margin.               (calibrated CE)
4. The server takes the mean. Predictions are made with f alone.

Every client thus learns the f that equal classes would give, so that clients agree although their labels differ.
"""

from dataclasses import dataclass

from torch import Tensor

from hardy.attacks.base import Attack
from hardy.attacks.gradient import pgd
from hardy.core.method import Method
from hardy.core.protocols import Norm, Optimiser
from hardy.errors import HardyError
from hardy.papers.fat import where_affordable
from hardy.papers.fedavg import fedavg
from hardy.parts.adversarial import adversarial
from hardy.parts.norms import batch
from hardy.parts.objectives import Calibrated
from hardy.parts.optimisers import sgd
from hardy.registry import part


@part("objective")
@dataclass(frozen=True, kw_only=True)
class PriorCalibrated(Calibrated):
    """Adds strength · log π to the logits, by the client's share of each class."""

    strength: float = 1.0
    """what log π is multiplied by; the paper has 1"""
    least: float = 1e-7
    """rows that an absent class counts as, so that log π is finite (authors' code)"""

    def __post_init__(self) -> None:
        if not self.strength > 0 or not self.least > 0:
            raise HardyError(
                f"prior_calibrated takes a strength and a least above 0; it got {self.strength} and {self.least}. At a "
                "strength of 0 it has no effect: leave it out."
            )

    def offset(self, counts: Tensor) -> Tensor:
        return self.strength * ((counts + self.least) / counts.sum()).log()


prior_calibrated = PriorCalibrated


@part("method")
def calfat(
    *,
    strength: float = 1.0,
    attack: Attack = pgd(steps=10, loss="kl", start="normal"),
    norm: Norm = batch(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg of clients that attack and train on calibrated logits; those of kind ST train so on clean images.

    strength: what log π is multiplied by
    """
    calibrated = prior_calibrated(inner=where_affordable(adversarial(attack=attack, mix=1.0)), strength=strength)
    return fedavg(norm=norm, objective=calibrated, optimiser=optimiser).replace(name="calfat")


__all__ = ["calfat", "prior_calibrated"]
