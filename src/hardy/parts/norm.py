"""Norms: which layer normalises, who owns its affine and its statistics, and what the server does to them."""

from collections.abc import Sequence
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

    def layer(self, features: int) -> nn.Module:
        raise NotImplementedError

    def placement(self, tag: Tag) -> Placement:
        """Where a tensor of a norm layer lives."""
        return Placement.SHARED

    def exchange(self, reported: Tensors, clients: Sequence[Client]) -> Tensors:
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
class Group(Norm):
    """GroupNorm: no statistics to disagree about."""

    groups: int = 2

    def layer(self, features: int) -> nn.Module:
        # the largest number of groups up to the one asked for that divides the channels
        return nn.GroupNorm(max(g for g in range(1, self.groups + 1) if features % g == 0), features)


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Layer(Norm):
    """LayerNorm over all of a sample's features."""

    def layer(self, features: int) -> nn.Module:
        return nn.GroupNorm(1, features)


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Absent(Norm):
    """No normalisation."""

    def layer(self, features: int) -> nn.Module:
        return nn.Identity()


batch, group, layer, absent = Batch, Group, Layer, Absent
__all__ = ["Norm", "absent", "batch", "group", "layer"]
