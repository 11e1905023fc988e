"""Norms: which layer normalises, who owns its affine and its statistics, and what the server does to them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from hardy.core.account import Mechanism
from hardy.core.federation import Client, examples_of
from hardy.core.layers import BatchNorm, FederatedStatistics, Statistics
from hardy.core.method import Method, Plan
from hardy.core.partition import Placement, Role, Tag, branch_paths
from hardy.core.protocols import Aggregator, Givers, InferenceStatistics, Norm, Setting, walk
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.registry import part

_PASSES = 2


@part("norm", name="batch")
@dataclass(frozen=True, kw_only=True)
class BatchNormalisation(Norm):
    """BatchNorm as FedAvg has it: batch statistics in training, affine and running statistics averaged."""

    momentum: float = 0.1
    """share of the new batch in the running statistics"""
    noise: float = 0.0
    """deviation σ of Gaussian noise on every update of the running statistics, before anybody else sees them"""
    bound: float = inf
    """greatest length (L2) of what a batch says of a layer, mean and variance − 1 of all channels together; with noise,
    the privacy account counts reported statistics"""
    inference_statistics: InferenceStatistics = "running"
    """statistics a client is served with: running = tracked in training, batch = of its test rows together (figures
    then depend on how they are cut), recomputed = of its training rows, measured after training (HeteroFL's static
    BN)"""

    def statistics_of(self, features: int, *, affine: bool) -> Statistics:
        kept = self.keeps(features, affine=affine, momentum=self.momentum, noise=self.noise)
        kept.bound = self.bound
        return kept

    def layer(self, features: int) -> nn.Module:
        return BatchNorm(features, branches={"clean": self.statistics_of})

    @property
    def reports(self) -> bool:
        """Whether the server is shown each client's statistics."""
        return self.placement(Tag(Role.NORM_MEAN, branch="clean")) is Placement.REPORTED

    def check(self, method: Method, setting: Setting) -> None:
        if not self.bound > 0 or not 0 <= self.noise < inf:
            raise HardyError(f"{self}: bound must be above 0, and noise 0 or more.")
        if self.bound < inf and issubclass(self.keeps, FederatedStatistics):
            raise HardyError(f"bound of {self} has no effect on pooled statistics. Leave it out.")

    def mechanisms(self, plan: Plan, setting: Setting, rounds: int, asked: Sequence[int]) -> Sequence[Mechanism]:
        """Every update of a layer's statistics, as if each were given away: what a client holds can change it by twice
        the bound, times the momentum. Two passes a step and branch are counted, clean and attacked."""
        if not self.reports or not self.noise or self.bound == inf:
            return ()
        layers = len(branch_paths(plan.model, min(plan.method.norm.branches or ())))
        steps = (setting.training.local_steps(held, 0) for held in examples_of(setting.clients))
        return (
            Mechanism(
                what="updates of reported statistics",
                unit="client",
                noise=self.noise / (2 * self.momentum * self.bound),
                times=_PASSES * layers * max(count * n for count, n in zip(asked, steps, strict=True)),
                simulated=True,
            ),
        )


def statistics_are_bounded(norm: Norm) -> bool:
    """Whether the account knows what all reported statistics of a norm are worth."""
    reporting = [part for part in walk(norm) if isinstance(part, BatchNormalisation) and part.reports]
    return all(part.noise and part.bound < inf for part in reporting)


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Dual(Norm):
    """Two sets of statistics, for clean and for attacked images, behind one affine (Xie et al. 2020; DBN in FedRBN).

    Each branch is kept and owned as the norm given for it says; the one affine as the clean one says, which also says
    when the statistics stand still.
    """

    clean: Norm = BatchNormalisation()
    """for clean images"""
    adversarial: Norm = BatchNormalisation()
    """for attacked images"""
    dual_affine: bool = False
    """an affine for each branch, as Split-Mix has it"""
    serves: Literal["clean", "adversarial"] = "adversarial"
    """the branch that predictions are made with, unless an evaluation asks for another: who classifies an image does
    not know whether it was attacked"""

    def __post_init__(self) -> None:
        for norm in (self.clean, self.adversarial):
            if norm.branches != frozenset({"clean"}):
                raise HardyError(
                    f"a branch of norm dual is {type(norm).__name__!r}, not a norm with one set of statistics. Take "
                    "batch, local, federated or propagated."
                )
            if norm.inference_statistics != "running":
                raise HardyError(
                    "norm dual mixes tracked statistics, but a branch has inference_statistics = "
                    f"{norm.inference_statistics!r}; take running."
                )
        statistics = Tag(Role.NORM_MEAN, branch="clean")
        if "clean" in self.adversarial.reads and self.clean.placement(statistics) is Placement.PRIVATE:
            raise HardyError(
                f"norm {type(self.adversarial).__name__!r} compares clients by their clean statistics, but "
                f"{type(self.clean).__name__!r} keeps these private. Usual fix: local with statistics = reported."
            )

    @property
    def branches(self) -> frozenset[str]:
        return frozenset({"clean", "adversarial"})

    @property
    def serving_branch(self) -> str:
        return self.serves

    def layer(self, features: int) -> nn.Module:
        return BatchNorm(features, branches=self.statistics_by_branch, dual_affine=self.dual_affine)

    @property
    def statistics_by_branch(self) -> dict[str, Callable[..., Statistics]]:
        """What a layer keeps for each branch."""
        return {"clean": self.clean.statistics_of, "adversarial": self.adversarial.statistics_of}

    def placement(self, tag: Tag) -> Placement:
        return (self.adversarial if tag.branch == "adversarial" else self.clean).placement(tag)

    def frozen(self, round_number: int) -> bool:
        return self.clean.frozen(round_number)

    def statistics_rule(self, branch: str, rule: Aggregator) -> Aggregator:
        return (self.adversarial if branch == "adversarial" else self.clean).statistics_rule(branch, rule)

    @property
    def exchanges(self) -> bool:
        return self.clean.exchanges or self.adversarial.exchanges

    def gives(self, client: Client) -> bool:
        return any(norm.gives(client) for norm in (self.clean, self.adversarial) if norm.exchanges)

    @property
    def most_givers(self) -> int | None:
        named = [norm.most_givers for norm in (self.clean, self.adversarial) if norm.exchanges]
        return None if None in named else max(n for n in named if n)

    def exchange(
        self, reported: Tensors, tags: Mapping[str, Tag], clients: Sequence[Client], givers: Givers | None = None
    ) -> Tensors:
        for branch, norm in (("clean", self.clean), ("adversarial", self.adversarial)):
            also = (givers,) if givers else ()  # a norm of a user's own may not know of them
            written = norm.exchange(reported, tags, clients, *also)
            reported = {n: written[n] if (tags[n].branch or "clean") == branch else t for n, t in reported.items()}
        return reported


class _Plain(Norm):
    """A norm without statistics."""

    @property
    def branches(self) -> None:
        return None


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Group(_Plain):
    """GroupNorm: no statistics to disagree about."""

    groups: int = 2
    """groups of channels"""

    def layer(self, features: int) -> nn.Module:
        # the largest number of groups up to the one asked for that divides the channels
        return nn.GroupNorm(max(g for g in range(1, self.groups + 1) if features % g == 0), features)


class TokenOrImageLayerNorm(nn.LayerNorm):
    """LayerNorm on tokens [N, T, C]; on [N, C] and [N, C, H, W] over all of a sample, with one scale per channel."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            return super().forward(x)
        return F.group_norm(x, 1, self.weight, self.bias, self.eps)


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Layer(_Plain):
    """LayerNorm: over all of an image's features [N, C, H, W], or over the last axis of tokens [N, T, C]."""

    def layer(self, features: int) -> nn.Module:
        return TokenOrImageLayerNorm(features)


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Absent(_Plain):
    """No normalisation."""

    def layer(self, features: int) -> nn.Module:
        return nn.Identity()


absent, batch, dual, group, layer = Absent, BatchNormalisation, Dual, Group, Layer
__all__ = ["absent", "batch", "dual", "group", "layer"]
