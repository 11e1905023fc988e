"""SFAT: clients whose adversarial loss is small count for more, which slackens the inner maximisation of the others.

Zhu et al., Combating Exacerbated Heterogeneity for Robust Models in Federated Learning, ICLR 2023, Algorithm 1.

N_k examples of client k · L_k its adversarial loss · θ_k its weights · K̂ clients are chosen · α slack
1. Client k trains on attacked images and sends θ_k and L_k.                                       (lines 3–5)
2. The server sorts N_k/N · L_k; the K̂ smallest get P_k = (1 + α)/(1 − α), the others P_k = 1.      (lines 7–8)
3. θ ← Σ P_k N_k θ_k / Σ P_k N_k; norm layers are averaged as in FedAvg.                            (line 9)
The paper divides by 2α/(1 − α) more, so that its weights do not sum to one: `as_published`.
A loss is only a client's word. Before 2, those that cannot be believed or have had their turn are passed over.
"""

from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Any

import torch

from hardy.attacks.gradient import pgd
from hardy.core import tensors
from hardy.core.messages import Updates
from hardy.core.method import Method
from hardy.core.protocols import Norm, Objective, Optimiser, RoundContext
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.papers.fat import where_affordable
from hardy.papers.fedavg import proximal
from hardy.papers.scaffold import control, control_mean
from hardy.parts.adversarial import adversarial
from hardy.parts.aggregators.base import Stage, by_role, equal_weights, mean, pipeline
from hardy.parts.norms import batch
from hardy.parts.optimisers import chain, sgd
from hardy.registry import part


@part("stage")
@dataclass(frozen=True, kw_only=True)
class Slack(Stage):
    """Multiplies the weights of the clients with the smallest N_k L_k by (1 + α)/(1 − α)."""

    alpha: float = 1 / 6
    """α; below 0 the smallest losses count for less (Re-SFAT in Table 10)"""
    chosen: int = 1
    """K̂; never more than half of the clients that could be chosen"""
    largest: bool = False
    """choose the largest losses (Re-SFAT in Figure 4)"""
    by_size: bool = True
    """sort N_k L_k, as in the paper; false: L_k, as in the authors' code"""
    kind: str | None = "AT"
    """choose among clients of this kind and those without one, since the loss of a client that is not attacked says
    nothing; absent: among all"""
    start: int = 1
    """first round with slack; the authors' code has 2"""
    anneal: int | None = None
    """rounds in which (1 + α)/(1 − α) falls to 1 along a line; absent: it stays"""
    believed: float = 100.0
    """times a loss may be below or above the median and still be chosen; inf: any"""
    turns: float = 0.5
    """share of its rounds in which a client may be chosen; 1: all"""
    as_published: bool = False
    """weights that sum to ΣP / (ΣP + 2α/(1 − α)): every round scales the model"""
    shrink: float = 1.0
    """what the model is multiplied by every round; with α = 0 the control "FAT times a constant" """

    def __post_init__(self) -> None:
        limits = {
            "alpha": (-1 < self.alpha < 1, "in (-1, 1)"),
            "chosen": (self.chosen >= 1, "1 or more"),
            "start": (self.start >= 1, "1 or more"),
            "anneal": (self.anneal is None or self.anneal >= 1, "1 or more, or absent"),
            "believed": (self.believed > 1, "above 1"),
            "turns": (0 < self.turns <= 1, "in (0, 1]"),
            "shrink": (0 < self.shrink < inf, "above 0"),
        }
        for name, (holds, limit) in limits.items():
            if not holds:
                raise HardyError(f"slack {name} is {getattr(self, name)}; it must be {limit}.")

    def memory(self, context: RoundContext) -> Tensors:
        none = torch.zeros(context.clients, dtype=torch.int64)
        return {"asked": none, "turns": none, "last": none - 1, "round": torch.tensor(0)}

    def apply(self, updates: Updates, context: RoundContext, memory: Tensors) -> tuple[Updates, Tensors]:
        now = context.round + 1
        more, shrink = self.more(now), self.shrink if now >= self.start else 1.0
        chosen = self.choose(updates, context, memory) if more else []
        if self.as_published and chosen:
            total = len(updates.slots) + more * len(chosen)  # Σ P
            shrink *= total / (total + more)
        up = tensors.send(torch.tensor([at in chosen for at in range(len(updates.slots))]), updates.weights.device)
        cohort = tensors.send([slot.client for slot in updates.slots], up.device)
        weighed = replace(
            updates,
            weights=torch.where(up, updates.weights * (1 + more), updates.weights),
            shared=tensors.apply(lambda t: t * shrink if t.is_floating_point() else t, updates.shared)
            if shrink != 1
            else updates.shared,
        )
        return weighed, {
            "asked": memory["asked"].index_add(0, cohort, torch.ones_like(cohort)),
            "turns": memory["turns"].index_add(0, cohort, up.to(cohort)),
            "last": memory["last"].index_fill(0, cohort[up], now),
            "round": torch.full_like(memory["round"], now),
        }

    def more(self, now: int) -> float:
        """P − 1 = 2α/(1 − α) of the chosen clients, in a round counted from 1."""
        left = max(0.0, 1 - (now - self.start) / self.anneal) if self.anneal else 1.0
        return left * 2 * self.alpha / (1 - self.alpha) if now >= self.start else 0.0

    def choose(self, updates: Updates, context: RoundContext, memory: Tensors) -> list[int]:
        """The places of the slots that get the slack."""
        loss: list[float] = updates.loss.tolist()
        size: list[float] = updates.weights.tolist()
        asked: list[int] = memory["asked"].tolist()
        turns: list[int] = memory["turns"].tolist()
        clients, kinds = [slot.client for slot in updates.slots], context.kinds
        able = [
            at for at, client in enumerate(clients) if not self.kind or not kinds or kinds[client] in ("", self.kind)
        ]
        middle = median(loss[at] for at in able) if able else 0.0

        def believed(at: int) -> bool:
            return self.believed == inf or middle / self.believed <= loss[at] <= middle * self.believed

        def has_a_turn(at: int) -> bool:
            return turns[clients[at]] < self.turns * (asked[clients[at]] + 1)

        def order(at: int) -> tuple[float, int]:
            score = loss[at] * (size[at] if self.by_size else 1.0)
            return -score if self.largest else score, clients[at]

        eligible = [at for at in able if believed(at) and has_a_turn(at)]
        return sorted(eligible, key=order)[: min(self.chosen, len(able) // 2)]

    def figures(self, memory: Tensors) -> dict[str, Any]:
        now = memory["last"] == memory["round"].max()  # a base that nobody trained remembers an older round
        return {"up_weighted": now.any(0).nonzero().flatten().tolist()}


slack = Slack
_ATTACKED = where_affordable(adversarial(attack=pgd(steps=10), mix=1.0))


@part("method")
def sfat(
    *,
    slack: Slack = slack(),
    norms: bool = False,
    norm: Norm = batch(),
    objective: Objective = _ATTACKED,
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg of adversarially trained clients with slack on the weights; norms: on the norm layers too.

    slack: whose weights grow, and by how much
    norms: slack on the norm layers too
    """
    rule = pipeline(pre=(slack,))
    aggregator = rule if norms else by_role(weight=rule)
    return Method(name="sfat", norm=norm, objective=objective, optimiser=optimiser, aggregator=aggregator)


@part("method")
def sfat_prox(
    *,
    strength: float = 0.01,
    slack: Slack = slack(),
    norms: bool = False,
    norm: Norm = batch(),
    objective: Objective = _ATTACKED,
    optimiser: Optimiser = sgd(),
) -> Method:
    """SFAT on FedProx; strength is μ.

    slack: whose weights grow, and by how much
    norms: slack on the norm layers too
    """
    pulled = proximal(inner=objective, strength=strength)
    made = sfat(slack=slack, norms=norms, norm=norm, objective=pulled, optimiser=optimiser)
    return made.replace(name="sfat_prox")


@part("method")
def sfat_scaffold(
    *,
    slack: Slack = slack(),
    norms: bool = False,
    norm: Norm = batch(),
    objective: Objective = _ATTACKED,
    optimiser: Optimiser = sgd(),
) -> Method:
    """SFAT on SCAFFOLD, whose mean counts every client the same before the slack; variates have none.

    slack: whose weights grow, and by how much
    norms: slack on the norm layers too
    """
    rule = pipeline(pre=(equal_weights(), slack))
    plain = rule if norms else mean(weigh="uniform")
    aggregator = by_role(weight=rule, default=plain, control=control_mean())
    steps = chain(control(), optimiser)
    return Method(name="sfat_scaffold", norm=norm, objective=objective, optimiser=steps, aggregator=aggregator)


__all__ = ["sfat", "sfat_prox", "sfat_scaffold", "slack"]
