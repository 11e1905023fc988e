"""Optimisers: how a client turns gradients into steps.

Links of a chain change the gradient (`clip`, `dampened`, SCAFFOLD's `control`); the last link makes the step (`sgd`,
`adam`, `adamw`). The learning rate is `training.rate` with its schedule. State covers all trained tensors, those that
stay with the client too.

    chain(clip(norm=1.0), sgd(momentum=0.9))
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hardy.core import tensors
from hardy.core.method import Method
from hardy.core.protocols import InPlace, Optimiser, Outcome, Setting
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.registry import part


def _require(holds: bool, what: str, value: float, limit: str) -> None:
    if not holds:
        raise HardyError(f"{what} is {value}; it must be {limit}.")


@part("optimiser", name="sgd")
@dataclass(frozen=True, kw_only=True)
class SGD(Optimiser):
    """Stochastic gradient descent: v ← μ v + g + decay · w, w ← w − η v."""

    momentum: float = 0.0
    """μ, how much of the steps before is kept"""
    nesterov: bool = False
    """look ahead: step along g + μ v"""
    weight_decay: float = 0.0
    """added to the gradient as decay · w"""
    kept: bool = False
    """the client keeps its momentum from round to round; otherwise it is born anew with each round"""

    def __post_init__(self) -> None:
        _require(0 <= self.momentum < 1, "momentum (μ) of sgd", self.momentum, "in [0, 1)")
        _require(self.weight_decay >= 0, "weight_decay of sgd", self.weight_decay, "0 or more")
        for option in ("nesterov", "kept"):
            if getattr(self, option) and not self.momentum:
                raise HardyError(f"sgd has {option} = true but no momentum, so it has no effect. Set momentum.")

    @property
    def makes_step(self) -> bool:
        return True

    def check(self, method: Method, setting: Setting) -> None:
        steps = max(setting.training.local_steps(len(client.train), 0) for client in setting.sorts)
        if self.momentum and not self.kept and steps == 1 and not method.pooled:
            raise HardyError(
                f"momentum of sgd is {self.momentum}, but clients take 1 local step and momentum is born anew each "
                "round, so it has no effect. Usual fix: kept = true, server_momentum, or more local steps."
            )

    def init(self, trained: Tensors, shared: Collection[str]) -> Tensors:
        return {f"momentum.{n}": torch.zeros_like(w) for n, w in trained.items()} if self.momentum else {}

    def update(
        self, gradient: Tensors, state: Tensors, params: Tensors, received: Tensors, rate: Tensor, key: Tensor
    ) -> tuple[Tensors, Tensors]:
        change, velocity = {}, {}
        for n, g in gradient.items():
            g = g + self.weight_decay * params[n]
            if self.momentum:
                v = velocity[f"momentum.{n}"] = self.momentum * state[f"momentum.{n}"] + g
                g = g + self.momentum * v if self.nesterov else v
            change[n] = -rate * g
        return change, {**state, **velocity}

    @property
    def in_place(self) -> InPlace:
        return self._step

    def _step(
        self, weights: Tensors, gradient: Tensors, state: Tensors, rate: Tensor, rounded: Tensors, begin: Tensors
    ) -> None:
        velocity = {n: state[f"momentum.{n}"] for n in weights} if self.momentum else None
        how: Any = {
            "decay": self.weight_decay,
            "velocity": velocity,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
        }
        if rounded:
            from hardy.kernels import descent

            descent.descend_rounded(weights, gradient, rate, rounded, begin=begin, **how)
        else:
            tensors.begin_at(weights, begin)
            tensors.descend(weights, gradient, rate, **how)


@part("optimiser")
@dataclass(frozen=True, kw_only=True)
class Adam(Optimiser):
    """Adam with bias correction (Kingma & Ba, ICLR 2015); weight decay is added to the gradient."""

    beta1: float = 0.9
    """decay of the mean of gradients"""
    beta2: float = 0.999
    """decay of the mean of squared gradients"""
    eps: float = 1e-8
    """ε, added to the root of the second moment"""
    weight_decay: float = 0.0
    """λ, times the weights"""
    kept: bool = False
    """the client keeps its moments from round to round; otherwise they are born anew with each round"""

    def __post_init__(self) -> None:
        _require(0 <= self.beta1 < 1, "beta1 of adam", self.beta1, "in [0, 1)")
        _require(0 <= self.beta2 < 1, "beta2 of adam", self.beta2, "in [0, 1)")
        _require(self.eps > 0, "eps of adam", self.eps, "above 0")
        _require(self.weight_decay >= 0, "weight_decay of adam", self.weight_decay, "0 or more")

    @property
    def makes_step(self) -> bool:
        return True

    def init(self, trained: Tensors, shared: Collection[str]) -> Tensors:
        moments = {f"{m}.{n}": torch.zeros_like(w) for m in ("adam_m", "adam_v") for n, w in trained.items()}
        return {"adam_step": next(iter(trained.values())).new_zeros(()), **moments}

    def update(
        self, gradient: Tensors, state: Tensors, params: Tensors, received: Tensors, rate: Tensor, key: Tensor
    ) -> tuple[Tensors, Tensors]:
        step = state["adam_step"] + 1
        left1, left2 = 1 - self.beta1**step, 1 - self.beta2**step
        change, moments = {}, {"adam_step": step}
        for n, g in gradient.items():
            g = g + self._decay_in_gradient * params[n]
            m = moments[f"adam_m.{n}"] = torch.lerp(state[f"adam_m.{n}"], g, 1 - self.beta1)
            v = moments[f"adam_v.{n}"] = torch.lerp(state[f"adam_v.{n}"], g * g, 1 - self.beta2)
            direction = (m / left1) / ((v / left2).sqrt() + self.eps)
            change[n] = -rate * (direction + self._decoupled_decay * params[n])
        return change, {**state, **moments}

    @property
    def _decay_in_gradient(self) -> float:
        return self.weight_decay

    @property
    def _decoupled_decay(self) -> float:
        return 0.0


@part("optimiser", name="adamw")
@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam whose weight decay is apart from the gradient: w ← w − η (direction + decay · w) (Loshchilov & Hutter,
    ICLR 2019)."""

    weight_decay: float = 0.01

    @property
    def _decay_in_gradient(self) -> float:
        return 0.0

    @property
    def _decoupled_decay(self) -> float:
        return self.weight_decay


@part("optimiser")
@dataclass(frozen=True, kw_only=True)
class Clip(Optimiser):
    """Shortens the gradient of a step, over all trained tensors together, to a greatest length."""

    norm: float
    """greatest L2 length"""

    def __post_init__(self) -> None:
        _require(self.norm > 0, "norm of clip", self.norm, "above 0")

    def update(
        self, gradient: Tensors, state: Tensors, params: Tensors, received: Tensors, rate: Tensor, key: Tensor
    ) -> tuple[Tensors, Tensors]:
        length = torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt()
        scale = (self.norm / length.clamp_min(1e-12)).clamp_max(1.0)
        return {n: g * scale for n, g in gradient.items()}, state


@part("optimiser")
@dataclass(frozen=True, kw_only=True)
class Chain(Optimiser):
    """Optimisers one after another; the last one makes the step. In Python: `chain(clip(norm=1.0), sgd())`."""

    links: tuple[Optimiser, ...] = ()
    """optimisers in order; the last makes the step"""

    def __post_init__(self) -> None:
        steps = [type(link).__name__ for link in self.links if link.makes_step]
        if len(steps) != 1 or not self.links[-1].makes_step:
            raise HardyError(
                f"chain of {[type(link).__name__ for link in self.links]}: exactly one link makes the step, and it "
                "must be the last. Usual fix: end with sgd, adam or adamw."
            )
        if any(isinstance(link, Chain) for link in self.links):
            raise HardyError("a chain inside a chain: put all links into one.")

    @property
    def makes_step(self) -> bool:
        return True

    @property
    def in_place(self) -> InPlace | None:
        return self.links[-1].in_place

    def init(self, trained: Tensors, shared: Collection[str]) -> Tensors:
        return {n: t for link in self.links for n, t in link.init(trained, shared).items()}

    def kept_state(self, trained: Tensors, shared: Collection[str]) -> Tensors:
        return {n: t for link in self.links for n, t in link.kept_state(trained, shared).items()}

    def shared(self, trained: Tensors) -> Tensors:
        return {n: t for link in self.links for n, t in link.shared(trained).items()}

    def update(
        self, gradient: Tensors, state: Tensors, params: Tensors, received: Tensors, rate: Tensor, key: Tensor
    ) -> tuple[Tensors, Tensors]:
        for link in self.links:
            gradient, state = link.update(gradient, state, params, received, rate, key)
        return gradient, state

    def finish(self, outcome: Outcome) -> tuple[Tensors, Tensors]:
        sent: Tensors = {}
        for link in self.links:
            state, more = link.finish(outcome)
            outcome, sent = replace(outcome, state=state), {**sent, **more}
        return outcome.state, sent


def chain(*links: Optimiser) -> Optimiser:
    """The links as one optimiser; those of a chain among them are taken out of it."""
    flat = tuple(one for link in links for one in link.links)
    return flat[0] if len(flat) == 1 else Chain(links=flat)


sgd, adam, adamw, clip = SGD, Adam, AdamW, Clip
__all__ = ["Chain", "adam", "adamw", "chain", "clip", "sgd"]
