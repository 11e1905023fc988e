"""A method is a bundle of five parts; bound to a model, every tensor has exactly one owner."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hardy.core.describe import count, non_defaults
from hardy.core.federation import Client
from hardy.core.layers import FederatedStatistics
from hardy.core.modes import examine
from hardy.core.partition import Placement, Role, Tag, tags
from hardy.core.protocols import (
    Aggregator,
    Budget,
    Norm,
    Objective,
    Optimiser,
    Part,
    Setting,
    name_part,
    walk,
)
from hardy.core.submodels import Submodels
from hardy.core.tensors import ImageShape, Tensors, repeat, select, stack
from hardy.errors import HardyError, unknown
from hardy.registry import find

BuildModel = Callable[..., nn.Module]
"""Builds a network around a norm layer: `lambda norm: digits_cnn(norm=norm)`. For methods that train narrow networks it
takes the width too: `lambda norm, width: digits_cnn(norm=norm, width=width)`."""

_OBJECTIVES_KEPT = 1000
_STATISTICS = {Role.NORM_MEAN, Role.NORM_VAR, Role.NORM_COUNT}
_NORM_ROLES = {Role.NORM_AFFINE, Role.NORM_MIX, *_STATISTICS}
_FACTS = {
    "kind": (
        "data.adversarial makes clients AT and ST",
        "objective by_kind (fatavg, fedrbn and sfat have it), or leave data.adversarial out",
    ),
    "capacity": (
        "data.capacity gives clients widths they can train",
        "budget queue (split_mix), corners (heterofl), windows, largest or exits, or leave data.capacity out",
    ),
}


def _usual(kind: str, name: str) -> Callable[[], Any]:
    """The part a method has unless it says otherwise, by name: the core imports no part."""

    def make() -> Any:
        return find(kind, name)()

    return make


@dataclass(frozen=True, kw_only=True)
class Method:
    """norm + objective + optimiser + budget + aggregator; `replace` composes."""

    name: str = "custom"
    norm: Norm = field(default_factory=_usual("norm", "batch"))
    objective: Objective = field(default_factory=_usual("objective", "cross_entropy"))
    optimiser: Optimiser = field(default_factory=_usual("optimiser", "sgd"))
    budget: Budget = field(default_factory=_usual("budget", "full"))
    aggregator: Aggregator = field(default_factory=_usual("aggregator", "mean"))
    weights: Placement = Placement.SHARED
    """where everything but the norm layers lives; private = nobody talks to anybody"""
    pooled: bool = False
    """train on all clients' rows together, as if they were one: the centralised reference"""

    def __repr__(self) -> str:
        named = ("norm", "objective", "optimiser", "budget", "aggregator")
        return f"Method {self.name!r}\n" + "\n".join(f"  {n:<10} {non_defaults(getattr(self, n))}" for n in named)

    def replace(self, **parts: Any) -> "Method":
        """The same method with other parts: `fedbn().replace(aggregator=trimmed_mean(f=1))`."""
        known = {f.name for f in dataclasses.fields(self)}
        for name in parts:
            if name not in known:
                raise unknown("part of a method", name, known)
        return dataclasses.replace(self, **parts)

    def parts(self) -> Iterator[Part]:
        """Its parts, and the parts inside them."""
        for each in (self.norm, self.objective, self.optimiser, self.budget, self.aggregator):
            yield from walk(each)

    def check(self, setting: Setting) -> None:
        """Refuses combinations that would not work, or in which something would have no effect."""
        for part in self.parts():
            part.check(self, setting)
        consumed = {fact for part in self.parts() for fact in part.consumes}
        given = {
            "kind": any(client.kind for client in setting.sorts),
            "capacity": any(client.capacity != 1 for client in setting.sorts),
        }
        for fact, (what, remedy) in _FACTS.items():
            if given[fact] and fact not in consumed:
                raise HardyError(
                    f"{what}, but no part of method {self.name!r} looks at a client's {fact}. Usual fix: {remedy}."
                )

    def bind(self, model: BuildModel, shape: ImageShape, batch: int = 32) -> "Plan":
        """The method on a network: who owns which tensor. Two claims on one tensor are refused. `batch` is the largest
        batch of a step."""
        self._refuse_branches()
        build = self._of_base_width(model)
        nets = self.budget.networks(lambda: self.norm.prepare(self.budget.prepare(build(), self.norm, shape)))
        net, tag = nets[0], tags(nets[0])
        self._refuse_without_norms(net)
        placement = {n: self._place(t) for n, t in tag.items()}
        for name, where in placement.items():
            if tag[name].role in self.aggregator.claims and where is not Placement.SHARED:
                raise HardyError(
                    f"two owners for tensor {name!r}: norm {name_part(self.norm)!r} keeps it {where}, and aggregator "
                    f"{name_part(self.aggregator)!r} has a rule for {tag[name].role}. Usual fix: norm batch, or leave "
                    f"{tag[name].role} out of the aggregator."
                )
        examine(net, shape)
        own = [{n: t.detach() for n, t in (*w.named_parameters(), *w.named_buffers()) if n in tag} for w in nets]
        start = own[0]
        trained = select(start, (n for n, t in tag.items() if t.trained))
        shared = [n for n in trained if placement[n] is Placement.SHARED]
        for part, where, extra in (
            (self.optimiser, Placement.SHARED, self.optimiser.shared(select(trained, shared))),
            (self.objective, Placement.PRIVATE, self.objective.private(shape, batch)),
            (self.objective, Placement.PRIVATE, self.objective.kept(own[0])),
            (self.optimiser, Placement.PRIVATE, self.optimiser.kept_state(trained, shared)),
        ):
            self._refuse_extra(part, where, extra, tag)
            start |= extra
            placement |= dict.fromkeys(extra, where)
            tag |= {n: Tag(Role.CONTROL) for n in extra}
        return Plan(
            method=self,
            model=deepcopy(net).requires_grad_(False),  # the user's own keeps its flags
            tags=tag,
            placement=placement,
            start=start,
            others=tuple({**start, **other} for other in own[1:]),
            submodels=self.budget.submodels(net, shape),
            optimiser_shapes={n: tuple(t.shape) for n, t in self.optimiser.init(trained, shared).items()},
        )

    def _of_base_width(self, model: BuildModel) -> Callable[[], nn.Module]:
        """Builds the network of a base; one that is not narrower than the ×1 network is refused."""
        width = self.budget.base_width
        if width is None or width == 1:
            return lambda: model(self.norm.layer)
        given = inspect.signature(model).parameters.values()
        if not any(p.name == "width" or p.kind is p.VAR_KEYWORD for p in given):
            raise HardyError(
                f"the bases of method {self.name!r} are ×{width:g}, but the model given takes no width: each base "
                "would be a network of full size. Write it as `def net(norm, width=1.0)` and build all layers so wide."
            )
        with torch.random.fork_rng(devices=[]):
            narrow, full = (sum(p.numel() for p in model(self.norm.layer, width=w).parameters()) for w in (width, 1.0))
        if narrow >= full:
            raise HardyError(
                f"the bases of method {self.name!r} are ×{width:g}, but the model ignores its width: {narrow} "
                f"parameters at ×{width:g} and {full} at ×1. Build all layers but the last `width` times as wide."
            )
        return lambda: model(self.norm.layer, width=width)

    def _refuse_without_norms(self, net: nn.Module) -> None:
        """A norm that was chosen, on a network that has none of its layers, would have no effect."""
        wanted = type(self.norm.layer(1))
        if wanted is nn.Identity or self.norm == _usual("norm", "batch")():
            return
        if not any(type(module) is wanted for module in net.modules()):
            raise HardyError(
                f"norm {name_part(self.norm)!r} of method {self.name!r} has no effect: the network has no "
                f"{wanted.__name__} layer. Build the network with norm(features), pass one with nn.BatchNorm2d through "
                "hardy.models.adopt, or take a method without norms of its own, such as fedavg."
            )

    def _place(self, tag: Tag) -> Placement:
        of_a_norm = tag.role in _NORM_ROLES or (tag.role is Role.COUNTER and tag.branch)
        return self.norm.placement(tag) if of_a_norm else self.weights

    def _refuse_branches(self) -> None:
        kept = self.norm.branches
        needed = frozenset().union(*(p.branches for p in walk(self.objective) if isinstance(p, Objective)))
        if kept is not None and (missing := needed - kept):
            raise HardyError(
                f"objective {name_part(self.objective)!r} uses statistics of the branch {min(missing)!r}, but norm "
                f"{name_part(self.norm)!r} keeps only {', '.join(sorted(kept))}. Usual fix: norm dual, or branch clean."
            )
        if kept is not None and (unused := kept - needed):
            raise HardyError(
                f"norm {name_part(self.norm)!r} keeps statistics of the branch {min(unused)!r}, but objective "
                f"{name_part(self.objective)!r} never goes through it. Usual fix: norm batch or local, or an "
                'adversarial objective with branch = "adversarial".'
            )
        if self.norm.inference_statistics == "batch" and issubclass(self.norm.keeps, FederatedStatistics):
            raise HardyError(
                f"norm {name_part(self.norm)!r} normalises by what the server sent; inference_statistics must be "
                "running or recomputed."
            )

    def _refuse_extra(self, part: Part, where: Placement, extra: Tensors, tag: dict[str, Tag]) -> None:
        if taken := extra.keys() & tag.keys():
            raise HardyError(
                f"two owners for tensor {min(taken)!r}: the model and {name_part(part)!r}. Usual fix: rename the "
                "module."
            )
        if extra and where is Placement.SHARED and Role.CONTROL not in self.aggregator.claims:
            raise HardyError(
                f"optimiser {name_part(part)!r} adds shared tensors ({min(extra)}, ...), but aggregator "
                f"{name_part(self.aggregator)!r} has no rule for control. Usual fix: aggregator by_role with the rule "
                "wanted as default and control = control_mean."
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
    submodels: Submodels | None = None
    """the sub-networks that clients of small capacity train"""
    optimiser_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """the optimiser's state in a round, of one slot; it starts at zero unless it is kept"""

    def __repr__(self) -> str:
        placed = {where: select(self.start, self.names(where)) for where in Placement}
        words = "; ".join(f"{where} {count(values)}" for where, values in placed.items() if values)
        return f"Plan of {self.method.name!r} on {type(self.model).__name__}, of a base: {words}"

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
                groups.append((own, tuple(names)))
        by_name = find("aggregator", "by_name")
        made: Aggregator = by_name(default=rule, groups=tuple(groups)) if groups else rule
        return made

    @cached_property
    def sent(self) -> dict[str, str]:
        """Buffers that hold, all round long, what the server sent of a statistic -> that statistic."""
        found = [path for path, module in self.model.named_modules() if isinstance(module, FederatedStatistics)]
        return {f"{path}.sent_{name}": f"{path}.{name}" for path in found for name in ("mean", "var")}

    @property
    def synchronised(self) -> bool:
        """Whether each step of a client needs those of all others."""
        return any(part.synchronised for part in walk(self.method.norm) if isinstance(part, Norm))

    @cached_property
    def trained(self) -> list[str]:
        return [name for name, tag in self.tags.items() if tag.trained]

    @cached_property
    def shared_trained(self) -> list[str]:
        """The trained tensors that all clients have in common."""
        return [name for name in self.trained if self.placement[name] is Placement.SHARED]

    @cached_property
    def buffers(self) -> list[str]:
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

    def objective(self, client: Client, round_number: int) -> Objective:
        """What a client minimises in a round: by its kind, and within its capacity."""
        key = client.kind, client.capacity, round_number
        if key not in self._objectives:
            if len(self._objectives) >= _OBJECTIVES_KEPT:
                self._objectives.clear()
            found = self.method.objective.for_client(client.kind, round_number)
            if self.submodels:
                found = self.submodels.objective(found, client.capacity, round_number)
            self._objectives[key] = found
        return self._objectives[key]

    @cached_property
    def _objectives(self) -> dict[tuple[str, float, int], Objective]:
        return {}
