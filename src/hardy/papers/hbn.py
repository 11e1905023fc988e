"""HBN: every client learns how much of its batch's statistics to mix with everybody's.

Chen et al., Hybrid Batch Normalisation: Resolving the Dilemma of Batch Normalisation in Federated Learning, ICML 2025.

w weights · (u, v) everybody's mean and variance · m, s² those of a batch · a_i client i's share of its batch, a number
a channel, σ(0) = ½ at first · β momentum · N values a channel sees in all clients' first batches
1. The server sends w and (u, v).
2. At these weights, before any step, client i measures m_i and s²_i; they are unbiased, since w has not moved yet.
3. It trains on batches normalised by (1 − a_i) u + a_i m and (1 − a_i) v + a_i s²; gradients pass through m and s²,
   and to a_i, which it keeps for itself.
4. The server takes the mean of w, and moves (u, v) by β to the mean and variance of all (m_i, s²_i) together, by the
   law of total variance with N/(N−1).
5. (u, v) serve predictions.

Here the batch of the first step is what is measured, with its attacked images under adversarial training, as in the
authors' code, so that no pass is added. Their code
measures the mixed statistics, which hold (u, v) already; Hardy measures the batch's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hardy.core.layers import AffineParameters, FederatedStatistics, Statistics, channel_moments, scale_and_shift
from hardy.core.method import Method
from hardy.core.partition import Placement, Role, Tag
from hardy.core.protocols import Objective, Optimiser
from hardy.errors import HardyError
from hardy.papers.fbn import Federated
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd
from hardy.registry import part


class HybridStatistics(FederatedStatistics):
    """What the server sent, what was measured at it, and the share a = σ(mix)."""

    roles: ClassVar[Mapping[str, str]] = {"mix": Role.NORM_MIX}
    mix: Tensor
    first: Tensor
    """whether the server has spoken since the last pass"""

    def __init__(self, features: int, *, affine: bool = False, momentum: float = 0.1, noise: float = 0.0) -> None:
        super().__init__(features, affine=affine, momentum=momentum, noise=noise)
        self.mix = nn.Parameter(torch.zeros(features))

    def normalise(self, x: Tensor, affine: AffineParameters, eps: float) -> Tensor:
        mean, var = channel_moments(x, self.mean.dtype)
        before = self.mean, self.var, self.count
        self.follow(mean.detach(), var.detach(), x.numel() / x.shape[1])
        pooled = zip((self.mean, self.var, self.count), before, strict=True)
        self.mean, self.var, self.count = (torch.where(self.first, new, old) for new, old in pooled)
        share = torch.sigmoid(self.mix)
        return scale_and_shift(
            x, torch.lerp(self.sent_mean, mean, share), torch.lerp(self.sent_var, var, share), affine, eps
        )

    def begin(self) -> None:
        """Line 2: only what passes first is measured; what comes after a step is seen by other weights. Clean and
        attacked images of that step are pooled."""
        self.first = self.count == 0


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Hybrid(Federated):
    """BatchNorm that mixes its batch's statistics with everybody's, by shares that each client learns and keeps."""

    keeps: ClassVar[type[Statistics]] = HybridStatistics

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise:
            raise HardyError(
                f"noise of norm hybrid is {self.noise}, but its statistics are measured once a round and noise is "
                "added at every step. Take norm federated, or leave it out."
            )

    def placement(self, tag: Tag) -> Placement:
        return Placement.PRIVATE if tag.role is Role.NORM_MIX else Placement.SHARED


hybrid = Hybrid


@part("method")
def hbn(*, momentum: float = 0.1, objective: Objective = cross_entropy(), optimiser: Optimiser = sgd()) -> Method:
    """FedAvg with Hybrid BatchNorm; momentum is β."""
    return Method(name="hbn", norm=hybrid(momentum=momentum), objective=objective, optimiser=optimiser)


__all__ = ["hbn", "hybrid"]
