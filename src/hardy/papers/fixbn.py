"""FixBN: BatchNorm for the first rounds, then its statistics stand still.

Zhong et al., Making Batch Normalization Great in Federated Deep Learning, arXiv 2023.

1. Up to round t*, clients train with the statistics of their batches, and the server averages the running ones.
2. From then on they normalise by the running statistics, which no longer move. Everything else is FedAvg.
"""

from dataclasses import dataclass

from hardy.core.method import Method
from hardy.core.protocols import Objective, Optimiser
from hardy.errors import HardyError
from hardy.parts.norms import BatchNormalisation
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd
from hardy.registry import part


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Fixed(BatchNormalisation):
    """BatchNorm whose statistics stand still after some rounds."""

    after: int = 10
    """t*; half of all rounds in the paper"""

    def __post_init__(self) -> None:
        if self.after < 1:
            raise HardyError(f"norm fixed stands still after {self.after} rounds; it must be 1 or more.")

    def frozen(self, round_number: int) -> bool:
        return round_number >= self.after


fixed = Fixed


@part("method")
def fixbn(*, after: int = 10, objective: Objective = cross_entropy(), optimiser: Optimiser = sgd()) -> Method:
    """FedAvg whose BatchNorm statistics stand still after t* rounds."""
    return Method(name="fixbn", norm=fixed(after=after), objective=objective, optimiser=optimiser)


__all__ = ["fixbn", "fixed"]
