"""FedWon: no normalisation at all; convolutions with standardised weights.

Zhuang & Lyu, FedWon: Triumphing Multi-Domain Federated Learning Without Normalization, ICLR 2024; the convolution is
that of Brock et al., ICLR 2021, the clipping that of Brock et al., ICML 2021.

W_i weights of output channel i, N of them · μ_i, σ²_i their mean and variance · γ gain · G_i gradient · λ threshold
1. Norm layers are left out.
2. Every convolution runs with Ŵ_i = γ (W_i − μ_i) / (σ_i √N); γ keeps the variance that a ReLU takes away.   (Eq. 1)
3. W is trained and averaged as in FedAvg.
4. Where batches are small, gradients are clipped channel by channel: G_i ← λ max(‖W_i‖, ε) G_i / ‖G_i‖ wherever
   ‖G_i‖ > λ max(‖W_i‖, ε).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi, sqrt

import torch
from torch import Tensor, nn

from hardy.core.method import Method
from hardy.core.protocols import Norm, Objective, Optimiser
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.parts.norms import Absent
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import chain, sgd
from hardy.registry import part

_LEAST = 1e-4
"""of N σ², so that equal weights are no division by zero"""


class StandardisedConv2d(nn.Conv2d):
    """A convolution with standardised weights (line 2)."""

    gain: float

    def forward(self, x: Tensor) -> Tensor:
        over = tuple(range(1, self.weight.dim()))
        var, mean = torch.var_mean(self.weight, over, correction=0, keepdim=True)
        scale = self.gain * torch.rsqrt((var * self.weight[0].numel()).clamp_min(_LEAST))
        out: Tensor = self._conv_forward(x, (self.weight - mean) * scale, self.bias)
        return out


@part("norm")
@dataclass(frozen=True, kw_only=True)
class StandardisedWeights(Absent):
    """No normalisation; the weights of every convolution are standardised."""

    gain: float = sqrt(2 / (1 - 1 / pi))
    """γ; the usual one is for ReLU"""

    def __post_init__(self) -> None:
        if not self.gain > 0:
            raise HardyError(f"gain (γ) of norm standardised_weights is {self.gain}; it must be above 0.")

    def prepare(self, model: nn.Module) -> nn.Module:
        found = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
        if not found:
            raise HardyError(
                "norm standardised_weights has no effect: the network has no convolution. Take norm layer, or another "
                "network."
            )
        for layer in found:
            layer.__class__ = StandardisedConv2d  # the same tensors under the same names
            vars(layer)["gain"] = self.gain
        return model


@part("optimiser")
@dataclass(frozen=True, kw_only=True)
class AdaptiveClip(Optimiser):
    """Shortens the gradient of each output channel, or of a whole bias, to a share of the length of its weights."""

    threshold: float = 0.64
    """λ; the default is ours, the paper chooses it by data set"""
    least: float = 1e-3
    """ε, the length that counts for shorter weights, so that biases may leave zero"""

    def __post_init__(self) -> None:
        for name in ("threshold", "least"):
            if not getattr(self, name) > 0:
                raise HardyError(f"{name} of adaptive_clip is {getattr(self, name)}; it must be above 0.")

    def update(
        self, gradient: Tensors, state: Tensors, params: Tensors, received: Tensors, rate: Tensor, key: Tensor
    ) -> tuple[Tensors, Tensors]:
        def shortened(g: Tensor, w: Tensor) -> Tensor:
            most = self.threshold * _lengths(w).clamp_min(self.least)
            return g * (most / _lengths(g).clamp_min(1e-12)).clamp_max(1.0)

        return {name: shortened(g, params[name]) for name, g in gradient.items()}, state


def _lengths(x: Tensor) -> Tensor:
    """The length of each row of a matrix or kernel, or of a whole vector."""
    over: Sequence[int] = range(1, x.dim()) if x.dim() > 1 else range(x.dim())
    return x.square().sum(tuple(over), keepdim=True).sqrt()


standardised_weights, adaptive_clip = StandardisedWeights, AdaptiveClip


@part("method")
def fedwon(
    *,
    norm: Norm = standardised_weights(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = chain(adaptive_clip(), sgd()),
) -> Method:
    """FedAvg without normalisation, on standardised weights."""
    return Method(name="fedwon", norm=norm, objective=objective, optimiser=optimiser)


__all__ = ["adaptive_clip", "fedwon", "standardised_weights"]
