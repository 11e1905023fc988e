"""SCAFFOLD: control variates against client drift.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, Algorithm 1.

x server weights · y client weights · c server variate · c_i client variate · K local steps · η local rate
1. The server sends (x, c).
2. Client i steps along g_i(y) − c_i + c.                                            (line 10)
3. c_i⁺ = c_i − c + (x − y)/(Kη), option II; it sends y and c_i⁺ − c_i.              (lines 12–14)
4. x ← mean of y; c ← c + |S|/N · mean(c_i⁺ − c_i), over the cohort S of N clients.   (lines 16–17)
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hardy.core.messages import Updates
from hardy.core.method import Method
from hardy.core.protocols import Aggregator, Norm, Objective, Optimiser, Outcome, RoundContext, Setting
from hardy.core.ranks import Ranks
from hardy.core.tensors import Tensors, expand_trailing
from hardy.errors import HardyError
from hardy.parts.aggregators.base import by_role, mean
from hardy.parts.norms import batch
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import SGD, chain, sgd
from hardy.registry import part


@part("optimiser")
@dataclass(frozen=True, kw_only=True)
class Control(Optimiser):
    """Turns g into g − c_i + c on the shared weights. c is shared as `c.<weight>`, c_i private as `c_i.<weight>`."""

    @property
    def kept(self) -> bool:
        return True

    def check(self, method: Method, setting: Setting) -> None:
        if not isinstance(last := method.optimiser.links[-1], SGD):
            raise HardyError(
                f"control takes (x − y)/(Kη) for a mean gradient, which it is with sgd only, and the step is "
                f"{type(last).__name__!r}. Usual fix: optimiser sgd."
            )

    def init(self, trained: Tensors, shared: Collection[str]) -> Tensors:
        return {f"c_i.{n}": torch.zeros_like(w) for n, w in trained.items() if n in shared}

    def shared(self, trained: Tensors) -> Tensors:
        return {f"c.{n}": torch.zeros_like(w) for n, w in trained.items()}

    def update(
        self, gradient: Tensors, state: Tensors, params: Tensors, received: Tensors, rate: Tensor, key: Tensor
    ) -> tuple[Tensors, Tensors]:
        drift = {n: received[f"c.{n}"] - state[f"c_i.{n}"] for n in gradient if f"c_i.{n}" in state}
        return {n: g + drift[n] if n in drift else g for n, g in gradient.items()}, state

    def finish(self, outcome: Outcome) -> tuple[Tensors, Tensors]:
        length = outcome.steps * outcome.rate
        scale = torch.where(length > 0, 1 / length, 0)  # at rate 0 nothing moves
        state, sent = dict(outcome.state), dict[str, Tensor]()
        for n in (name.removeprefix("c_i.") for name in outcome.state if name.startswith("c_i.")):
            c, c_i = outcome.received[f"c.{n}"], outcome.state[f"c_i.{n}"]
            state[f"c_i.{n}"] = c_i - c + (outcome.start[n] - outcome.end[n]) * expand_trailing(scale, outcome.end[n])
            sent[f"c.{n}"] = c + state[f"c_i.{n}"] - c_i
        return state, sent


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class ControlMean(Aggregator):
    """c ← c + Σ (c_i⁺ − c_i) / N: clients that were not asked count as unchanged."""

    def fold(self, folded: Any, updates: Updates, context: RoundContext) -> Tensors:
        moved = {n: torch.zeros_like(c) for n, c in context.shared.items()} if folded is None else folded
        return {
            n: moved[n].index_add(0, updates.bases, value - context.shared[n][updates.bases])
            for n, value in updates.shared.items()
        }

    def merge(self, folded: Any, ranks: Ranks) -> Any:
        return ranks.total(folded)

    def finish(self, folded: Any, context: RoundContext, memory: Tensors) -> tuple[Tensors, Tensors]:
        return {n: c + (folded[n] / context.clients if folded else 0) for n, c in context.shared.items()}, memory


control, control_mean = Control, ControlMean


@part("method")
def scaffold(*, norm: Norm = batch(), objective: Objective = cross_entropy(), optimiser: Optimiser = sgd()) -> Method:
    """FedAvg with control variates (option II, server rate 1)."""
    return Method(
        name="scaffold",
        norm=norm,
        objective=objective,
        optimiser=chain(control(), optimiser),
        aggregator=by_role(default=mean(weigh="uniform"), control=control_mean()),
    )


__all__ = ["control", "control_mean", "scaffold"]
