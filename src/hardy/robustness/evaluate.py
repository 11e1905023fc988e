"""Accuracy of every client's network as it is deployed, on images as they are and under attack.

A client is served by the shared tensors with its own. An attack sees exactly that network, with the statistics of the
`attack` branch; images, attacked or not, are judged with those of the `predict` branch: who classifies an image does
not know whether it was attacked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardy import random, tensors
from hardy.client import Rows
from hardy.data.splits import Client
from hardy.engines.base import Engine
from hardy.errors import unknown
from hardy.models.net import Net
from hardy.robustness.attacks import Attack
from hardy.robustness.threats import Threat
from hardy.state import ServerState
from hardy.tensors import Tensors

Part = Literal["validation", "test"]
Mask = NDArray[np.bool_]
Judge = Callable[[Net, Tensor, Tensor, Tensor], Tensor]
"""(network, images, labels, key) -> which images are classified rightly"""
_POINTS = 2048
"""images in one call"""


@dataclass(frozen=True, kw_only=True)
class Branches:
    """Which statistics an attack climbs on, and which images are judged with."""

    attack: str = "clean"
    predict: str = "clean"


class Deployed:
    """The networks of a run, one a client, ready to be asked about rows of its part of the data."""

    def __init__(self, engine: Engine, state: ServerState, part: Part, branches: Branches, limit: int | None) -> None:
        names = engine.plan.model_names
        known = engine.plan.method.norm.branches
        for branch in (branches.attack, branches.predict):
            if known is not None and branch not in known:
                raise unknown("branch", branch, known)
        self.engine, self.branches = engine, branches
        self.images = "test" if part == "test" else "train"
        self.common = {n: t[0] for n, t in state.shared.items() if n in names}
        self.own = {n: t[:, 0] for n, t in {**state.reported, **engine.store}.items() if n in names}
        clients = engine.data.clients
        self.rows = [(client.test if part == "test" else client.validation)[:limit] for client in clients]

    def ask(self, rows: Sequence[Rows], judge: Judge, key: Tensor, *, joint: bool = False) -> list[Mask]:
        """What the judge says of each client's rows. `joint`: all rows of a client in one call, and only those."""
        if not self.own and not joint:  # clients that differ in nothing are one: their rows are run together
            merged = self._table([np.concatenate(rows)], [0], judge, key, _POINTS)[0]
            return np.split(merged, np.cumsum([len(r) for r in rows])[:-1])
        if not joint:
            return self._table(rows, range(len(rows)), judge, key, _POINTS)
        found: list[Mask] = [np.zeros(0, dtype=bool)] * len(rows)
        for size in {len(r) for r in rows}:
            alike = [client for client, r in enumerate(rows) if len(r) == size]
            table = self._table([rows[c] for c in alike], alike, judge, key, max(1, size))
            for client, mask in zip(alike, table, strict=True):
                found[client] = mask
        return found

    def _table(self, rows: Sequence[Rows], clients: Sequence[int], judge: Judge, key: Tensor, width: int) -> list[Mask]:
        """Runs groups of rows side by side; short ones are padded, which running statistics do not mind."""
        engine, plan = self.engine, self.engine.plan

        def right(common: Tensors, own: Tensors, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
            held = {**common, **own}
            net = Net(plan.model, tensors.select(held, plan.trained), tensors.select(held, plan.kept))
            return judge(net, x, y, key)

        longest = max(len(r) for r in rows)
        padded = torch.zeros(len(rows), longest, dtype=torch.int64)
        for i, r in enumerate(rows):
            padded[i, : len(r)] = torch.from_numpy(r)
        padded = padded.to(engine.device)
        who = torch.tensor(clients, device=engine.device)
        own = tensors.gather(self.own, who)
        keys = random.fold(key.to(engine.device), who)
        width = max(1, min(longest, width))
        lane = max(1, _POINTS // width)
        found = torch.zeros(padded.shape, dtype=torch.bool, device=engine.device)
        for first in range(0, len(rows), lane):
            group = slice(first, first + lane)
            for start in range(0, longest, width):
                index = padded[group, start : start + width]
                x, y = engine.resident.images(self.images, index), engine.resident.y[self.images][index]
                found[group, start : start + width] = engine.map(
                    right, self.common, tensors.gather(own, group), x, y, random.fold(keys[group], start)
                )
        table: Mask = found.cpu().numpy()
        return [table[i, : len(r)] for i, r in enumerate(rows)]

    def standing(self) -> list[Mask]:
        """Which rows are classified rightly when nobody attacks."""

        def judge(net: Net, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
            return net(x, branch=self.branches.predict).argmax(-1) == y

        return self.ask(self.rows, judge, torch.tensor(0))

    def attacked(self, attack: Attack, standing: Sequence[Mask], key: Tensor) -> list[Mask]:
        """Which rows are left standing by an attack on those that stood before it."""

        def judge(net: Net, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
            changed = attack.perturb(partial(net, branch=self.branches.attack), x, y, key)
            return net(changed, branch=self.branches.predict).argmax(-1) == y

        if attack.joint:
            return self.ask(self.rows, judge, key, joint=True)
        hits = self.ask([r[s] for r, s in zip(self.rows, standing, strict=True)], judge, key)
        left = [mask.copy() for mask in standing]
        for mask, hit in zip(left, hits, strict=True):
            mask[mask] = hit
        return left


def threat_key(seed: int, threat: Threat, stage: str) -> Tensor:
    return random.fold(torch.tensor(seed), "evaluate", threat.name, stage)


def accuracies(engine: Engine, state: ServerState, part: Part, branch: str = "clean") -> dict[str, Any]:
    """Standard accuracy of all clients on their own rows."""
    return summarise(Deployed(engine, state, part, Branches(predict=branch), None).standing(), engine.data.clients)


def summarise(hits: Sequence[Mask], clients: Sequence[Client]) -> dict[str, Any]:
    """Mean over clients, worst client, mean by domain; clients without rows do not count."""
    values = [float(mask.mean()) if len(mask) else None for mask in hits]
    known = [v for v in values if v is not None]
    domains: dict[str, list[float]] = {}
    for value, client in zip(values, clients, strict=True):
        if value is not None:
            domains.setdefault(client.domain, []).append(value)
    return {
        "mean": float(np.mean(known)) if known else None,
        "worst_client": min(known, default=None),
        "by_domain": {domain: float(np.mean(found)) for domain, found in domains.items()},
        "by_client": values,
    }
