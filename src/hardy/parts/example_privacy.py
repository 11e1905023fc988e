"""DP-SGD: the gradient of each example is clipped, and Gaussian noise added, before any optimiser sees it.

Abadi et al., Deep Learning with Differential Privacy, CCS 2016.

    g = (Σ_i clip(g_i) + N(0, z² C²)) / B

It protects each example of a client, also from the server. Gradients of single examples come from vmap over a batch of
one, so examples must not mix in the network: BatchNorm is refused.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Literal

import torch
from torch import Tensor

from hardy.core import random
from hardy.core.account import Mechanism, epsilon_of
from hardy.core.federation import examples_of
from hardy.core.method import Method, Plan
from hardy.core.net import Net
from hardy.core.protocols import Batch, Objective, Setting, StepResult, Wrapper, name_part, walk
from hardy.core.tensors import Tensors
from hardy.core.training import Training
from hardy.errors import HardyError
from hardy.parts.aggregators.base import EqualWeights, Stage
from hardy.parts.objectives import CrossEntropy, Ramped
from hardy.registry import part


@part("objective")
@dataclass(frozen=True, kw_only=True)
class DpSgd(Wrapper):
    """Another objective with the gradient of each example clipped, and noise on their mean."""

    inner: Objective = CrossEntropy()
    """what is minimised"""
    clip: float = 1.0
    """C, greatest length of the gradient of one example (L2)"""
    noise: float = 1.0
    """z, deviation of the noise on the sum of gradients as a multiple of the clip; 0 only clips, and ε is infinite"""
    delta: float = 1e-5
    """δ of the account; it must be below 1 / rows of a client"""
    entropy: Literal["seed", "system"] = "seed"
    """seed: the noise follows from the experiment's seed, for simulation alone: who knows the seed can take it off.
    system: keyed by the operating system at every step; the run can then not be repeated bit for bit"""

    def __post_init__(self) -> None:
        limits = {
            "clip": (0 < self.clip < inf, "above 0, and finite"),
            "noise": (0 <= self.noise < inf, "0 or more, and finite"),
            "delta": (0 < self.delta < 1, "in (0, 1)"),
        }
        for name, (holds, limit) in limits.items():
            if not holds:
                raise HardyError(f"{name} of dp_sgd is {getattr(self, name)}; it must be {limit}.")

    def check(self, method: Method, setting: Setting) -> None:
        if method.norm.branches is not None:
            raise HardyError(
                f"dp_sgd with norm {type(method.norm).__name__!r}: in a batch norm examples mix, so that the gradient "
                "of one holds what the others are. Usual fix: norm group."
            )
        for inner in walk(self.inner):
            if isinstance(inner, Objective) and (inner.mixes_examples or inner.private((1, 8, 8), 1)):
                raise HardyError(
                    f"dp_sgd around {inner}: it looks at several examples together. Usual fix: cross_entropy or an "
                    "adversarial objective without tensors of its own."
                )
        self._check_around(method, setting)
        for stage in walk(method.aggregator):
            if isinstance(stage, Stage) and stage.changes_weights and not isinstance(stage, EqualWeights):
                raise HardyError(
                    f"dp_sgd with stage {stage}: it weighs by losses, which carry no noise, and so lets them into the "
                    "network. Leave the stage out."
                )
        rows = list(examples_of(setting.clients))
        if min(rows) == 1 and setting.training.batch > 1 and not method.pooled:
            raise HardyError(
                f"dp_sgd: client {rows.index(1)} has 1 row, which is shown twice in a batch of up to "
                f"{setting.training.batch}, so that clipping bounds it by twice the clip. Give it more rows, or set "
                "training.batch = 1."
            )
        if not self.delta < 1 / (most := sum(rows) if method.pooled else max(rows)):
            raise HardyError(f"delta of dp_sgd is {self.delta:g}; with {most} rows it must be below {1 / most:.2g}.")

    def _check_around(self, method: Method, setting: Setting) -> None:
        for outer in walk(method.objective):
            if outer is self or not isinstance(outer, Objective) or not any(part is self for part in walk(outer)):
                continue
            if outer.adds_rows:
                raise HardyError(
                    f"{name_part(outer)} around dp_sgd adds a gradient of the client's images that is neither clipped "
                    "nor covered by noise. Usual fix: dp_sgd around it, or leave one of them out."
                )
            if outer.mixes_examples:
                raise HardyError(
                    f"{name_part(outer)} around dp_sgd lets the gradient of one example hang on the client's others. "
                    "Leave one of them out."
                )
            if isinstance(outer, Ramped) and outer.moves(self):
                raise HardyError(
                    f"ramped moves {outer.number} of dp_sgd over the rounds, and the account takes one value for all "
                    "of them. Ramp another number, or leave it out."
                )
        for kind in sorted({client.kind for client in setting.sorts}):
            if not any(isinstance(part, DpSgd) for part in walk(method.objective.for_client(kind, 0))):
                raise HardyError(
                    f"dp_sgd leaves the examples of clients of kind {kind} without noise, and ε is of all examples. "
                    "Usual fix: dp_sgd around by_kind, or in each of its objectives."
                )

    @property
    def adds_rows(self) -> bool:
        return False

    def gradient(
        self, outer: Objective, net: Net, private: Tensors, batch: Batch, key: Tensor, received: Tensors
    ) -> StepResult:
        count = len(batch.x)

        def one(x: Tensor, y: Tensor, key: Tensor) -> tuple[Tensors, Tensor]:
            alone = net.on(net.trained, net.buffers)
            found = self.inner.gradient(outer, alone, private, batch._replace(x=x[None], y=y[None]), key, received)
            length = torch.stack([g.square().sum() for g in found.gradient.values()]).sum().sqrt()
            scale = (self.clip / length.clamp_min(1e-30)).clamp_max(1.0) / count
            return {name: g * scale for name, g in found.gradient.items()}, found.loss

        keys = random.fold(key, torch.arange(count, device=key.device))
        each, losses = torch.vmap(one)(batch.x, batch.y, keys)
        gradient = {name: g.sum(0) for name, g in each.items()}
        if self.noise:
            deviation, key = self.noise * self.clip / count, self._noise_key(key)
            for at, (name, g) in enumerate(gradient.items()):
                gradient[name] = g + deviation * random.normal(random.fold(key, at), g.shape, g.dtype)
        return StepResult(gradient, {}, net.buffers, losses.mean())

    def _noise_key(self, key: Tensor) -> Tensor:
        key = random.fold(key, "dp_sgd")
        return random.fold(key, secrets.randbits(63)) if self.entropy == "system" else key

    def mechanisms(self, plan: Plan, setting: Setting, rounds: int, asked: Sequence[int]) -> Sequence[Mechanism]:
        """Of the client whose examples are worst off. One that is replaced changes the sum by 2 C at most."""
        rows = list(examples_of(setting.clients))
        if plan.method.pooled:
            rows, asked = [sum(rows)], [rounds]
        found = {self._of_client(setting.training, n, times) for n, times in zip(rows, asked, strict=True)}
        return (max(found, key=lambda mechanism: epsilon_of([mechanism], self.delta)),)

    def _of_client(self, training: Training, rows: int, rounds: int) -> Mechanism:
        size, noise = min(training.batch, rows), self.noise / 2
        if training.independent:
            assert training.steps is not None
            noise, share, times = noise / sqrt(training.replays), size / rows, training.steps * rounds
        elif training.steps is not None:
            share, times = 1.0, _worth(-(-training.steps * size // rows), rows % size > 0) * training.replays * rounds
        else:
            wraps = training.remainder == "wrap" and rows % size > 0
            share, times = 1.0, (1 + wraps) * training.epochs_at(0) * training.replays * rounds
        return Mechanism(
            what="gradients of single examples, of the client worst off",
            unit="example",
            noise=noise,
            share=share,
            times=times,
            delta=self.delta,
            simulated=self.entropy == "seed",
        )


def _worth(passes: int, straddles: bool) -> int:
    """How often a row counts in so many passes over the rows. A batch that begins in one pass and ends in the next may
    hold a row twice: twice as far is worth four times."""
    return 4 * (passes // 2) + passes % 2 if straddles else passes


dp_sgd = DpSgd
__all__ = ["dp_sgd"]
