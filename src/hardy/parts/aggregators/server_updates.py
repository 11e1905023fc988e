"""Server updates: what the server does with the model that a rule has made of the round's replies.

Δ = what the rule found − what was sent down, the round's pseudo-gradient with its sign turned. Server optimisers step
along it (Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2; Hsu et al., arXiv:1909.06335, for
momentum). They see weights and affine parameters only; running statistics are the rule's.

    pipeline(rule=mean(), post=(server_adam(rate=0.01),))
"""

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from hardy.core import random, tensors
from hardy.core.method import Method
from hardy.core.partition import Placement, Role, Tag
from hardy.core.protocols import Setting
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.parts.aggregators.base import Pipeline, ServerUpdate
from hardy.registry import part


@dataclass(frozen=True, kw_only=True)
class _ServerOptimiser(ServerUpdate):
    rate: float = 1.0
    """η of the server"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least, most = (0.0, 1.0) if field.name in ("momentum", "beta1", "beta2") else (1e-30, float("inf"))
            if not least <= value < most:
                limit = "in [0, 1)" if most == 1 else "above 0"
                raise HardyError(f"{field.name} of {type(self).__name__} is {value}; it must be {limit}.")


@part("server_update")
@dataclass(frozen=True, kw_only=True)
class ServerMomentum(_ServerOptimiser):
    """FedAvgM: v ← β v + Δ, x ← x + η v.

    With x = 1, Δ = 0.5, β = 0.9 and v = 1 from the round before, v = 1.4 and x = 2.4.
    """

    momentum: float = 0.9
    """β, how much of the steps before is kept"""

    def memory(self, shared: Tensors) -> Tensors:
        return {f"v.{n}": torch.zeros_like(t) for n, t in shared.items()}

    def apply(self, before: Tensors, after: Tensors, memory: Tensors) -> tuple[Tensors, Tensors]:
        velocity = {n: self.momentum * memory[f"v.{n}"] + (after[n] - x) for n, x in before.items()}
        return {n: x + self.rate * velocity[n] for n, x in before.items()}, {f"v.{n}": v for n, v in velocity.items()}


@dataclass(frozen=True, kw_only=True)
class _Adaptive(_ServerOptimiser):
    """m ← β₁ m + (1 − β₁) Δ, v by the rule below, x ← x + η m / (√v + τ). Both start at m = 0 and v = τ²."""

    rate: float = 0.01
    beta1: float = 0.9
    """β₁, decay of the mean of the moves"""
    adaptivity: float = 1e-3
    """τ: small adapts fully, large is momentum with rate η/τ"""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """The next v, given Δ²."""
        raise NotImplementedError

    def memory(self, shared: Tensors) -> Tensors:
        first = {f"m.{n}": torch.zeros_like(t) for n, t in shared.items()}
        return first | {f"v.{n}": torch.full_like(t, self.adaptivity**2) for n, t in shared.items()}

    def apply(self, before: Tensors, after: Tensors, memory: Tensors) -> tuple[Tensors, Tensors]:
        shared, kept = {}, {}
        for n, x in before.items():
            delta = after[n] - x
            m = kept[f"m.{n}"] = self.beta1 * memory[f"m.{n}"] + (1 - self.beta1) * delta
            v = kept[f"v.{n}"] = self.second_moment(memory[f"v.{n}"], delta.square())
            shared[n] = x + self.rate * m / (v.sqrt() + self.adaptivity)
        return shared, kept


@part("server_update")
@dataclass(frozen=True, kw_only=True)
class ServerAdagrad(_Adaptive):
    """FedAdagrad: v ← v + Δ²."""

    beta1: float = 0.0

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@part("server_update")
@dataclass(frozen=True, kw_only=True)
class ServerAdam(_Adaptive):
    """FedAdam: v ← β₂ v + (1 − β₂) Δ²."""

    beta2: float = 0.99
    """β₂, decay of the mean of the squared moves"""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@part("server_update")
@dataclass(frozen=True, kw_only=True)
class ServerYogi(_Adaptive):
    """FedYogi: v ← v − (1 − β₂) Δ² sign(v − Δ²), which forgets large Δ more slowly."""

    beta2: float = 0.99
    """β₂, decay of the mean of the squared moves"""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()


@part("server_update")
@dataclass(frozen=True, kw_only=True)
class WeightAverage(ServerUpdate):
    """A running average of the model over rounds (EMA): x̄ ← d x̄ + (1 − d) x. Training goes on with x; x̄ is served.

    Running statistics are averaged alike, so that x̄ has statistics of its own. The average starts at the first round's
    result. With d = 0.9, x̄ = 1 and x = 2 it becomes 1.1.
    """

    decay: float = 0.9
    """d, how much of the average before is kept"""
    own_statistics: bool = False
    """serve x̄ with statistics that clients keep themselves (FedBN, FedRBN), which follow x and not x̄: let the norm's
    momentum be small, so that they lag as far behind"""
    roles: ClassVar[frozenset[Role]] = frozenset({Role.WEIGHT, Role.NORM_AFFINE, Role.NORM_MEAN, Role.NORM_VAR})

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise HardyError(f"decay of weight_average is {self.decay}; it must be in (0, 1).")

    def check(self, method: Method, setting: Setting) -> None:
        norm, whole = method.norm, method.aggregator
        tracked = isinstance(whole, Pipeline) and self in whole.post
        for branch in sorted(norm.branches or ()):
            here = norm.placement(Tag(Role.NORM_MEAN, branch=branch)) is Placement.SHARED
            tracked = tracked and here and norm.statistics_rule(branch, whole) is whole
        lags = norm.branches is not None and not tracked and norm.inference_statistics != "recomputed"
        if lags and not self.own_statistics:
            raise HardyError(
                f"weight_average serves averaged weights, but norm {type(norm).__name__!r} keeps statistics of the "
                "others where they cannot be averaged. Usual fix: norm batch with the average in the post of the "
                'outermost pipeline, inference_statistics = "recomputed", or own_statistics = true.'
            )
        if self.own_statistics and not lags:
            raise HardyError(
                f"weight_average has own_statistics = true, but norm {type(norm).__name__!r} keeps none that its "
                "average lacks, so it has no effect. Leave it out."
            )

    def memory(self, shared: Tensors) -> Tensors:
        rounds = torch.zeros((), dtype=torch.int64)
        return {"rounds": rounds, **{f"mean.{n}": t.clone() for n, t in shared.items()}}

    def apply(self, before: Tensors, after: Tensors, memory: Tensors) -> tuple[Tensors, Tensors]:
        first = memory["rounds"] == 0
        averaged = {
            f"mean.{n}": torch.where(first, x, torch.lerp(memory[f"mean.{n}"], x, 1 - self.decay))
            for n, x in after.items()
        }
        return {}, {"rounds": memory["rounds"] + 1, **averaged}

    def served(self, shared: Tensors, memory: Tensors) -> Tensors:
        averaged = {n.removeprefix("mean."): t for n, t in memory.items() if n.startswith("mean.")}
        return {**shared, **tensors.select(averaged, (n for n in averaged if n in shared))}


@part("server_update")
@dataclass(frozen=True, kw_only=True)
class GaussianNoise(ServerUpdate):
    """Noise on the weights after the rule: x ← x + σ ξ, the "weak" differential privacy of Sun et al. (2019).

    With clipping before the mean it makes backdoors fade. It gives no privacy that one could state: σ is far too small
    for that, and the noise follows from its seed.
    """

    deviation: float
    """σ, the standard deviation of the noise"""
    seed: int = 0
    """what the noise follows from"""

    def __post_init__(self) -> None:
        if not 0 < self.deviation < float("inf"):
            raise HardyError(f"deviation (σ) of gaussian_noise is {self.deviation}; it must be above 0, and finite.")

    def memory(self, shared: Tensors) -> Tensors:
        return {"rounds": torch.zeros((), dtype=torch.int64)}

    def apply(self, before: Tensors, after: Tensors, memory: Tensors) -> tuple[Tensors, Tensors]:
        key = random.fold(memory["rounds"], self.seed, "noise")
        noisy = {n: x + self.deviation * random.normal(random.fold(key, n), x.shape, x.dtype) for n, x in after.items()}
        return noisy, {"rounds": memory["rounds"] + 1}


server_momentum, server_adagrad, server_adam, server_yogi = ServerMomentum, ServerAdagrad, ServerAdam, ServerYogi
weight_average, gaussian_noise = WeightAverage, GaussianNoise
__all__ = ["gaussian_noise", "server_adagrad", "server_adam", "server_momentum", "server_yogi", "weight_average"]
