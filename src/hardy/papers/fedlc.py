"""FedLC: logits calibrated by label margins, so that a client does not unlearn the classes it rarely sees.

Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022.

n_y rows of class y that a client holds · f logits · τ strength of the margins
1. The server sends the weights.
2. A client steps on −log [exp(f_y − τ n_y^(−1/4)) / Σ_i exp(f_i − τ n_i^(−1/4))]: between classes y and i lies a margin
   of τ (n_y^(−1/4) − n_i^(−1/4)), which is large where y is rare.
3. The server takes the mean. Predictions are made with f alone.
"""

from dataclasses import dataclass

from torch import Tensor

from hardy.core.method import Method
from hardy.core.protocols import Norm, Objective, Optimiser
from hardy.errors import HardyError
from hardy.papers.fedavg import fedavg
from hardy.parts.norms import batch
from hardy.parts.objectives import Calibrated, cross_entropy
from hardy.parts.optimisers import sgd
from hardy.registry import part


@part("objective")
@dataclass(frozen=True, kw_only=True)
class MarginCalibrated(Calibrated):
    """Takes τ n^(−1/4) from the logits, by the client's rows of each class."""

    strength: float = 1.0
    """τ, how strong the margins are"""
    least: float = 1e-8
    """rows that an absent class counts as, so that its margin is finite"""

    def __post_init__(self) -> None:
        if not self.strength > 0 or not self.least > 0:
            raise HardyError(
                f"margin_calibrated takes a strength (τ) and a least above 0; it got {self.strength} and {self.least}. "
                "At a strength of 0 it has no effect: leave it out."
            )

    def offset(self, counts: Tensor) -> Tensor:
        return -self.strength * counts.clamp_min(self.least) ** -0.25


margin_calibrated = MarginCalibrated


@part("method")
def fedlc(
    *,
    strength: float = 1.0,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg on logits with label margins.

    strength: τ, how strong the margins are
    """
    calibrated = margin_calibrated(inner=objective, strength=strength)
    return fedavg(norm=norm, objective=calibrated, optimiser=optimiser).replace(name="fedlc")


__all__ = ["fedlc", "margin_calibrated"]
