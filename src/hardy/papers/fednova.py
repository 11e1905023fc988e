"""FedNova: normalised averaging, so that clients that take more steps do not pull the objective their way.

Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020.

x server weights · y_i client weights · τ_i local steps · p_i share of the examples · ρ local momentum
1. Client i sends the change of its weights over ‖a_i‖₁: d_i = (x − y_i) / ‖a_i‖₁.                       (Eq. 4)
2. ‖a_i‖₁ = τ_i without momentum; with momentum ρ, (τ_i − ρ(1 − ρ^τ_i)/(1 − ρ)) / (1 − ρ).              (§4.2)
3. x ← x − τ_eff Σ p_i d_i with τ_eff = Σ p_i ‖a_i‖₁.                                                    (Eq. 8)
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hardy.core import tensors
from hardy.core.messages import Updates
from hardy.core.method import Method
from hardy.core.partition import Placement, Role, Tag
from hardy.core.protocols import Aggregator, Norm, Objective, Optimiser, RoundContext, Setting
from hardy.core.ranks import Ranks
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.parts.aggregators.base import by_role
from hardy.parts.norms import batch
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import SGD, sgd
from hardy.registry import part


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class NormalisedMean(Aggregator):
    """The mean of the changes, each divided by its length in steps, times the effective number of steps."""

    def length(self, steps: Tensor, rho: float) -> Tensor:
        """‖a_i‖₁"""
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    def check(self, method: Method, setting: Setting) -> None:
        last = method.optimiser.links[-1]
        if not isinstance(last, SGD) or last.nesterov or last.kept or len(method.optimiser.links) > 1:
            raise HardyError(
                f"normalised_mean counts the length of SGD steps, but the optimiser is {method.optimiser}. Usual fix: "
                "sgd, with momentum that is born anew and without nesterov."
            )

    def fold(self, folded: Any, updates: Updates, context: RoundContext) -> Any:
        p, a = updates.weights, self.length(updates.steps.to(updates.weights), context.momentum)
        sums = [
            p.new_zeros(context.bases).index_add(0, updates.bases, value) for value in (p, p * a)
        ]  # Σ p_i, Σ p_i a_i
        change = {
            n: context.shared[n]
            .new_zeros(context.shared[n].shape)
            .index_add(
                0,
                updates.bases,
                (value - context.shared[n][updates.bases]) * tensors.expand_trailing((p / a).to(value.dtype), value),
            )
            for n, value in updates.shared.items()
        }
        if folded is None:
            return sums, change
        return [a + b for a, b in zip(folded[0], sums, strict=True)], {n: folded[1][n] + d for n, d in change.items()}

    def merge(self, folded: Any, ranks: Ranks) -> Any:
        return ranks.total(folded)

    def finish(self, folded: Any, context: RoundContext, memory: Tensors) -> tuple[Tensors, Tensors]:
        if folded is None:
            return context.shared, memory
        (total, lengths), change = folded
        total = total.clamp_min(1e-30)  # its square would be 0 in float32
        scale = lengths / total / total  # τ_eff / Σ p_i, both sums still to be normalised
        return {
            n: context.shared[n] + d * tensors.expand_trailing(scale.to(d.dtype), d) for n, d in change.items()
        }, memory


normalised_mean = NormalisedMean


@part("method")
def fednova(*, norm: Norm = batch(), objective: Objective = cross_entropy(), optimiser: Optimiser = sgd()) -> Method:
    """FedAvg with normalised averaging of the weights; statistics are averaged plainly."""
    rule = normalised_mean()
    affine = rule if norm.placement(Tag(Role.NORM_AFFINE, trained=True)) is Placement.SHARED else None
    aggregator = by_role(weight=rule, norm_affine=affine)
    return Method(name="fednova", norm=norm, objective=objective, optimiser=optimiser, aggregator=aggregator)


__all__ = ["fednova", "normalised_mean"]
