"""FIARSE: a client trains the largest entries of the network that it can afford.

Wu et al., FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel Extraction, NeurIPS 2024.

θ weights and biases of all layers but norms · R_k the width client k can train, γ_k = R_k² its share of the entries ·
τ_k the threshold · M(θ) = 1 where |θ| ≥ τ_k, else 0 · ⊙ product entry by entry
1. The server works out τ_k, so that a share γ_k of |θ| is τ_k or more, and sends client k θ ⊙ M(θ), and all norms.
2. It holds τ_k in the round and steps along the threshold-controlled biased gradient of F_k(θ ⊙ M(θ)):
   ∇F_k ⊙ M(θ) ⊙ (1 + 2 τ_k |θ| / (|θ| + τ_k)²), whose second term stands for how θ moves its own mask.
   An entry that falls below τ_k is out, for the rest of the round.
3. Every entry of θ is averaged over the clients that got it, weighted by examples; one nobody got keeps its value.
4. Width r is served by θ ⊙ M(θ) with the threshold of share r².
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from hardy.core.method import Method
from hardy.core.protocols import Norm, Objective, Optimiser
from hardy.core.submodels import Submodels
from hardy.core.tensors import ImageShape, Tensors
from hardy.parts.norms import batch
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd
from hardy.parts.subnetworks import WIDTHS, SubnetworkBudget, fitting, held_mean
from hardy.registry import part

Scope = Literal["network", "layer"]
_THRESHOLD = "threshold/"


def keep_largest(values: Tensor, threshold: Tensor) -> Tensor:
    """θ ⊙ M(θ), whose gradient is the biased one."""
    size = values.abs()
    kept = size >= threshold
    slope = 1 + 2 * threshold * size / (size + threshold).square().clamp_min(1e-30)
    straight = values * torch.where(kept, slope, 0.0).detach()
    return straight + (values * kept - straight).detach()


class LargestEntries(Submodels):
    """θ ⊙ M(θ) for each width."""

    sparse = True

    def __init__(self, model: nn.Module, widths: tuple[float, ...], scope: Scope) -> None:
        self.widths = tuple(sorted(widths))
        layers = {
            p: m for p, m in model.named_modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear)
        }
        names = [f"{path}.{name}" for path, m in layers.items() for name, _ in m.named_parameters(recurse=False)]
        self.groups = [(name,) for name in names] if scope == "layer" else [tuple(names)]
        """entries that have one threshold"""
        self.numbers = {name: parameter.numel() for name, parameter in model.named_parameters() if name in names}

    def cut(self, values: Tensors, capacity: float, round_number: int, received: Tensors) -> Tensors:
        found = dict(values)
        for group, threshold in self._thresholds(received, capacity):
            found |= {name: keep_largest(values[name], threshold) for name in group if name in values}
        return found

    def paste(self, part: Tensors, values: Tensors, capacity: float, round_number: int) -> Tensors:
        return part

    def held(self, capacity: float, round_number: int, shared: Tensors) -> Tensors:
        only = {name: shared[name][0] for name in self.numbers if name in shared}
        return {
            n: only[n].abs() >= least for group, least in self._thresholds(only, capacity) for n in group if n in only
        }

    def sizes(self, capacity: float) -> dict[str, float]:
        return {name: self._share(capacity) * count for name, count in self.numbers.items()}

    def told(self, shared: Tensors) -> Tensors:
        bases = range(len(next(iter(shared.values()))))
        each = [{name: shared[name][base] for name in self.numbers if name in shared} for base in bases]
        return {
            f"{_THRESHOLD}{group[0]}": torch.stack([torch.stack(self._of_widths(held, group)) for held in each])
            for group in self.groups
            if all(group[0] in held for held in each)
        }

    def _thresholds(self, held: Tensors, capacity: float) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Each group and its τ: as told, or out of the tensors held."""
        at = self.widths.index(max(fitting(self.widths, capacity)))
        for group in self.groups:
            told = held.get(f"{_THRESHOLD}{group[0]}")
            if told is not None:
                yield group, told[at]
            elif any(name in held for name in group):
                yield group, self._of_widths(held, group)[at]

    def _of_widths(self, held: Tensors, group: tuple[str, ...]) -> list[Tensor]:
        """τ of every width. Of all entries it is 0, so that none ever falls below it."""
        sizes = torch.cat([held[name].detach().abs().flatten() for name in group if name in held])
        counts = [max(1, int(self._share(width) * len(sizes))) for width in self.widths]
        largest = sizes.topk(max((n for n in counts if n < len(sizes)), default=1)).values
        return [largest[n - 1] if n < len(sizes) else torch.zeros_like(largest[0]) for n in counts]

    def _share(self, capacity: float) -> float:
        return max(fitting(self.widths, capacity)) ** 2


@part("budget", name="largest")
@dataclass(frozen=True, kw_only=True)
class LargestBudget(SubnetworkBudget):
    """Every client trains the largest entries of the one network: of width r a share r² of them, about as many as a
    network so wide has."""

    scope: Scope = "network"
    """network: the largest of all entries; layer: of each tensor by itself, so that every layer keeps its share, and
    multiply-accumulates shrink by r² too"""

    def submodels(self, model: nn.Module, shape: ImageShape) -> LargestEntries:
        return LargestEntries(model, self.widths, self.scope)


largest = LargestBudget


@part("method")
def fiarse(
    *,
    widths: tuple[float, ...] = WIDTHS,
    scope: Scope = "network",
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """Each client trains the largest entries of one network that it can afford, with a gradient that knows the mask."""
    return Method(
        name="fiarse",
        norm=norm,
        objective=objective,
        optimiser=optimiser,
        budget=largest(widths=widths, scope=scope),
        aggregator=held_mean(),
    )


__all__ = ["fiarse", "largest"]
