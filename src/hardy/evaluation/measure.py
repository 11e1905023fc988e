"""Accuracy of every client's network as it is deployed, on images as they are and under attack.

A client is served by the shared tensors with its own, of as many bases as the width asks for. An attack sees exactly
that network, with the statistics of the `attack` branch; images, attacked or not, are judged with those of the
`predict` branch: who classifies an image does not know whether it was attacked. With a robustness λ, both take the mix
of the branches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardy.attacks.base import Attack, Forward
from hardy.attacks.threats import Threat
from hardy.core import random, tensors
from hardy.core.federation import Client, Rows
from hardy.core.method import Plan
from hardy.core.net import Mixture, Net
from hardy.core.partition import Placement, Role
from hardy.core.state import ServerState
from hardy.core.tensors import Tensors
from hardy.deploy.personalise import estimated
from hardy.engines.base import Engine
from hardy.errors import HardyError, unknown
from hardy.parts.norms import Norm

Part = Literal["train", "validation", "test"]
Mask = NDArray[np.bool_]
Judge = Callable[[Mixture, Tensor, Tensor, Tensor], Tensor]
"""(network, images, labels, key) -> which images are classified rightly"""
_POINTS = 2048
"""images in one call"""


@dataclass(frozen=True, kw_only=True)
class Branches:
    """Which statistics an attack climbs on, and which images are judged with."""

    attack: str = "clean"
    predict: str = "clean"
    robustness: float | None = None
    """λ: both take (1 − λ) of the clean branch and λ of the adversarial one at every layer"""


class Deployed:
    """The networks of a run, one a client, ready to be asked about rows of its part of the data."""

    def __init__(
        self,
        engine: Engine,
        state: ServerState,
        part: Part,
        branches: Branches,
        limit: int | None,
        *,
        width: float = 1.0,
        order: Sequence[int] | None = None,
    ) -> None:
        plan, norm = engine.plan, engine.plan.method.norm
        known = norm.branches
        for branch in (branches.attack, branches.predict):
            if known is not None and branch not in known:
                raise unknown("branch", branch, known)
        refuse_robustness(branches.robustness, norm)
        self.engine, self.branches = engine, branches
        self.images = "test" if part == "test" else "train"
        common, own = networks(engine, state, order)
        served = plan.method.budget.serve({**common, **tensors.gather(own, 0)}, width)
        self.common = [tensors.select(base, common) for base in served]
        """the tensors all clients have in common, a base each"""
        self.own: list[Tensors] = [{} for _ in served]
        """those of each client, [C, ...]"""
        if own:
            serve = partial(plan.method.budget.serve, width=width)
            self.own = torch.vmap(lambda own: [tensors.select(b, own) for b in serve({**common, **own})])(own)
        self.together = norm.serving == "batch"
        """whether a client's rows are normalised by each other"""
        if norm.serving == "post":
            self._measure()
        self.rows = [getattr(client, part)[:limit] for client in engine.data.clients]

    @property
    def alike(self) -> bool:
        """Whether all clients have the same network."""
        return not any(self.own)

    def network(self, common: Sequence[Tensors], own: Sequence[Tensors]) -> Mixture:
        """A client's network as deployed."""
        plan, nets = self.engine.plan, []
        for base, mine in zip(common, own, strict=True):
            held = {**base, **mine}
            nets.append(Net(plan.model, tensors.select(held, plan.trained), tensors.select(held, plan.kept)))
        return Mixture(nets, statistics="images" if self.together else "running")

    def _measure(self) -> None:
        """Every client's own statistics, as its training rows have them."""
        engine, plan = self.engine, self.engine.plan
        statistics = [n for n in plan.kept if plan.roles[n] in (Role.NORM_MEAN, Role.NORM_VAR)]
        for common, own in zip(self.common, self.own, strict=True):
            measured = []
            for number, client in enumerate(engine.data.clients):
                x = engine.device_data.images("train", torch.from_numpy(client.train).to(engine.device))
                found = estimated(plan.model, {**common, **tensors.gather(own, number)}, x)
                measured.append(tensors.select(found, statistics))
            own |= tensors.stack(measured)

    def ask(
        self,
        rows: Sequence[Rows],
        judge: Judge,
        key: Tensor,
        *,
        points: int = _POINTS,
        joint: bool = False,
        common: bool = False,
    ) -> list[Mask]:
        """What the judge says of each client's rows, so many in one call. `joint`: all rows of a client in one call,
        and only those; and `common`: those of all clients."""
        joint = joint or self.together
        if common:
            refuse_common(self.engine.plan)
        if self.together and 1 in map(len, rows):
            raise HardyError("norm serving is 'batch', but a client has 1 row, which has no statistics; it needs 2.")
        if common or (self.alike and not joint):  # clients that differ in nothing are one: their rows run together
            every = np.concatenate(rows)
            merged = self._table([every], [0], judge, key, points, whole=joint)[0]
            return np.split(merged, np.cumsum([len(r) for r in rows])[:-1])
        if not joint:
            return self._table(rows, range(len(rows)), judge, key, points)
        found: list[Mask] = [np.zeros(0, dtype=bool)] * len(rows)
        for size in {len(r) for r in rows}:
            alike = [client for client, r in enumerate(rows) if len(r) == size]
            table = self._table([rows[c] for c in alike], alike, judge, key, points, whole=True)
            for client, mask in zip(alike, table, strict=True):
                found[client] = mask
        return found

    def _table(
        self,
        rows: Sequence[Rows],
        clients: Sequence[int],
        judge: Judge,
        key: Tensor,
        points: int,
        *,
        whole: bool = False,
    ) -> list[Mask]:
        """Runs groups of rows side by side; short ones are padded, which running statistics do not mind."""
        engine = self.engine

        def right(common: list[Tensors], own: list[Tensors], x: Tensor, y: Tensor, key: Tensor) -> Tensor:
            return judge(self.network(common, own), x, y, key)

        longest = max(len(r) for r in rows)
        padded = torch.zeros(len(rows), longest, dtype=torch.int64)
        for i, r in enumerate(rows):
            padded[i, : len(r)] = torch.from_numpy(r)
        padded = padded.to(engine.device)
        who = torch.tensor(clients, device=engine.device)
        own = [tensors.gather(base, who) for base in self.own]
        keys = random.fold(key.to(engine.device), who)
        width = max(1, longest if whole else min(longest, points))
        lane = max(1, points // width)
        found = torch.zeros(padded.shape, dtype=torch.bool, device=engine.device)
        for first in range(0, len(rows), lane):
            group = slice(first, first + lane)
            for start in range(0, longest, width):
                index = padded[group, start : start + width]
                x, y = engine.device_data.images(self.images, index), engine.device_data.y[self.images][index]
                found[group, start : start + width] = engine.map(
                    right,
                    self.common,
                    [tensors.gather(base, group) for base in own],
                    x,
                    y,
                    random.fold(keys[group], start),
                )
        table: Mask = found.cpu().numpy()
        return [table[i, : len(r)] for i, r in enumerate(rows)]

    def predicting(self, net: Mixture) -> Forward:
        return partial(net, branch=self.branches.predict, robustness=self.branches.robustness)

    def attacking(self, net: Mixture) -> Forward:
        return partial(net, branch=self.branches.attack, robustness=self.branches.robustness)

    def standing(self) -> list[Mask]:
        """Which rows are classified rightly when nobody attacks."""

        def judge(net: Mixture, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
            return self.predicting(net)(x).argmax(-1) == y

        return self.ask(self.rows, judge, torch.tensor(0))

    def attacked(self, attack: Attack, standing: Sequence[Mask], key: Tensor) -> list[Mask]:
        """Which rows are left standing by an attack on those that stood before it."""

        def judge(net: Mixture, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
            changed = attack.perturb(self.attacking(net), x, y, key)
            return self.predicting(net)(changed).argmax(-1) == y

        points = max(1, _POINTS // attack.points)
        if attack.joint:
            return self.ask(self.rows, judge, key, points=points, joint=True, common=attack.common)
        if self.together:  # leaving out the fallen would change the statistics of the others
            return [s & h for s, h in zip(standing, self.ask(self.rows, judge, key, points=points), strict=True)]
        upright = [r[s] for r, s in zip(self.rows, standing, strict=True)]
        hits = self.ask(upright, judge, key, points=points)
        left = [mask.copy() for mask in standing]
        for mask, hit in zip(left, hits, strict=True):
            mask[mask] = hit
        return left


def networks(engine: Engine, state: ServerState, order: Sequence[int] | None = None) -> tuple[Tensors, Tensors]:
    """The tensors of all bases' networks, in this order of the bases: shared [B, ...], clients' own [C, B, ...]."""
    bases = slice(None) if order is None else torch.tensor(order, device=engine.device)
    # in the order of the tags, that of the layers: a checkpoint gives them back in another
    names = [name for name in engine.plan.tags if name in engine.plan.model_names]
    own = {**state.reported, **engine.store}
    common = {n: state.shared[n][bases] for n in names if n in state.shared}
    return common, {n: own[n][:, bases] for n in names if n in own}


def refuse_robustness(robustness: float | None, norm: Norm) -> None:
    if robustness is None:
        return
    if norm.branches is not None and "adversarial" not in norm.branches:
        raise HardyError(
            f"robustness {robustness} cannot be chosen: norm {type(norm).__name__!r} keeps no adversarial branch. "
            "Train with norm dual, as split_mix_dat does."
        )
    if not 0 <= robustness <= 1:
        raise HardyError(f"robustness is {robustness}; it must be in [0, 1], from the clean to the adversarial branch.")


def refuse_common(plan: Plan) -> None:
    """A shift for the images of all clients needs a network for all of them."""
    own = [name for name in plan.model_names if plan.placement[name] is not Placement.SHARED]
    if own or plan.method.norm.serving != "running":
        raise HardyError(
            f"a threat with common=true needs one network for all clients; with method {plan.method.name!r} each has "
            "its own norms or weights. Leave common out: then every client meets its own shift."
        )


def threat_key(seed: int, threat: Threat, stage: str) -> Tensor:
    return random.fold(torch.tensor(seed), "evaluate", threat.name, stage)


def accuracies(engine: Engine, state: ServerState, part: Part, branch: str = "clean", **setting: Any) -> dict[str, Any]:
    """Standard accuracy of all clients on their own rows."""
    deployed = Deployed(engine, state, part, Branches(predict=branch), None, **setting)
    return summarise(deployed.standing(), engine.data.clients)


def summarise(hits: Sequence[Mask], clients: Sequence[Client]) -> dict[str, Any]:
    """Mean over clients, worst client, mean by domain; clients without rows do not count."""
    return averages([float(mask.mean()) if len(mask) else None for mask in hits], clients)


def averages(values: Sequence[float | None], clients: Sequence[Client]) -> dict[str, Any]:
    """The same of the clients' own figures; None: no figure."""
    known = [v for v in values if v is not None]
    domains: dict[str, list[float]] = {}
    for value, client in zip(values, clients, strict=True):
        if value is not None:
            domains.setdefault(client.domain, []).append(value)
    return {
        "mean": float(np.mean(known)) if known else None,
        "worst_client": min(known, default=None),
        "by_domain": {domain: float(np.mean(found)) for domain, found in domains.items()},
        "by_client": list(values),
    }
