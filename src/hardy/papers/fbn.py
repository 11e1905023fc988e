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

from hardy import tensors
from hardy.errors import HardyError
from hardy.messages import Updates
from hardy.method import Method
from hardy.models.layers import FederatedStatistics, Statistics
from hardy.papers.dsgd import dsgd
from hardy.partition import Role
from hardy.parts.aggregation import Aggregator, Frame, inside, mean, under
from hardy.parts.norm import Batch
from hardy.parts.objective import Objective, cross_entropy
from hardy.registry import part
from hardy.tensors import Tensors

Spread = Literal["rule", "mean"]


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Federated(Batch):
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
    def weighted(self) -> bool:
        return self.rule.weighted

    @property
    def least(self) -> int:
        return self.rule.least

    def _spread(self) -> Aggregator:
        return self.rule if self.spread == "rule" else mean()

    def memory(self, frame: Frame) -> Tensors:
        return {
            **under("rule", self.rule.memory(_beside(frame))),
            **under("spread", self._spread().memory(_around_zero(_beside(frame)))),
        }

    def finish(self, folded: Any, frame: Frame, memory: Tensors) -> tuple[Tensors, Tensors]:
        if not folded:
            return frame.shared, memory
        updates, sent = Updates.join(folded), _beside(frame)
        told = replace(updates, shared=_channels(updates.shared, frame))
        pooled, of_rule = _run(self.rule, told, sent, inside("rule", memory))
        apart = {"mean": (told.shared["mean"] - pooled["mean"][updates.bases]).square()}
        between, of_spread = _run(
            self._spread(), replace(told, shared=apart), _around_zero(sent), inside("spread", memory)
        )
        counts = _of(Role.NORM_COUNT, updates.shared, frame)
        seen = tensors.flatten(counts, updates.weights).clamp_min(0.0)
        total = seen.new_zeros(frame.bases, seen.shape[1]).index_add(0, updates.bases, seen)
        widths = [frame.shared[f"{n.removesuffix('count')}mean"].shape[1] for n in sorted(counts)]
        c = torch.where(total > 1, total / (total - 1), 1.0)
        c = torch.cat([c[:, layer : layer + 1].expand(-1, width) for layer, width in enumerate(widths)], 1)
        least = (1 - self.momentum) * sent.shared["var"]
        variance = c * (pooled["var"] + between["mean"] / self.momentum) + (1 - c) * least
        shared = {
            **_apart(pooled["mean"], frame, Role.NORM_MEAN),
            **_apart(variance.maximum(least), frame, Role.NORM_VAR),
            **{n: torch.zeros_like(frame.shared[n]) for n in counts},
        }
        return shared, {**under("rule", of_rule), **under("spread", of_spread)}


def _run(rule: Aggregator, updates: Updates, frame: Frame, memory: Tensors) -> tuple[Tensors, Tensors]:
    return rule.finish(rule.fold(None, updates, frame), frame, memory)


def _of(role: Role, values: Tensors, frame: Frame) -> Tensors:
    return {n: t for n, t in values.items() if frame.roles[n] is role}


def _channels(values: Tensors, frame: Frame) -> Tensors:
    """Means and variances of all layers side by side, in the order of their names."""
    rows = next(iter(values.values()))
    return {
        "mean": tensors.flatten(_of(Role.NORM_MEAN, values, frame), rows),
        "var": tensors.flatten(_of(Role.NORM_VAR, values, frame), rows),
    }


def _apart(matrix: Tensor, frame: Frame, role: Role) -> Tensors:
    """The layers' own tensors again."""
    return tensors.copies(tensors.unflatten(matrix, _of(role, frame.shared, frame)))


def _beside(frame: Frame) -> Frame:
    """The round as a rule for the statistics sees it."""
    return replace(
        frame,
        shared=_channels(frame.shared, frame),
        roles={**frame.roles, "mean": Role.NORM_MEAN, "var": Role.NORM_VAR},
    )


def _around_zero(frame: Frame) -> Frame:
    """The same for the spread of the means: zero is what a base that nobody trained keeps."""
    return replace(frame, shared={"mean": torch.zeros_like(frame.shared["mean"])})


federated = Federated


@part("method")
def fbn(
    *, momentum: float = 0.99, objective: Objective = cross_entropy(), aggregator: Aggregator = mean(weigh="uniform")
) -> Method:
    """DSGD on a network with Federated BatchNorm, as in the paper; take it with training.steps = 1. For FedAvg with
    several local steps: fedavg with norm federated."""
    return dsgd(momentum=momentum, norm=federated(), objective=objective, aggregator=aggregator).replace(name="fbn")


__all__ = ["fbn", "federated"]
