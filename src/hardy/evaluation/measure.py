"""Accuracy of every client's network as it is served, on images as they are and under attack.

An attack sees exactly the network that serves a client (hardy.evaluation.serving), with the statistics of the `attack`
branch; images, attacked or not, are judged with those of the `predict` branch: who classifies an image does not know
whether it was attacked. With a robustness λ, both take the mix of the branches.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardy.attacks.base import Attack, Forward
from hardy.attacks.threats import Threat, parse_threat
from hardy.core import random, tensors
from hardy.core.engine import Branches, DataPart, Question
from hardy.core.federation import Client, Rows
from hardy.core.net import Mixture
from hardy.core.state import ServerState
from hardy.core.tensors import Tensors
from hardy.engines.base import Engine
from hardy.errors import HardyError
from hardy.evaluation import serving

Mask = NDArray[np.bool_]
Judge = Callable[[Mixture, Tensor, Tensor, Tensor], Tensor]
"""(network, images, labels, key) -> which images are classified rightly"""
_POINTS = 2048
"""images in one call"""


class ServedClients:
    """The networks that serve the clients of an engine, ready to be asked about rows of a part of their data."""

    def __init__(
        self,
        engine: Engine,
        state: ServerState,
        part: DataPart,
        branches: Branches,
        limit: int | None = None,
        *,
        width: float = 1.0,
        order: Sequence[int] | None = None,
    ) -> None:
        self.engine = engine
        self.attack, self.predict = serving.chosen_branches(engine.plan.method.norm, branches)
        self.robustness = branches.robustness
        self.images = "test" if part == "test" else "train"
        own = {**state.reported, **engine.store}
        shared = engine.plan.aggregator.served(state.shared, state.memory)
        self.served = serving.serve(
            engine.plan, shared, own, width=width, order=order, images=partial(_everybodys_images, engine)
        )
        self.common, self.own = self.served.common, self.served.own
        self.together = engine.plan.method.norm.inference_statistics == "batch"
        """whether a client's rows are normalised by each other"""
        self.rows = [getattr(client, part)[:limit] for client in engine.data.clients]

    def network(self, common: Sequence[Tensors], own: Sequence[Tensors]) -> Mixture:
        """The network of one client's tensors, one entry per base."""
        bases = [{**base, **mine} for base, mine in zip(common, own, strict=True)]
        return serving.mixture(self.engine.plan, bases)

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
            serving.refuse_common(self.engine.plan)
        if self.together and 1 in map(len, rows):
            raise HardyError(
                "norm inference_statistics is 'batch', but a client has 1 row, which has no statistics; it needs 2."
            )
        if common or (self.served.alike and not joint):  # clients that differ in nothing are one: rows run together
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
        return partial(net, branch=self.predict, robustness=self.robustness)

    def attacking(self, net: Mixture) -> Forward:
        return partial(net, branch=self.attack, robustness=self.robustness)

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


def training_images(engine: Engine, client: int) -> Tensor:
    """A client's training images."""
    rows = torch.from_numpy(engine.data.clients[client].train).to(engine.device)
    return engine.device_data.images("train", rows)


def _everybodys_images(engine: Engine) -> Iterator[Tensor]:
    return (training_images(engine, client) for client in range(len(engine.data.clients)))


def threat_key(seed: int, threat: Threat, stage: str) -> Tensor:
    return random.fold(torch.tensor(seed), "evaluate", threat.name, stage)


class LocalMeasure:
    """Measures the clients of an engine of this machine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def measure(self, state: ServerState, asked: Sequence[Question], branches: Branches) -> list[list[float | None]]:
        """A figure of each client for each question; None: it has no such rows."""
        served: dict[DataPart, ServedClients] = {}
        found: dict[Question, list[Mask]] = {}
        for part, threat in asked:
            if part not in served:
                served[part] = ServedClients(self.engine, state, part, branches)
                found[Question(part)] = served[part].standing()
            if threat:
                found[Question(part, threat)] = self._under(served[part], parse_threat(threat), found[Question(part)])
        return [shares(found[question]) for question in asked]

    def _under(self, served: ServedClients, threat: Threat, standing: list[Mask]) -> list[Mask]:
        for name, attack in threat.attack.stages():
            standing = served.attacked(attack, standing, threat_key(self.engine.seed, threat, name))
        return standing


def order_of_bases(engine: Engine, state: ServerState, branch: str | None = None) -> list[int] | None:
    """The bases by their validation accuracy, the best first, where the budget asks for it (Algorithm 1, line 9)."""
    budget = engine.plan.method.budget
    if not budget.best_first:
        return None
    alone = []
    for base in range(budget.bases):
        served = ServedClients(
            engine, state, "validation", Branches(predict=branch), width=budget.widths[0], order=[base]
        )
        alone.append(summarise(served.standing(), engine.data.clients)["mean"] or 0.0)
    return sorted(range(budget.bases), key=lambda base: -alone[base])


def shares(hits: Sequence[Mask]) -> list[float | None]:
    """The share of each client's rows; None: it has none."""
    return [float(mask.mean()) if len(mask) else None for mask in hits]


def summarise(hits: Sequence[Mask], clients: Sequence[Client]) -> dict[str, Any]:
    """Mean over clients, worst client, mean by domain; clients without rows do not count."""
    return averages(shares(hits), clients)


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


def figures(
    values: Sequence[float | None], clients: Sequence[Client], part: DataPart, round_number: int
) -> dict[str, Any]:
    """The averages of a part's rows, with the round they are of and the number of images in all."""
    asked = [len(getattr(client, part)) for client, v in zip(clients, values, strict=True) if v is not None]
    return {**averages(values, clients), "round": round_number, "images": sum(asked)}
