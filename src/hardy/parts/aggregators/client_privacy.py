"""Differential privacy of clients: their moves are clipped, and Gaussian noise is added, before any rule sees them.

McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018 (DP-FedAvg); Andrew et al.,
Differentially Private Learning with Adaptive Clipping, NeurIPS 2021. The account is in `core/account`.

Δ_i move of client i · C clip · z noise · m clients asked in a round (of Poisson cohorts, expected)
sum:     the mean of what is left is x + (Σ clip(Δ_i) + N(0, z² C²)) / m, however many have answered.
updates: each update becomes x + clip(Δ_i) + N(0, z² C²), and any rule may follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor

from hardy.core import random, tensors
from hardy.core.account import Mechanism
from hardy.core.messages import Updates
from hardy.core.method import Method, Plan
from hardy.core.partition import Placement, Role, Tag
from hardy.core.protocols import RoundContext, Setting, walk
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.parts.aggregators.base import EqualWeights, Mean, Pipeline, Stage
from hardy.parts.aggregators.distances import move_lengths, sent_down
from hardy.parts.aggregators.stages import Bucketing
from hardy.parts.budgets import Full
from hardy.parts.norms import statistics_are_bounded
from hardy.registry import part

Entropy = Literal["seed", "system"]


@part("stage")
@dataclass(frozen=True, kw_only=True)
class ClientLevelDp(Stage):
    """Clips the move of each client and adds Gaussian noise, so that the model tells little of any one client.

    Every update counts the same after it; steps and losses are no longer told.
    """

    clip: float
    """C, the furthest a client may move (L2); with a quantile, where the search for it starts"""
    noise: float
    """z, deviation of the noise as a multiple of the clip; 0 only clips, and ε is infinite"""
    on: Literal["sum", "updates"] = "sum"
    """what the noise is on: the sum of the moves, and then the rule is the mean; or each update, and then it is any"""
    delta: float = 1e-5
    """δ of the account; it must be below 1 / clients"""
    quantile: float | None = None
    """γ: the clip follows this quantile of the lengths of moves, found under noise too; absent: it stays"""
    clip_rate: float = 0.2
    """η, how fast the clip follows: C ← C e^(−η (share of moves below C − γ))"""
    count_noise: float | None = None
    """deviation of the noise on the number of moves below the clip; absent: a twentieth of the cohort"""
    entropy: Entropy = "seed"
    """seed: the noise follows from the experiment's seed, for simulation alone: who knows the seed can take it off.
    system: from the operating system; the run can then not be repeated bit for bit"""

    def __post_init__(self) -> None:
        limits = {
            "clip": (0 < self.clip < inf, "above 0, and finite"),
            "noise": (0 <= self.noise < inf, "0 or more, and finite"),
            "delta": (0 < self.delta < 1, "in (0, 1)"),
            "quantile": (self.quantile is None or 0 < self.quantile < 1, "in (0, 1), or absent"),
            "clip_rate": (0 < self.clip_rate < inf, "above 0, and finite"),
            "count_noise": (self.count_noise is None or 0 < self.count_noise < inf, "above 0, or absent"),
        }
        for name, (holds, limit) in limits.items():
            if not holds:
                raise HardyError(f"{name} of client_level_dp is {getattr(self, name)}; it must be {limit}.")
        if self.quantile is None and (self.clip_rate != 0.2 or self.count_noise is not None):
            raise HardyError("clip_rate and count_noise of client_level_dp have no effect without a quantile.")
        if self.quantile is not None and self.on == "updates":
            raise HardyError(
                'client_level_dp with on = "updates" takes no quantile: the clip would be found from a sum of its own. '
                'Leave the quantile out, or take on = "sum".'
            )

    @property
    def changes_weights(self) -> bool:
        return False

    def check(self, method: Method, setting: Setting) -> None:
        whole = method.aggregator
        if method.pooled or method.weights is not Placement.SHARED:
            raise HardyError(f"client_level_dp has no effect on method {method.name!r}: its clients send no weights.")
        if not isinstance(whole, Pipeline) or not whole.pre or whole.pre[0] != self:
            raise HardyError(
                "client_level_dp must be the first stage (pre) of the outermost pipeline: tensors that pass beside it, "
                "or updates mixed before it, are covered by no noise."
            )
        if self.on == "sum" and (not isinstance(whole.rule, Mean) or len(whole.pre) > 1):
            other = whole.rule if not isinstance(whole.rule, Mean) else whole.pre[1]
            raise HardyError(
                f"client_level_dp adds noise that is enough for a sum, but {other} sees each update. Usual fix: "
                'rule = "mean" with no other stage, or on = "updates", which needs more clients for the same accuracy.'
            )
        for stage in whole.pre[1:]:
            if isinstance(stage, Bucketing) or (stage.changes_weights and not isinstance(stage, EqualWeights)):
                raise HardyError(
                    f"stage {stage} goes by losses, counts or numbers of clients, which no noise covers. Leave it out."
                )
        if not isinstance(method.budget, Full):
            raise HardyError(
                f"client_level_dp with budget {method.budget}: a client that trains several networks, or parts of one, "
                "is in more than one sum. Usual fix: budget full."
            )
        self._check_norm(method)
        self._check_numbers(setting)

    def _check_norm(self, method: Method) -> None:
        for branch in sorted(method.norm.branches or ()):
            where = method.norm.placement(Tag(Role.NORM_MEAN, branch=branch))
            if where is Placement.SHARED:
                raise HardyError(
                    f"client_level_dp with norm {method.norm}: noise on running statistics can make a variance "
                    "negative, and their counters carry none. Usual fix: norm group or layer, which have no "
                    "statistics, or local (fedbn), which keeps them at the client."
                )
            if where is Placement.REPORTED and not statistics_are_bounded(method.norm):
                raise HardyError(
                    f"norm {type(method.norm).__name__!r} of method {method.name!r} reports clients' statistics "
                    "without an account. Usual fix: noise above 0 and a bound for them (both are options of fedrbn), "
                    "or a norm that keeps them private (local)."
                )

    def _check_numbers(self, setting: Setting) -> None:
        if not self.delta < 1 / len(setting.clients):
            raise HardyError(
                f"delta of client_level_dp is {self.delta:g}; with {len(setting.clients)} clients it must be below "
                f"{1 / len(setting.clients):g}: giving one client's data away would satisfy it otherwise."
            )
        if self.on == "updates" and setting.sampling == "poisson":
            raise HardyError(
                'client_level_dp with on = "updates" shows how many clients answered, which Poisson cohorts must not. '
                "Usual fix: cohort.sampling = fixed."
            )
        if self.quantile is not None and self.noise >= 2 * self._count_noise(setting.cohort):
            raise HardyError(
                f"count_noise of client_level_dp is {self._count_noise(setting.cohort):g}; it must be above half of "
                f"noise, {self.noise / 2:g}, because finding the clip takes its part of the privacy."
            )

    def _count_noise(self, cohort: int) -> float:
        return cohort / 20 if self.count_noise is None else self.count_noise

    def _deviation(self, cohort: int) -> float:
        """Noise on the moves, as a multiple of the clip, such that moves and count together are worth `noise` (Andrew
        et al., Theorem 1)."""
        if self.quantile is None or not self.noise:
            return self.noise
        left = self.noise**-2 - (2 * self._count_noise(cohort)) ** -2
        return float(left**-0.5)

    def memory(self, context: RoundContext) -> Tensors:
        return {} if self.quantile is None else {"clip": torch.tensor(self.clip, dtype=torch.float64)}

    def apply(self, updates: Updates, context: RoundContext, memory: Tensors) -> tuple[Updates, Tensors]:
        count, lengths, sent = len(updates.slots), move_lengths(updates, context), sent_down(updates, context)
        cohort = context.cohort or count
        clip = memory["clip"].double() if self.quantile is not None else torch.tensor(self.clip, dtype=torch.float64)
        scale, deviation = (clip / lengths).clamp_max(1.0), clip * self._deviation(cohort)
        if self.on == "sum":
            scale, deviation = scale * (count / cohort), deviation / cohort
        matrix = (updates.matrix - sent).mul_(scale.to(updates.matrix))
        for rows, client in self._noisy_rows(updates):
            matrix[rows] += self._drawn(sent, context, updates.slots[0].base, client).mul_(deviation.to(sent))
        values = updates.shared | tensors.unflatten(matrix.add_(sent), updates.shared)
        alike = torch.ones_like(updates.weights)
        left = replace(updates, shared=values, weights=alike, steps=torch.ones_like(updates.steps), loss=0 * alike)
        return left, self._next_clip(lengths, clip, cohort, context, memory)

    def _noisy_rows(self, updates: Updates) -> list[tuple[slice, int]]:
        """Rows that get the same noise, and whose it is."""
        if not self.noise:
            return []
        if self.on == "sum":
            return [(slice(None), -1)]
        return [(slice(at, at + 1), slot.client) for at, slot in enumerate(updates.slots)]

    def _drawn(self, like: Tensor, context: RoundContext, *words: int) -> Tensor:
        """Standard normal numbers."""
        if self.entropy == "system":
            drawn = torch.from_numpy(random.system_normal(like.numel()))
            return drawn.view(like.shape).to(like)
        key = torch.tensor(context.seed, device=like.device)
        return random.normal(random.fold(key, "client level dp", context.round, *words), like.shape).to(like)

    def _next_clip(self, lengths: Tensor, clip: Tensor, cohort: int, context: RoundContext, memory: Tensors) -> Tensors:
        if self.quantile is None:
            return memory
        noise = self._drawn(lengths[:1], context, -2) * self._count_noise(cohort) if self.noise else 0.0
        below = ((lengths <= clip).double().sum() - len(lengths) / 2 + noise) / cohort + 0.5
        return {"clip": (clip * torch.exp(-self.clip_rate * (below - self.quantile))).to(memory["clip"]).view(())}

    def figures(self, memory: Tensors) -> dict[str, Any]:
        return {} if self.quantile is None else {"clip": float(memory["clip"].mean())}

    def mechanisms(self, plan: Plan, setting: Setting, rounds: int, asked: Sequence[int]) -> Sequence[Mechanism]:
        """A client that is replaced can change a sum by 2 C, one that is added or removed by C. Reported statistics
        say who was in a cohort, and stages that remember clients use it, so that sampling is then no protection, and
        nobody can be added or removed unseen."""
        remembering = (s for s in walk(plan.method.aggregator) if isinstance(s, Stage) and s.remembers_clients)
        known = bool(plan.names(Placement.REPORTED)) or any(remembering)
        replaced = known or setting.sampling == "fixed"
        return (
            Mechanism(
                what=f"{'sum of' if self.on == 'sum' else 'each of'} the clients' moves",
                unit="client",
                noise=self.noise / 2 if replaced else self.noise,
                share=1.0 if known else setting.cohort / len(setting.clients),
                sampling="fixed" if replaced else "poisson",
                times=max(asked) if known else rounds,
                delta=self.delta,
                simulated=self.entropy == "seed",
                on_updates=True,
            ),
        )


def move_limit(method: Method) -> float:
    """The furthest a client may move by itself, where nobody sees its move to cut it: under secure aggregation."""
    whole = method.aggregator
    clips = [s.clip for s in whole.pre if isinstance(s, ClientLevelDp)] if isinstance(whole, Pipeline) else []
    return min(clips, default=inf)


client_level_dp = ClientLevelDp
__all__ = ["client_level_dp"]
