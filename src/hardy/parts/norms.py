"""Norms: which layer normalises, who owns its affine and its statistics, and what the server does to them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from hardy.core.federation import Client
from hardy.core.layers import BatchNorm, Statistics
from hardy.core.partition import Placement, Role, Tag
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.parts.aggregators.base import Aggregator
from hardy.registry import kind, part

Serving = Literal["running", "batch", "post"]


@kind("norm")
@dataclass(frozen=True, kw_only=True)
class Norm:
    """The part that owns the tensors of the normalisation layers."""

    keeps: ClassVar[type[Statistics]] = Statistics

    @property
    def branches(self) -> frozenset[str] | None:
        """The branches of statistics a layer has; None: it keeps none, and any branch will do."""
        return frozenset({"clean"})

    def layer(self, features: int) -> nn.Module:
        raise NotImplementedError

    def statistics_of(self, features: int, *, affine: bool) -> Statistics:
        """What a layer keeps for a branch of this norm."""
        raise NotImplementedError

    def placement(self, tag: Tag) -> Placement:
        """Where a tensor of a norm layer lives."""
        return Placement.SHARED

    def frozen(self, round: int) -> bool:
        """Whether clients of this round train on running statistics, and leave them."""
        return False

    def statistics_rule(self, branch: str, rule: Aggregator) -> Aggregator:
        """How shared statistics of a branch are aggregated, where the method has this rule for them."""
        return rule

    @property
    def serving(self) -> Serving:
        """Which statistics a client is served with."""
        return "running"

    @property
    def reads(self) -> frozenset[str]:
        """The other branches whose statistics `exchange` looks at, so that they must not stay private."""
        return frozenset()

    def exchange(self, reported: Tensors, tags: Mapping[str, Tag], clients: Sequence[Client]) -> Tensors:
        """What the server does to reported statistics between rounds, [C, B, ...]. It is shown those of all branches;
        what it returns for a branch that is not its own is left aside."""
        return reported


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Batch(Norm):
    """BatchNorm as FedAvg has it: batch statistics in training, affine and running statistics averaged."""

    momentum: float = 0.1
    """share of the new batch in the running statistics"""
    noise: float = 0.0
    """deviation σ of Gaussian noise on every update of the running statistics, before anybody else sees them"""
    serving: Serving = "running"
    """statistics a client is served with: running = tracked in training, batch = of its test rows together (figures
    then depend on how they are cut), post = of its training rows, measured after training (HeteroFL's static BN)"""

    def statistics_of(self, features: int, *, affine: bool) -> Statistics:
        return self.keeps(features, affine=affine, momentum=self.momentum, noise=self.noise)

    def layer(self, features: int) -> nn.Module:
        return BatchNorm(features, branches={"clean": self.statistics_of})


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Dual(Norm):
    """Two sets of statistics, for clean and for attacked images, behind one affine (Xie et al. 2020; DBN in FedRBN).

    Each branch is kept and owned as the norm given for it says; the one affine as the clean one says, which also says
    when the statistics stand still.
    """

    clean: Norm = Batch()
    adversarial: Norm = Batch()
    dual_affine: bool = False
    """an affine for each branch, as Split-Mix has it"""

    def __post_init__(self) -> None:
        for norm in (self.clean, self.adversarial):
            if norm.branches != frozenset({"clean"}):
                raise HardyError(
                    f"a branch of norm dual is {type(norm).__name__!r}, not a norm with one set of statistics. Take "
                    "batch, local, federated or propagated."
                )
            if norm.serving != "running":
                raise HardyError(
                    f"norm dual mixes tracked statistics, but a branch has serving = {norm.serving!r}; take running."
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

    def layer(self, features: int) -> nn.Module:
        return BatchNorm(features, branches=self.kept, dual_affine=self.dual_affine)

    @property
    def kept(self) -> dict[str, Callable[..., Statistics]]:
        """What a layer keeps for each branch."""
        return {"clean": self.clean.statistics_of, "adversarial": self.adversarial.statistics_of}

    def placement(self, tag: Tag) -> Placement:
        return (self.adversarial if tag.branch == "adversarial" else self.clean).placement(tag)

    def frozen(self, round: int) -> bool:
        return self.clean.frozen(round)

    def statistics_rule(self, branch: str, rule: Aggregator) -> Aggregator:
        return (self.adversarial if branch == "adversarial" else self.clean).statistics_rule(branch, rule)

    def exchange(self, reported: Tensors, tags: Mapping[str, Tag], clients: Sequence[Client]) -> Tensors:
        for branch, norm in (("clean", self.clean), ("adversarial", self.adversarial)):
            written = norm.exchange(reported, tags, clients)
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

    def layer(self, features: int) -> nn.Module:
        # the largest number of groups up to the one asked for that divides the channels
        return nn.GroupNorm(max(g for g in range(1, self.groups + 1) if features % g == 0), features)


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Layer(_Plain):
    """LayerNorm over all of a sample's features."""

    def layer(self, features: int) -> nn.Module:
        return nn.GroupNorm(1, features)


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Absent(_Plain):
    """No normalisation."""

    def layer(self, features: int) -> nn.Module:
        return nn.Identity()


absent, batch, dual, group, layer = Absent, Batch, Dual, Group, Layer
__all__ = ["Norm", "absent", "batch", "dual", "group", "layer"]
