"""Aggregators: how the server turns updates into the next shared tensors.

An aggregator folds updates as they arrive, lane by lane. A linear rule keeps a running sum, so its memory does not
grow with the number of clients; any other rule collects and is applied once at the end, base by base. `pipeline` puts
stages before a rule, which decide how much each update counts or change its values, and server updates after it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hardy.core import tensors
from hardy.core.messages import Updates
from hardy.core.method import Method
from hardy.core.partition import Role
from hardy.core.protocols import Aggregator, Part, RoundContext, Setting, by_base, name_part
from hardy.core.ranks import Ranks
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.registry import kind, part


@dataclass
class _Sum:
    """Running sums of a linear rule, one row per base: weight, weighted values, largest counters."""

    weight: Tensor
    total: Tensor
    counters: Tensors


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class Mean(Aggregator):
    """The weighted mean of FedAvg, normalised once within each base. Counters take the largest value."""

    weigh: Literal["samples", "seen", "uniform"] = "samples"
    """samples = by the examples a client holds; seen = by those that passed through its network in the round, which
    keeps FBN exact where batches are unequal; uniform = all alike"""

    @property
    def uses_weights(self) -> bool:
        return self.weigh != "uniform"

    def fold(self, folded: _Sum | None, updates: Updates, context: RoundContext) -> _Sum:
        weights = torch.ones_like(updates.weights) if self.weigh == "uniform" else updates.weights
        if self.weigh == "seen":
            passes = torch.tensor([context.passes(slot.client) for slot in updates.slots], dtype=weights.dtype)
            weights = weights * tensors.send(passes, weights.device)
        share = weights.new_zeros(context.bases, len(updates.slots))
        share[updates.bases, torch.arange(len(updates.slots), device=share.device)] = weights
        with tensors.full_precision():
            total = share.to(updates.matrix) @ updates.matrix
        counters = largest_counters(folded.counters if folded else context.shared, updates)
        if folded is None:
            return _Sum(share.sum(1), total, counters)
        return _Sum(folded.weight + share.sum(1), folded.total + total, counters)

    def merge(self, folded: _Sum | None, ranks: Ranks) -> _Sum | None:
        return ranks.total(folded)

    def finish(self, folded: _Sum | None, context: RoundContext, memory: Tensors) -> tuple[Tensors, Tensors]:
        if folded is None:
            return context.shared, memory
        weight = folded.weight[:, None].to(folded.total)
        untouched = tensors.flatten(context.shared, folded.total)
        mean = torch.where(weight > 0, folded.total / weight.clamp_min(1e-30), untouched)
        # tensors of their own, as a checkpoint gives back: a view at an odd offset would be rounded differently
        shared = tensors.copies(tensors.unflatten(mean, context.shared))
        return {**context.shared, **shared, **folded.counters}, memory


def largest_counters(before: Tensors, updates: Updates) -> Tensors:
    """Tensors that are not floating take the largest value of each base, [B, ...]."""
    counted = {n: value for n, value in updates.shared.items() if not value.is_floating_point()}

    def whose(rows: Tensor) -> Tensor:
        return tensors.expand_trailing(updates.bases, rows).expand_as(rows)

    return {n: before[n].scatter_reduce(0, whose(rows), rows, "amax") for n, rows in counted.items()}


@dataclass(frozen=True, kw_only=True)
class _Grouped(Aggregator):
    """A rule for each group of tensors; `default` for those in none."""

    default: Aggregator = Mean()
    """for the tensors that no other rule is for"""

    def _rules(self) -> dict[str, Aggregator]:
        """Name of a group -> its rule."""
        raise NotImplementedError

    def _group(self, name: str, context: RoundContext) -> str:
        """The group a tensor would be in."""
        raise NotImplementedError

    @property
    def uses_weights(self) -> bool:
        return all(rule.uses_weights for rule in (self.default, *self._rules().values()))

    @property
    def min_updates(self) -> int:
        return max(rule.min_updates for rule in (self.default, *self._rules().values()))

    def tolerates(self, weights: Tensor) -> bool:
        return all(rule.tolerates(weights) for rule in (self.default, *self._rules().values()))

    def outweighed(self, weights: Tensor) -> bool:
        return any(rule.outweighed(weights) for rule in (self.default, *self._rules().values()))

    def _groups(self, context: RoundContext) -> list[tuple[str, Aggregator, list[str]]]:
        """(prefix of its memory, rule, names it writes)"""
        rules = {**self._rules(), "default": self.default}
        names: dict[str, list[str]] = {group: [] for group in rules}
        for name in context.shared:
            group = self._group(name, context)
            names[group if group in rules else "default"].append(name)
        return [(group, rule, names[group]) for group, rule in rules.items()]

    def memory(self, context: RoundContext) -> Tensors:
        kept: Tensors = {}
        for role, rule, names in self._groups(context):
            kept |= under(role, rule.memory(narrow(context, names)))
        return kept

    def fold(self, folded: dict[str, Any] | None, updates: Updates, context: RoundContext) -> dict[str, Any]:
        folded = folded or {}
        return {
            role: rule.fold(folded.get(role), updates.only(names), narrow(context, names))
            for role, rule, names in self._groups(context)
            if names
        }

    def merge(self, folded: dict[str, Any] | None, ranks: Ranks) -> dict[str, Any] | None:
        groups = max(ranks.gather(list(folded or {})), key=len)  # a rank without replies has folded none
        rules = {**self._rules(), "default": self.default}
        return {role: rules[role].merge((folded or {}).get(role), ranks) for role in groups} or None

    def finish(self, folded: dict[str, Any] | None, context: RoundContext, memory: Tensors) -> tuple[Tensors, Tensors]:
        shared, kept = dict(context.shared), dict(memory)
        for role, rule, names in self._groups(context):
            if folded and role in folded:
                written, left = rule.finish(folded[role], narrow(context, names), inside(role, memory))
                shared |= written
                kept |= under(role, left)
        return shared, kept

    def served(self, shared: Tensors, memory: Tensors) -> Tensors:
        for group, rule in (*self._rules().items(), ("default", self.default)):
            shared = rule.served(shared, inside(group, memory))
        return shared

    def figures(self, memory: Tensors) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for role, rule in (*self._rules().items(), ("default", self.default)):
            told |= rule.figures(inside(role, memory))
        return told


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class ByRole(_Grouped):
    """A rule for each role of tensor; `default` for the roles that have none."""

    weight: Aggregator | None = None
    """for weights and biases"""
    norm_affine: Aggregator | None = None
    """for scales and shifts of norm layers"""
    norm_mean: Aggregator | None = None
    """for running means"""
    norm_var: Aggregator | None = None
    """for running variances"""
    control: Aggregator | None = None
    """for SCAFFOLD's control variates"""

    def _rules(self) -> dict[str, Aggregator]:
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "default"}
        return {role: rule for role, rule in given.items() if rule is not None}

    def _group(self, name: str, context: RoundContext) -> str:
        return context.roles[name]

    @property
    def claims(self) -> frozenset[Role]:
        return frozenset(Role(role) for role in self._rules())


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class ByName(_Grouped):
    """A rule for each group of named tensors; `default` for those in none. Norms add their own rules by it."""

    groups: tuple[tuple[Aggregator, tuple[str, ...]], ...] = ()
    """(rule, names of its tensors)"""

    def _rules(self) -> dict[str, Aggregator]:
        return {f"own{number}": rule for number, (rule, _) in enumerate(self.groups)}

    def _group(self, name: str, context: RoundContext) -> str:
        return next((f"own{at}" for at, (_, names) in enumerate(self.groups) if name in names), "default")

    @property
    def claims(self) -> frozenset[Role]:
        return self.default.claims


def narrow(context: RoundContext, names: Iterable[str]) -> RoundContext:
    """The same round, seen by a rule for these tensors only."""
    return replace(context, shared=tensors.select(context.shared, names))


def under(name: str, memory: Tensors) -> Tensors:
    """A part's memory among that of others."""
    return {f"{name}.{key}": value for key, value in memory.items()}


def inside(name: str, memory: Tensors) -> Tensors:
    """What was put `under` a name."""
    return {key.removeprefix(f"{name}."): value for key, value in memory.items() if key.startswith(f"{name}.")}


@kind("stage")
@dataclass(frozen=True, kw_only=True)
class Stage(Part):
    """The part that works on the updates of a base before a rule combines them: how much each counts, or its values."""

    @property
    def changes_weights(self) -> bool:
        """Whether its effect is in the weights, so that a rule without a weighted form would ignore it."""
        return True

    remembers_all: ClassVar[bool] = False
    """whether what follows sees all clients that ever answered, and not the cohort alone"""
    remembers_clients: ClassVar[bool] = False
    """whether what it makes of an update depends on whose it is"""

    def min_updates(self, after: int) -> int:
        """The smallest number of updates it works with, if what follows needs `after`."""
        return after

    def tolerates(self, weights: Tensor) -> bool:
        """Whether it works with updates that weigh so much."""
        return True

    def reweigh(self, weights: Tensor) -> Tensor:
        """What updates of these weights weigh after it, where that follows from the weights alone."""
        return weights

    def memory(self, context: RoundContext) -> Tensors:
        """What it remembers of each base between rounds, with its first values."""
        return {}

    def apply(self, updates: Updates, context: RoundContext, memory: Tensors) -> tuple[Updates, Tensors]:
        """The updates of one base with other weights, on any scale, or values; what it remembers of it from now on."""
        raise NotImplementedError

    def figures(self, memory: Tensors) -> dict[str, Any]:
        """What metrics.jsonl is told of the round that left this memory, [B, ...]."""
        return {}


@part("stage")
@dataclass(frozen=True, kw_only=True)
class EqualWeights(Stage):
    """Every update counts the same from here on, whatever its number of examples."""

    def apply(self, updates: Updates, context: RoundContext, memory: Tensors) -> tuple[Updates, Tensors]:
        return replace(updates, weights=self.reweigh(updates.weights)), memory

    def reweigh(self, weights: Tensor) -> Tensor:
        return torch.ones_like(weights)


@kind("server_update")
@dataclass(frozen=True, kw_only=True)
class ServerUpdate(Part):
    """The part that works on what a rule has found: a server optimiser, or an average of the weights.

    A server optimiser is shown weights and affine parameters only. Statistics, counters and control variates are
    whatever the rule made of them: a variance that an adaptive optimiser moved could fall below 0.
    """

    roles: ClassVar[frozenset[Role]] = frozenset({Role.WEIGHT, Role.NORM_AFFINE})
    """what it is shown"""

    def memory(self, shared: Tensors) -> Tensors:
        """What it remembers between rounds, with its first values; `shared` are the tensors it works on."""
        return {}

    def apply(self, before: Tensors, after: Tensors, memory: Tensors) -> tuple[Tensors, Tensors]:
        """(the next shared tensors, the next memory), given those of the last round and what the rule made of them."""
        raise NotImplementedError

    def served(self, shared: Tensors, memory: Tensors) -> Tensors:
        """The shared tensors that predictions are made with."""
        return shared


@part("aggregator")
@dataclass(frozen=True, kw_only=True)
class Pipeline(Aggregator):
    """Stages on the updates of each base (pre), the rule that combines what they leave, then server updates (post)."""

    pre: tuple[Stage, ...] = ()
    """stages on the updates, in order"""
    rule: Aggregator = Mean()
    """combines the updates that the stages leave"""
    post: tuple[ServerUpdate, ...] = ()
    """server updates, in order"""

    def __post_init__(self) -> None:
        weighing = [type(stage).__name__ for stage in self.pre if stage.changes_weights]
        if weighing and not self.rule.uses_weights:
            raise HardyError(
                f"pipeline: stage {weighing[-1]!r} weighs the updates, but the rule {self.rule} has no weighted form "
                "and would ignore it. Usual fix: mean, or a robust rule with weigh = samples."
            )

    @property
    def claims(self) -> frozenset[Role]:
        return self.rule.claims

    @property
    def uses_weights(self) -> bool:
        return self.rule.uses_weights

    @property
    def min_updates(self) -> int:
        least = self.rule.min_updates
        for stage in reversed(self.pre):
            least = stage.min_updates(least)
        return least

    def tolerates(self, weights: Tensor) -> bool:
        if len(weights) < self.min_updates:
            return False
        for stage in self.pre:
            if not stage.tolerates(weights):
                return False
            if stage.remembers_all:
                return True  # what follows does not see these updates alone
            weights = stage.reweigh(weights)
        return self.rule.tolerates(weights)

    def outweighed(self, weights: Tensor) -> bool:
        for stage in self.pre:
            if stage.remembers_all:
                return False
            weights = stage.reweigh(weights)
        return self.rule.outweighed(weights)

    def check(self, method: Method, setting: Setting) -> None:
        for number, stage in enumerate(self.pre):
            needed = replace(self, pre=self.pre[number + 1 :]).min_updates
            if stage.remembers_all and needed > len(setting.clients):
                raise HardyError(
                    f"pipeline: after {name_part(stage)} the rule sees all clients, and needs {needed} or more, but "
                    f"there are {len(setting.clients)}. Expect fewer hostile ones of all clients (a smaller f)."
                )

    def memory(self, context: RoundContext) -> Tensors:
        kept = under("rule", self.rule.memory(context))
        for number, stage in enumerate(self.pre):
            kept |= under(str(number), tensors.repeat(stage.memory(context), context.bases))
        for number, update in enumerate(self.post):
            kept |= under(f"post{number}", update.memory(_shown(update, context.shared, context)))
        return kept

    def fold(self, folded: Any, updates: Updates, context: RoundContext) -> Any:
        # with nothing before the rule, a linear one keeps its running sum
        return super().fold(folded, updates, context) if self.pre else self.rule.fold(folded, updates, context)

    def merge(self, folded: Any, ranks: Ranks) -> Any:
        return super().merge(folded, ranks) if self.pre else self.rule.merge(folded, ranks)

    def finish(self, folded: Any, context: RoundContext, memory: Tensors) -> tuple[Tensors, Tensors]:
        if not folded:
            return context.shared, memory
        kept, weighed = dict(memory), None if self.pre else folded
        for base, left in by_base(folded) if self.pre else ():
            if not self.tolerates(left.weights):
                continue
            for number, stage in enumerate(self.pre):
                own = inside(str(number), kept)
                left, new = stage.apply(left, context, tensors.gather(own, base))
                kept |= under(str(number), tensors.scatter(own, new, base))
                if stage.remembers_all and not replace(self, pre=self.pre[number + 1 :]).tolerates(left.weights):
                    break  # too few have ever answered
            else:
                weighed = self.rule.fold(weighed, left, context)
        shared, own = self.rule.finish(weighed, context, inside("rule", memory))
        kept |= under("rule", own)
        for number, update in enumerate(self.post):
            before, after = (_shown(update, values, context) for values in (context.shared, shared))
            moved, own = update.apply(before, after, inside(f"post{number}", kept))
            shared = {**shared, **moved}
            kept |= under(f"post{number}", own)
        return shared, kept

    def served(self, shared: Tensors, memory: Tensors) -> Tensors:
        shared = self.rule.served(shared, inside("rule", memory))
        for number, update in enumerate(self.post):
            shared = update.served(shared, inside(f"post{number}", memory))
        return shared

    def figures(self, memory: Tensors) -> dict[str, Any]:
        told = self.rule.figures(inside("rule", memory))
        for number, stage in enumerate(self.pre):
            told |= stage.figures(inside(str(number), memory))
        return told


def _shown(update: ServerUpdate, values: Tensors, context: RoundContext) -> Tensors:
    return {name: value for name, value in values.items() if context.roles[name] in update.roles}


by_name, by_role, equal_weights, mean, pipeline = ByName, ByRole, EqualWeights, Mean, Pipeline
__all__ = ["ServerUpdate", "Stage", "by_name", "by_role", "equal_weights", "mean", "pipeline"]
