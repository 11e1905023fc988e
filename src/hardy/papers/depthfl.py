"""DepthFL: a client trains the first blocks of the network that it can afford; exits teach each other.

Kim et al., DepthFL: Depthwise Federated Learning for Heterogeneous Clients, ICLR 2023.

W the network in D blocks, an exit (a classifier of its own) after each · d_k ≤ D the depth client k can train ·
p_i the prediction of exit i · CE_i its loss · λ(t) weight of the distillation in round t
1. The server sends client k the blocks and exits 1 to d_k.
2. It steps on Σ_i CE_i + λ(t)/(d_k − 1) Σ_i Σ_{j≠i} KL(p_j ‖ p_i), i, j ≤ d_k; no gradient flows into p_j.
3. Every block and exit is averaged over the clients that trained it, weighted by their examples.
4. Depth d is served by the mean of the logits of its exits.
"""

from dataclasses import dataclass
from math import ceil, exp

import torch
from torch import Tensor, nn

from hardy.core.layers import Call
from hardy.core.method import Method
from hardy.core.net import Net
from hardy.core.protocols import Batch, Norm, Objective, Optimiser, Setting, Wrapper, walk
from hardy.core.submodels import Submodels
from hardy.core.tensors import ImageShape, Tensors
from hardy.errors import HardyError
from hardy.models.early_exits import EarlyExits, ExitAnswer, all_exits, with_exits
from hardy.papers.per_fedavg import Meta
from hardy.parts.adversarial import divergence
from hardy.parts.norms import batch
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd
from hardy.parts.subnetworks import WIDTHS, SubnetworkBudget, fitting, held_mean
from hardy.registry import part


class FirstBlocks(Submodels):
    """The blocks and exits that clients of each capacity train: what they lack is empty."""

    def __init__(self, model: EarlyExits, budget: "ExitBudget") -> None:
        self.budget, self.depth = budget, len(model.blocks)
        self.moves = budget.ramp > 0 and budget.distillation > 0
        self.level = {
            name: int(name.split(".")[1]) + 1 for name, _ in (*model.named_parameters(), *model.named_buffers())
        }
        self.numbers = {
            name: parameter.numel() for name, parameter in (*model.named_parameters(), *model.named_buffers())
        }

    def deep(self, capacity: float) -> int:
        """d of a capacity. A network of fewer blocks than widths has several widths at one depth."""
        widths = self.budget.widths
        return ceil(len(fitting(widths, capacity)) * self.depth / len(widths))

    def cut(self, values: Tensors, capacity: float, round_number: int, received: Tensors) -> Tensors:
        deep = self.deep(capacity)
        return {n: t[:0] if t.dim() and self.level.get(n, 0) > deep else t for n, t in values.items()}

    def paste(self, part: Tensors, values: Tensors, capacity: float, round_number: int) -> Tensors:
        return {name: part[name] if part[name].shape == whole.shape else whole for name, whole in values.items()}

    def held(self, capacity: float, round_number: int, shared: Tensors) -> Tensors:
        deep = self.deep(capacity)
        return {n: t.new_full(t.shape[1:], self.level.get(n, 0) <= deep, dtype=torch.bool) for n, t in shared.items()}

    def sizes(self, capacity: float) -> dict[str, float]:
        deep = self.deep(capacity)
        return {n: count if self.level[n] <= deep else 0 for n, count in self.numbers.items()}

    def alone(self, inner: Objective, capacity: float, round_number: int) -> Objective:
        return EveryExit(inner=inner, exits=self.deep(capacity), weight=self.budget.weight_at(round_number))


@dataclass(frozen=True, kw_only=True)
class EveryExit(Wrapper):
    """The sum of an objective's losses over all exits, and what they learn from each other.

    An attack meets the network as it is served. Only passes that are learnt from give each exit's own logits; the
    blocks run once for all exits.
    """

    exits: int
    weight: float
    """λ(t)"""

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        alone = _OneExit(net.model, net.trained, net.buffers)
        alone.received, alone.offset = net.received, net.offset

        def of_exit(chosen: Tensor) -> Tensor:
            alone.chosen, alone.seen, alone.buffers = chosen, [], net.buffers
            return self.inner.loss(alone, private, batch, key)

        chosen = torch.eye(self.exits, dtype=batch.x.dtype, device=batch.x.device)
        total: Tensor = torch.vmap(of_exit, randomness="same")(chosen).sum()
        net.buffers, seen = alone.buffers, alone.seen  # these do not depend on the exit, so they were computed once
        if self.exits == 1 or not self.weight or not seen:
            return total
        return total + self.weight * torch.stack([mutual_divergence(logits) for logits in seen]).mean()


class _OneExit(Net):
    """A network that answers, in passes that are learnt from, with the logits of one exit."""

    chosen: Tensor
    """[exits], 1 for the exit and 0 for the others"""
    seen: list[Tensor]
    """all exits' logits of these passes, [N, exits, classes]"""

    def at(self, trained: Tensors) -> Net:
        made = super().at(trained)
        assert isinstance(made, _OneExit)
        made.seen = []  # gradients are taken inside: what is seen there is gone afterwards
        return made

    def together(self, *passes: tuple[Tensor, Call]) -> list[Tensor]:
        if all(call.key is None for _, call in passes):
            return super().together(*passes)
        every = self.on(self.trained, self.buffers)
        every.offset = None  # it is added to the logits of one exit
        with all_exits():
            found = [logits.view(len(logits), len(self.chosen), -1) for logits in Net.together(every, *passes)]
        self.buffers = every.buffers
        self.seen += found
        own = [torch.einsum("e,nek->nk", self.chosen.to(logits), logits) for logits in found]
        return own if self.offset is None else [logits + self.offset for logits in own]


def mutual_divergence(logits: Tensor) -> Tensor:
    """1/(E − 1) Σ_i Σ_{j≠i} KL(p_j ‖ p_i), the mean over examples of [N, E, classes]; no gradient flows into p_j."""
    apart = divergence(logits.detach()[:, None], logits[:, :, None])  # [N, i, j]
    return apart.sum((1, 2)).mean() / (logits.shape[1] - 1)


@part("budget", name="exits")
@dataclass(frozen=True, kw_only=True)
class ExitBudget(SubnetworkBudget):
    """Every client trains the first blocks of the network, and the exits behind them: as many as it can afford widths.
    A width names a depth here."""

    distillation: float = 1.0
    """λ, weight of what exits learn from each other; 0: nothing"""
    ramp: int = 0
    """T, rounds in which λ(t) = λ exp(−5 (1 − t/T)²) grows to λ; the paper's code takes 300 of 1000"""
    answer: ExitAnswer = "ensemble"
    """what a depth is served by: the mean of its exits' logits, or the deepest exit"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.distillation >= 0 or self.ramp < 0:
            raise HardyError(
                f"exits take a distillation and a ramp of 0 or more; they got {self.distillation} and {self.ramp}."
            )
        if self.ramp and not self.distillation:
            raise HardyError(f"ramp of exits is {self.ramp}, but distillation is 0: it has no effect. Leave it out.")

    def weight_at(self, round_number: int) -> float:
        """λ(t) of a round, counted from 0."""
        left = 1 - min(1.0, round_number / self.ramp) if self.ramp else 0.0
        return self.distillation * exp(-5 * left**2)

    def check(self, method: Method, setting: Setting) -> None:
        super().check(method, setting)
        if any(isinstance(inner, Meta) for inner in walk(method.objective)):
            raise HardyError(
                "objective meta steps to weights of its own for each exit, but the exits of budget 'ExitBudget' share "
                "one pass. Usual fix: fine_tune after the run, or budget corners."
            )

    def shares_statistics(self, giver: float, taker: float) -> bool:
        return len(fitting(self.widths, giver)) >= len(fitting(self.widths, taker))

    def prepare(self, model: nn.Module, norm: Norm, shape: ImageShape) -> nn.Module:
        return with_exits(model, norm.layer, shape, len(self.widths), self.answer)

    def submodels(self, model: nn.Module, shape: ImageShape) -> FirstBlocks:
        assert isinstance(model, EarlyExits)
        return FirstBlocks(model, self)


exits = ExitBudget


@part("method")
def depthfl(
    *,
    widths: tuple[float, ...] = WIDTHS,
    distillation: float = 1.0,
    ramp: int = 0,
    answer: ExitAnswer = "ensemble",
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """Each client trains the first blocks of one network that it can afford; the exits behind them teach each other."""
    return Method(
        name="depthfl",
        norm=norm,
        objective=objective,
        optimiser=optimiser,
        budget=exits(widths=widths, distillation=distillation, ramp=ramp, answer=answer),
        aggregator=held_mean(),
    )


__all__ = ["depthfl", "exits"]
