"""Norms: which layer normalises, who owns its affine and its statistics, and what the server does to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hardy.data.splits import Client
from hardy.models.layers import BatchNorm
from hardy.partition import Placement, Tag
from hardy.registry import kind, part
from hardy.tensors import Tensors


@kind("norm")
@dataclass(frozen=True, kw_only=True)
class Norm:
    """The part that owns the tensors of the normalisation layers."""

    @property
    def branches(self) -> frozenset[str] | None:
        """The branches of statistics a layer has; None: it keeps none, and any branch will do."""
        return frozenset({"clean"})

    def layer(self, features: int) -> nn.Module:
        raise NotImplementedError

    def placement(self, tag: Tag) -> Placement:
        """Where a tensor of a norm layer lives."""
        return Placement.SHARED

    def exchange(self, reported: Tensors, tags: Mapping[str, Tag], clients: Sequence[Client]) -> Tensors:
        """What the server does to reported statistics between rounds, [C, B, ...]."""
        return reported


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Batch(Norm):
    """BatchNorm as FedAvg has it: batch statistics in training, affine and running statistics averaged."""

    momentum: float = 0.1
    """share of the new batch in the running statistics"""

    def layer(self, features: int) -> nn.Module:
        return BatchNorm(features, momentum=self.momentum)


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Dual(Norm):
    """Two sets of statistics, for clean and for attacked images, behind one affine (Xie et al. 2020; DBN in FedRBN).

    Each branch is owned as the norm given for it says; the affine as the clean one says.
    """

    clean: Norm = Batch()
    adversarial: Norm = Batch()
    momentum: float = 0.1

    @property
    def branches(self) -> frozenset[str]:
        return frozenset({"clean", "adversarial"})

    def layer(self, features: int) -> nn.Module:
        return BatchNorm(features, branches=("clean", "adversarial"), momentum=self.momentum)

    def placement(self, tag: Tag) -> Placement:
        return (self.adversarial if tag.branch == "adversarial" else self.clean).placement(tag)

    def exchange(self, reported: Tensors, tags: Mapping[str, Tag], clients: Sequence[Client]) -> Tensors:
        for branch, norm in (("clean", self.clean), ("adversarial", self.adversarial)):
            mine = {name: value for name, value in reported.items() if tags[name].branch == branch}
            reported = {**reported, **norm.exchange(mine, tags, clients)}
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
