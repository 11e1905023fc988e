"""Aggregators: how the server turns updates into the next shared tensors.

An aggregator folds updates as they arrive, lane by lane. A linear rule keeps a running sum, so its memory does not
grow with the number of clients; any other rule collects and is applied once at the end, base by base. `chain` puts
stages, which decide how much each update counts, before a rule that heeds it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hardy import tensors
from hardy.errors import HardyError
from hardy.messages import Updates
from hardy.partition import Role
from hardy.registry import kind, part
from hardy.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What a rule may know of the round besides the updates."""

    shared: Tensors
    """[B, ...], as sent down"""
    roles: Mapping[str, Role]
    bases: int
    clients: int
    """all clients, in the cohort or not"""
    momentum: float = 0.0
    """of the clients' optimiser"""
    round: int = 0
    """rounds done"""
    kinds: Sequence[str] = ()
    """AT or ST, a client each"""


@kind("aggregator")
@dataclass(frozen=True, kw_only=True)
class Aggregator:
    """The part that writes the shared tensors. `combine` is all a rule needs; a linear one overrides `fold`."""

    @property
    def claims(self) -> frozenset[Role]:
        """Roles this aggregator has a rule of its own for: they must be shared."""
        return frozenset()

    @property
    def weighted(self) -> bool:
        """Whether the rule has a weighted form: the weights of the updates are how much each one counts."""
        return False

    def memory(self, frame: Frame) -> Tensors:
        """What the aggregator remembers between rounds, with its first values."""
        return {}

    def fold(self, folded: Any, updates: Updates, frame: Frame) -> Any:
        """Takes in more updates; `folded` is None at first."""
        return [*(folded or []), updates]

    def finish(self, folded: Any, frame: Frame, memory: Tensors) -> tuple[Tensors, Tensors]:
        """The next shared tensors and memory. A base nobody trained keeps its value."""
        if not folded:
            return frame.shared, memory
        updates = Updates.join(folded)
        shared = tensors.apply(Tensor.clone, frame.shared)
        for base in sorted({slot.base for slot in updates.slots}):
            trained = self.combine(updates.where(updates.bases == base), frame)
            for name, value in trained.items():
                shared[name][base] = value
        return shared, memory

    def combine(self, updates: Updates, frame: Frame) -> Tensors:
        """One value a shared tensor out of the stacked values of one base."""
        raise NotImplementedError

    def figures(self, memory: Tensors) -> dict[str, Any]:
        """What metrics.jsonl is told of the round that left this memory."""
        return {}


@dataclass
class _Sum:
    """Running sums of a linear rule, a row a base: weight, weighted values, largest counters."""

    weight: Tensor
    total: Tensor
    counters: Tensors


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class Mean(Aggregator):
    """The weighted mean of FedAvg, normalised once within each base. Counters take the largest value."""

    weigh: Literal["samples", "uniform"] = "samples"

    @property
    def weighted(self) -> bool:
        return self.weigh == "samples"

    def fold(self, folded: _Sum | None, updates: Updates, frame: Frame) -> _Sum:
        weights = updates.weights if self.weigh == "samples" else torch.ones_like(updates.weights)
        share = weights.new_zeros(frame.bases, len(updates.slots))
        share[updates.bases, torch.arange(len(updates.slots), device=share.device)] = weights
        with tensors.full_precision():
            total = share.to(updates.matrix) @ updates.matrix
        before = folded.counters if folded else frame.shared
        counters = {
            n: _largest(before[n], updates, value)
            for n, value in updates.shared.items()
            if not value.is_floating_point()
        }
        if folded is None:
            return _Sum(share.sum(1), total, counters)
        return _Sum(folded.weight + share.sum(1), folded.total + total, counters)

    def finish(self, folded: _Sum | None, frame: Frame, memory: Tensors) -> tuple[Tensors, Tensors]:
        if folded is None:
            return frame.shared, memory
        weight = folded.weight[:, None].to(folded.total)
        untouched = tensors.flatten(frame.shared, folded.total)
        mean = torch.where(weight > 0, folded.total / weight.clamp_min(1e-30), untouched)
        # tensors of their own, as a checkpoint gives back: a view at an odd offset would be rounded differently
        shared = tensors.apply(Tensor.clone, tensors.unflatten(mean, frame.shared))
        return {**frame.shared, **shared, **folded.counters}, memory


def _largest(shared: Tensor, updates: Updates, value: Tensor) -> Tensor:
    largest = shared.clone()
    for slot, row in zip(updates.slots, value, strict=True):
        largest[slot.base] = largest[slot.base].maximum(row)
    return largest


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class ByRole(Aggregator):
    """A rule for each role of tensor; `default` for the roles that have none."""

    default: Aggregator = Mean()
    weight: Aggregator | None = None
    norm_affine: Aggregator | None = None
    norm_mean: Aggregator | None = None
    norm_var: Aggregator | None = None
    control: Aggregator | None = None

    def _rules(self) -> dict[str, Aggregator]:
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "default"}
        return {role: rule for role, rule in given.items() if rule is not None}

    @property
    def claims(self) -> frozenset[Role]:
        return frozenset(Role(role) for role in self._rules())

    @property
    def weighted(self) -> bool:
        return all(rule.weighted for rule in (self.default, *self._rules().values()))

    def _groups(self, frame: Frame) -> list[tuple[str, Aggregator, list[str]]]:
        """(prefix of its memory, rule, names it writes)"""
        rules = self._rules()
        groups = [(role, rule, [n for n in frame.shared if frame.roles[n] == role]) for role, rule in rules.items()]
        return [*groups, ("default", self.default, [n for n in frame.shared if frame.roles[n] not in rules])]

    def memory(self, frame: Frame) -> Tensors:
        kept: Tensors = {}
        for role, rule, names in self._groups(frame):
            kept |= _under(role, rule.memory(_narrow(frame, names)))
        return kept

    def fold(self, folded: dict[str, Any] | None, updates: Updates, frame: Frame) -> dict[str, Any]:
        folded = folded or {}
        return {
            role: rule.fold(folded.get(role), updates.only(names), _narrow(frame, names))
            for role, rule, names in self._groups(frame)
            if names
        }

    def finish(self, folded: dict[str, Any] | None, frame: Frame, memory: Tensors) -> tuple[Tensors, Tensors]:
        shared, kept = dict(frame.shared), dict(memory)
        for role, rule, names in self._groups(frame):
            if folded and role in folded:
                written, left = rule.finish(folded[role], _narrow(frame, names), _inside(role, memory))
                shared |= written
                kept |= _under(role, left)
        return shared, kept

    def figures(self, memory: Tensors) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for role, rule in (*self._rules().items(), ("default", self.default)):
            told |= rule.figures(_inside(role, memory))
        return told


def _narrow(frame: Frame, names: list[str]) -> Frame:
    return replace(frame, shared=tensors.select(frame.shared, names))


def _under(name: str, memory: Tensors) -> Tensors:
    return {f"{name}.{key}": value for key, value in memory.items()}


def _inside(name: str, memory: Tensors) -> Tensors:
    """What was put `_under` a name."""
    return {key.removeprefix(f"{name}."): value for key, value in memory.items() if key.startswith(f"{name}.")}


@kind("stage")
@dataclass(frozen=True, kw_only=True)
class Stage:
    """The part that decides, before a rule combines the updates of a base, how much each of them counts."""

    def memory(self, frame: Frame) -> Tensors:
        """What it remembers of each base between rounds, with its first values."""
        return {}

    def apply(self, updates: Updates, frame: Frame, memory: Tensors) -> tuple[Updates, Tensors]:
        """The updates of one base with other weights, on any scale, and what it remembers of that base from now on."""
        raise NotImplementedError

    def figures(self, memory: Tensors) -> dict[str, Any]:
        """What metrics.jsonl is told of the round that left this memory, [B, ...]."""
        return {}


@part("stage")
@dataclass(frozen=True, kw_only=True)
class Uniform(Stage):
    """Every update counts the same from here on, whatever its number of examples."""

    def apply(self, updates: Updates, frame: Frame, memory: Tensors) -> tuple[Updates, Tensors]:
        return replace(updates, weights=torch.ones_like(updates.weights)), memory


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class Chain(Aggregator):
    """Stages, one after another on the updates of each base, and the rule that combines what they leave."""

    stages: tuple[Stage, ...] = ()
    rule: Aggregator = Mean()

    def __post_init__(self) -> None:
        if self.stages and not self.rule.weighted:
            raise HardyError(
                f"chain: stage {type(self.stages[-1]).__name__!r} weighs the updates, but the rule {self.rule} has no "
                "weighted form and would ignore it. Usual fix: a rule that has one (mean by samples, normalised_mean)."
            )

    @property
    def claims(self) -> frozenset[Role]:
        return self.rule.claims

    @property
    def weighted(self) -> bool:
        return self.rule.weighted

    def memory(self, frame: Frame) -> Tensors:
        kept = _under("rule", self.rule.memory(frame))
        for number, stage in enumerate(self.stages):
            kept |= _under(str(number), tensors.repeat(stage.memory(frame), frame.bases))
        return kept

    def finish(self, folded: Any, frame: Frame, memory: Tensors) -> tuple[Tensors, Tensors]:
        if not folded:
            return frame.shared, memory
        updates, kept, weighed = Updates.join(folded), dict(memory), None
        for base in sorted({slot.base for slot in updates.slots}):
            left = updates.where(updates.bases == base)
            for number, stage in enumerate(self.stages):
                own = _inside(str(number), kept)
                left, new = stage.apply(left, frame, tensors.gather(own, base))
                kept |= _under(str(number), tensors.scatter(own, new, base))
            weighed = self.rule.fold(weighed, left, frame)
        shared, own = self.rule.finish(weighed, frame, _inside("rule", memory))
        return shared, kept | _under("rule", own)

    def figures(self, memory: Tensors) -> dict[str, Any]:
        told = self.rule.figures(_inside("rule", memory))
        for number, stage in enumerate(self.stages):
            told |= stage.figures(_inside(str(number), memory))
        return told


by_role, chain, mean, uniform = ByRole, Chain, Mean, Uniform
__all__ = ["Aggregator", "Frame", "Stage", "by_role", "chain", "mean", "uniform"]
