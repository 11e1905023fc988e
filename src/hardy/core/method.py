"""A method is a bundle of parts; bound to a model, every tensor has exactly one owner."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from hardy.core.federation import Client
from hardy.core.layers import FederatedStatistics
from hardy.core.partition import Placement, Role, Tag, tags
from hardy.core.tensors import Tensors, repeat, select, stack
from hardy.errors import HardyError, unknown
from hardy.parts.aggregators.base import Aggregator, by_name, mean
from hardy.parts.budgets import Budget, full
from hardy.parts.norms import Norm, batch
from hardy.parts.objectives import Objective, Shape, cross_entropy

Model = Callable[[Callable[[int], nn.Module]], nn.Module]
"""Builds a network around a norm layer: `lambda norm: digits_cnn(norm=norm)`."""

_OBJECTIVES_KEPT = 1000
_STATISTICS = {Role.NORM_MEAN, Role.NORM_VAR, Role.NORM_COUNT}
_NORM_ROLES = {Role.NORM_AFFINE, *_STATISTICS}


@dataclass(frozen=True, kw_only=True)
class Method:
    """norm + objective + budget + aggregator; `replace` composes."""

    name: str = "custom"
    norm: Norm = batch()
    objective: Objective = cross_entropy()
    budget: Budget = full()
    aggregator: Aggregator = mean()
    weights: Placement = Placement.SHARED
    """where everything but the norm layers lives; private = nobody talks to anybody"""
    pooled: bool = False
    """train on all clients' rows together, as if they were one: the centralised reference"""

    def replace(self, **parts: Any) -> "Method":
        """The same method with other parts: `fedbn().replace(aggregator=trimmed_mean(f=1))`."""
        known = {f.name for f in dataclasses.fields(self)}
        for name in parts:
            if name not in known:
                raise unknown("part of a method", name, known)
        return dataclasses.replace(self, **parts)

    def bind(self, model: Model, shape: Shape) -> "Plan":
        """The method on a network: who owns which tensor. Two claims on one tensor are refused."""
        kept = self.norm.branches
        if kept is not None and (missing := self.objective.branches - kept):
            raise HardyError(
                f"objective {_name(self.objective)!r} uses statistics of the branch {min(missing)!r}, but norm "
                f"{_name(self.norm)!r} keeps only {', '.join(sorted(kept))}. Usual fix: norm dual, or branch clean."
            )
        if self.norm.serving == "batch" and self.norm.keeps is FederatedStatistics:
            raise HardyError(
                f"norm {_name(self.norm)!r} normalises by what the server sent; serving must be running or post."
            )
        nets = self.budget.networks(lambda: model(self.norm.layer))
        net, tag = nets[0], tags(nets[0])
        placement = {n: self.norm.placement(t) if t.role in _NORM_ROLES else self.weights for n, t in tag.items()}
        for name, where in placement.items():
            if tag[name].role in self.aggregator.claims and where is not Placement.SHARED:
                raise HardyError(
                    f"two owners for tensor {name!r}: norm {_name(self.norm)!r} keeps it {where}, and aggregator "
                    f"{_name(self.aggregator)!r} has a rule for {tag[name].role}. Usual fix: norm batch, or leave "
                    f"{tag[name].role} out of the aggregator."
                )
        own = [{n: t.detach() for n, t in (*w.named_parameters(), *w.named_buffers()) if n in tag} for w in nets]
        start = own[0]
        trained = select(start, (n for n, t in tag.items() if t.trained and placement[n] is Placement.SHARED))
        for where, extra in (
            (Placement.SHARED, self.objective.shared(trained)),
            (Placement.PRIVATE, self.objective.private(trained, shape)),
        ):
            if taken := extra.keys() & tag.keys():
                raise HardyError(
                    f"two owners for tensor {min(taken)!r}: the model and objective {_name(self.objective)!r}. "
                    "Usual fix: rename the module."
                )
            if extra and where is Placement.SHARED and Role.CONTROL not in self.aggregator.claims:
                raise HardyError(
                    f"objective {_name(self.objective)!r} adds shared tensors ({min(extra)}, ...), but aggregator "
                    f"{_name(self.aggregator)!r} has no rule for control. Usual fix: aggregator by_role with the rule "
                    "wanted as default and control = control_mean."
                )
            start |= extra
            placement |= dict.fromkeys(extra, where)
            tag |= {n: Tag(Role.CONTROL) for n in extra}
        return Plan(
            method=self,
            model=net.requires_grad_(False),
            tags=tag,
            placement=placement,
            start=start,
            others=tuple({**start, **other} for other in own[1:]),
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A method bound to a network."""

    method: Method
    model: nn.Module
    tags: dict[str, Tag]
    placement: dict[str, Placement]
    start: Tensors
    """first values of the first base"""
    others: tuple[Tensors, ...] = ()
    """and of each further one"""

    def names(self, where: Placement) -> list[str]:
        return [name for name, placed in self.placement.items() if placed is where]

    @cached_property
    def aggregator(self) -> Aggregator:
        """The method's, with the norm's own rule for statistics that are shared."""
        rule, groups = self.method.aggregator, []
        for branch in sorted(self.method.norm.branches or ()):
            own = self.method.norm.statistics_rule(branch, rule)
            if own is not rule:
                names = [
                    name
                    for name, tag in self.tags.items()
                    if tag.role in _STATISTICS and tag.branch == branch and self.placement[name] is Placement.SHARED
                ]
                groups.append((own, names))
        return by_name(rule, groups) if groups else rule

    @cached_property
    def sent(self) -> dict[str, str]:
        """Buffers that hold, all round long, what the server sent of a statistic -> that statistic."""
        found = [path for path, module in self.model.named_modules() if isinstance(module, FederatedStatistics)]
        return {f"{path}.sent_{name}": f"{path}.{name}" for path in found for name in ("mean", "var")}

    @cached_property
    def trained(self) -> list[str]:
        return [name for name, tag in self.tags.items() if tag.trained]

    @cached_property
    def kept(self) -> list[str]:
        """Tensors of the model that training moves without a gradient: statistics and counters."""
        return [name for name, tag in self.tags.items() if not tag.trained and tag.role is not Role.CONTROL]

    @cached_property
    def model_names(self) -> set[str]:
        return {name for name, tag in self.tags.items() if tag.role is not Role.CONTROL}

    @cached_property
    def roles(self) -> dict[str, Role]:
        return {name: tag.role for name, tag in self.tags.items()}

    def first(self, where: Placement, *axes: int) -> Tensors:
        """First values of the tensors placed there, on new leading axes ([B] or [C, B])."""
        *clients, _ = axes
        return repeat(stack([select(base, self.names(where)) for base in (self.start, *self.others)]), *clients)

    def objective(self, client: Client, round: int) -> Objective:
        """What a client minimises in a round: by its kind, and within its capacity."""
        key = client.kind, client.capacity, round
        if key not in self._objectives:
            if len(self._objectives) >= _OBJECTIVES_KEPT:
                self._objectives.clear()
            self._objectives[key] = self.method.objective.of(client.kind, round).within(client.capacity)
        return self._objectives[key]

    @cached_property
    def _objectives(self) -> dict[tuple[str, float, int], Objective]:
        return {}


def _name(part: object) -> str:
    return type(part).__name__
