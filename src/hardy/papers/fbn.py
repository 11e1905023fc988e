"""FBN: BatchNorm whose statistics are those of all clients' batches together.

Guerraoui et al., Overcoming the Challenges of Batch Normalization in Federated Learning, 2024, Algorithm 2.

u, v shared running mean and variance · u_i, v_i client i's · m_i, s²_i mean and variance of its batch · β momentum
n clients · N values a channel sees in all their batches
1. Clients normalise by the (u, v) they were sent: constants, so that no gradient passes through them.       (line 3)
2. u_i = (1−β) u + β m_i and v_i = (1−β) v + β s²_i are sent up.                                            (lines 4–7)
3. u ← mean of u_i.                                                                                          (line 9)
4. v ← c (mean of v_i + 1/β · mean of (u_i − u)²) + (1−c)(1−β) v with c = N/(N−1): the law of total variance. (line 10)

The paper has clients multiply s²_i by c; only the server knows N when batches are unequal or clients are sampled, so
it does so here, with the same result. Clients that take several steps before they answer pool the batches of all of
them into m_i and s²_i, by the same law. A robust rule takes the place of each of the three means.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hardy.core import tensors
from hardy.core.layers import FederatedStatistics, Statistics
from hardy.core.messages import Updates
from hardy.core.method import Method
from hardy.core.partition import Role
from hardy.core.protocols import Aggregator, Objective, Optimiser, RoundContext
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.papers.dsgd import dsgd
from hardy.parts.aggregators.base import inside, mean, under
from hardy.parts.norms import BatchNormalisation
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd
from hardy.registry import part

Spread = Literal["rule", "mean"]


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Federated(BatchNormalisation):
    """BatchNorm whose shared statistics equal those of one machine that sees every client's batch."""

    keeps: ClassVar[type[Statistics]] = FederatedStatistics
    spread: Spread = "rule"
    """how the spread of the clients' means is taken: by the rule for the statistics, or by the plain mean"""

    def __post_init__(self) -> None:
        if not 0 < self.momentum <= 1:
            raise HardyError(f"momentum (β) of norm federated is {self.momentum}; it must be in (0, 1].")

    def statistics_rule(self, branch: str, rule: Aggregator) -> Aggregator:
        return _TotalVariance(rule=rule, momentum=self.momentum, spread=self.spread)


@dataclass(frozen=True, kw_only=True)
class _TotalVariance(Aggregator):
    """Lines 9 and 10 with any rule in place of the mean. The variance never falls below (1−β) v, which no honest client
    could send."""

    rule: Aggregator
    momentum: float
    spread: Spread

    @property
    def uses_weights(self) -> bool:
        return self.rule.uses_weights

    @property
    def min_updates(self) -> int:
        return self.rule.min_updates

    def _spread(self) -> Aggregator:
        return self.rule if self.spread == "rule" else mean()

    def memory(self, context: RoundContext) -> Tensors:
        return {
            **under("rule", self.rule.memory(_beside(context))),
            **under("spread", self._spread().memory(_around_zero(_beside(context)))),
        }

    def finish(self, folded: Any, context: RoundContext, memory: Tensors) -> tuple[Tensors, Tensors]:
        if not folded:
            return context.shared, memory
        updates, sent = Updates.join(folded), _beside(context)
        told = updates.holding(_channels(updates.shared, context))
        pooled, of_rule = _run(self.rule, told, sent, inside("rule", memory))
        apart = {"mean": (told.shared["mean"] - pooled["mean"][updates.bases]).square()}
        between, of_spread = _run(self._spread(), told.holding(apart), _around_zero(sent), inside("spread", memory))
        counts = _of(Role.NORM_COUNT, updates.shared, context)
        seen = tensors.flatten(counts, updates.weights).clamp_min(0.0)
        total = seen.new_zeros(context.bases, seen.shape[1]).index_add(0, updates.bases, seen)
        widths = [context.shared[f"{n.removesuffix('count')}mean"].shape[1] for n in sorted(counts)]
        c = torch.where(total > 1, total / (total - 1), 1.0)
        c = torch.cat([c[:, layer : layer + 1].expand(-1, width) for layer, width in enumerate(widths)], 1)
        least = (1 - self.momentum) * sent.shared["var"]
        variance = c * (pooled["var"] + between["mean"] / self.momentum) + (1 - c) * least
        shared = {
            **_apart(pooled["mean"], context, Role.NORM_MEAN),
            **_apart(variance.maximum(least), context, Role.NORM_VAR),
            **{n: torch.zeros_like(context.shared[n]) for n in counts},
        }
        return shared, {**under("rule", of_rule), **under("spread", of_spread)}


def _run(rule: Aggregator, updates: Updates, context: RoundContext, memory: Tensors) -> tuple[Tensors, Tensors]:
    return rule.finish(rule.fold(None, updates, context), context, memory)


def _of(role: Role, values: Tensors, context: RoundContext) -> Tensors:
    return {n: t for n, t in values.items() if context.roles[n] is role}


def _channels(values: Tensors, context: RoundContext) -> Tensors:
    """Means and variances of all layers side by side, in the order of their names."""
    rows = next(iter(values.values()))
    return {
        "mean": tensors.flatten(_of(Role.NORM_MEAN, values, context), rows),
        "var": tensors.flatten(_of(Role.NORM_VAR, values, context), rows),
    }


def _apart(matrix: Tensor, context: RoundContext, role: Role) -> Tensors:
    """The layers' own tensors again."""
    return tensors.copies(tensors.unflatten(matrix, _of(role, context.shared, context)))


def _beside(context: RoundContext) -> RoundContext:
    """The round as a rule for the statistics sees it."""
    return replace(
        context,
        shared=_channels(context.shared, context),
        roles={**context.roles, "mean": Role.NORM_MEAN, "var": Role.NORM_VAR},
    )


def _around_zero(context: RoundContext) -> RoundContext:
    """The same for the spread of the means: zero is what a base that nobody trained keeps."""
    return replace(context, shared={"mean": torch.zeros_like(context.shared["mean"])})


federated = Federated


@part("method")
def fbn(
    *,
    momentum: float = 0.99,
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
    aggregator: Aggregator = mean(weigh="uniform"),
) -> Method:
    """DSGD on a network with Federated BatchNorm, as in the paper; take it with training.steps = 1. For FedAvg with
    several local steps: fedavg with norm federated."""
    made = dsgd(momentum=momentum, norm=federated(), objective=objective, optimiser=optimiser, aggregator=aggregator)
    return made.replace(name="fbn")


__all__ = ["fbn", "federated"]
