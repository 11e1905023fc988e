"""What every client's network, as it is served, answers to images as they are and under attack: accuracy, metrics.

An attack sees exactly the network that serves a client (hardy.evaluation.serving), with the statistics of the `attack`
branch; images, attacked or not, are judged with those of the `predict` branch: who classifies an image does not know
whether it was attacked. With a robustness λ, both take the mix of the branches.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import islice, product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardy.attacks.base import Attack, Forward, refuse_inputs
from hardy.attacks.threats import Threat, parse_threat
from hardy.core import random, tensors
from hardy.core.engine import Branches, DataPart, Question
from hardy.core.federation import Client, Federation, Rows
from hardy.core.messages import Slot
from hardy.core.metric import Metric
from hardy.core.net import Mixture
from hardy.core.ranks import ALONE, Ranks
from hardy.core.state import ServerState
from hardy.core.tensors import Tensors
from hardy.engines.base import Engine
from hardy.evaluation import serving

Mask = NDArray[np.bool_]
GetLogits = Callable[[Mixture, Tensor, Tensor, Tensor], Tensor]
"""(network, images, labels, key) -> logits"""
POINTS = 2048
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
        ranks: Ranks = ALONE,
    ) -> None:
        """`ranks` share the calls where all clients have one network: each then has the images of all."""
        self.engine, self.ranks = engine, ranks
        self.attack, self.predict = serving.chosen_branches(engine.plan.method.norm, branches)
        self.robustness = branches.robustness
        self.images = "test" if part in ("test", "triggered") else "train"
        data = engine.data
        self._serve = partial(_served, engine, state, width=width, order=order)
        self.together = engine.plan.method.norm.inference_statistics == "batch"
        """whether a client's rows are normalised by each other"""
        self.rows = [getattr(client, part)[:limit] for client in data.profiles]
        if self.together:  # one row alone has no statistics: no figure, as without rows
            self.rows = [rows if len(rows) > 1 else rows[:0] for rows in self.rows]
        labels = torch.from_numpy(engine.data.y_test if self.images == "test" else engine.data.y_train)
        self.labels = [labels[torch.from_numpy(rows)] for rows in self.rows]

    @cached_property
    def served(self) -> serving.Served:
        return self._serve()

    @property
    def common(self) -> list[Tensors]:
        return self.served.common

    @property
    def own(self) -> list[Tensors]:
        return self.served.own

    def network(self, common: Sequence[Tensors], own: Sequence[Tensors]) -> Mixture:
        """The network of one client's tensors, one entry per base."""
        bases = [{**base, **mine} for base, mine in zip(common, own, strict=True)]
        return serving.mixture(self.engine.plan, bases)

    def ask(
        self,
        rows: Sequence[Rows],
        logits: GetLogits,
        key: Tensor,
        *,
        points: int = POINTS,
        joint: bool = False,
        common: bool = False,
    ) -> list[Tensor]:
        """The logits of each measured client's rows, so many in one call. `joint`: all rows of a client in one call,
        and only those; and `common`: those of all clients."""
        joint = joint or self.together
        if common:
            serving.refuse_common(self.engine.plan)
        if common or (self.served.alike and not joint):  # clients that differ in nothing are one: rows run together
            once, places = _distinct(np.concatenate(rows))
            merged = self._table([once], [0], logits, key, points, whole=joint)[0][torch.from_numpy(places)]
            return list(torch.split(merged, [len(r) for r in rows]))
        if not joint:
            return self._table(rows, range(len(rows)), logits, key, points)
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        for size in {len(r) for r in rows}:
            alike = [client for client, r in enumerate(rows) if len(r) == size]
            table = self._table([rows[c] for c in alike], alike, logits, key, points, whole=True)
            for client, answers in zip(alike, table, strict=True):
                found[client] = answers
        return found

    def _table(
        self,
        rows: Sequence[Rows],
        clients: Sequence[int],
        logits: GetLogits,
        key: Tensor,
        points: int,
        *,
        whole: bool = False,
    ) -> list[Tensor]:
        """Runs groups of rows side by side; short ones are padded, which running statistics do not mind."""
        engine = self.engine

        def answer(common: list[Tensors], own: list[Tensors], x: Tensor, y: Tensor, key: Tensor) -> Tensor:
            return logits(self.network(common, own), x, y, key)

        longest = max(len(r) for r in rows)
        filler = next((int(r[0]) for r in rows if len(r)), 0)  # a rank does not hold every row
        padded = torch.full((len(rows), longest), filler)
        for i, r in enumerate(rows):
            padded[i, : len(r)] = torch.from_numpy(r)
        padded = padded.to(engine.device)
        who = torch.tensor(clients, device=engine.device)
        own = [tensors.gather(base, who) for base in self.own]
        numbers = torch.tensor(
            [engine.numbers[engine.data.measured[client]] for client in clients], device=engine.device
        )
        keys = random.fold(key.to(engine.device), numbers)
        width = max(1, longest if whole else min(longest, points))
        lane = max(1, points // width)
        found: Tensor | None = None
        calls = product(range(0, len(rows), lane), range(0, longest, width))
        for first, start in islice(calls, self.ranks.number, None, self.ranks.count):
            group = slice(first, first + lane)
            index = padded[group, start : start + width]
            x, y = engine.device_data.images(self.images, index), engine.device_data.y[self.images][index]
            came = engine.map(
                answer,
                self.common,
                [tensors.gather(base, group) for base in own],
                x,
                y,
                random.fold(keys[group], start),
            )
            if found is None:
                found = came.new_zeros(*padded.shape, came.shape[-1])
            found[group, start : start + width] = came
        found = self.ranks.total(found)
        table = torch.empty(*padded.shape, 0) if found is None else found.cpu()
        return [table[i, : len(r)] for i, r in enumerate(rows)]

    def predicting(self, net: Mixture) -> Forward:
        return partial(net, branch=self.predict, robustness=self.robustness)

    def attacking(self, net: Mixture) -> Forward:
        return partial(net, branch=self.attack, robustness=self.robustness)

    def answers(self) -> list[Tensor]:
        """The logits of each client's rows when nobody attacks."""

        def logits(net: Mixture, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
            return self.predicting(net)(x)

        return self.ask(self.rows, logits, torch.tensor(0))

    def attacked(
        self, attack: Attack, before: Sequence[Tensor], key: Tensor, *, ensemble: bool = False
    ) -> list[Tensor]:
        """The logits after an attack on the rows that were still classified rightly before it; the others keep
        theirs. One shift for all rows is judged on all of them, unless it is a stage of an ensemble."""

        def logits(net: Mixture, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
            return self.predicting(net)(attack.perturb(self.attacking(net), x, y, key))

        points = max(1, POINTS // attack.points)
        if attack.joint:
            came = self.ask(self.rows, logits, key, points=points, joint=True, common=attack.common)
            if not ensemble:
                return came
        upright = self.right(before)
        if attack.joint:
            came = [new[mask] for new, mask in zip(came, upright, strict=True)]
        elif self.together:  # leaving out the fallen would change the statistics of the others
            came = self.ask(self.rows, logits, key, points=points)
            came = [new[mask] for new, mask in zip(came, upright, strict=True)]
        else:
            came = self.ask([r[mask] for r, mask in zip(self.rows, upright, strict=True)], logits, key, points=points)
        after = [old.clone() for old in before]
        for old, mask, new in zip(after, upright, came, strict=True):
            if len(new):
                old[torch.from_numpy(mask)] = new
        return after

    def right(self, answers: Sequence[Tensor]) -> list[Mask]:
        """Which rows are classified rightly."""
        return [
            (logits.argmax(-1) == y).numpy() if len(y) else np.zeros(0, dtype=bool)
            for logits, y in zip(answers, self.labels, strict=True)
        ]

    def standing(self) -> list[Mask]:
        """Which rows are classified rightly when nobody attacks."""
        return self.right(self.answers())

    def figure_of(self, metric: Metric | None, answers: Sequence[Tensor]) -> list[float | None]:
        """A metric of each client's answers, by default the share of right ones; None: no rows, or undefined."""
        if metric is None:
            return shares(self.right(answers))
        return [measured(metric, logits, y) for logits, y in zip(answers, self.labels, strict=True)]


def _served(engine: Engine, state: ServerState, *, width: float, order: Sequence[int] | None) -> serving.Served:
    """The networks of an engine's clients."""
    own = client_tensors(engine, state)
    shared = engine.plan.aggregator.served(state.shared, state.memory)
    images = partial(_everybodys_images, engine)
    return serving.serve(engine.plan, shared, own, rounds=state.round, width=width, order=order, images=images)


def client_tensors(engine: Engine, state: ServerState) -> Tensors:
    """The measured clients' own tensors, [C, B, ...]."""
    data, bases = engine.data, engine.plan.method.budget.bases
    if data.sample is None:
        return {**state.reported, **engine.store}
    slots = [Slot(client, base) for client in data.sample for base in range(bases)]
    rows = {**state.reported.read(slots), **engine.store.read(slots)}
    return tensors.apply(lambda t: t.view(len(data.sample or ()), bases, *t.shape[1:]), rows)


def measured(metric: Metric, logits: Tensor, labels: Tensor) -> float | None:
    """A metric of some rows; None: there are none, or it is undefined on them."""
    value = metric.measure(logits.double(), labels) if len(labels) else None
    return None if value is None or not math.isfinite(value) else float(value)


def _distinct(rows: Rows) -> tuple[Rows, Rows]:
    """Rows to ask about, and where each given row is among them: clients may share test rows. Rows that some
    clients have and others have not are all kept, since one attack on all of them weighs each client's.

    >>> [found.tolist() for found in _distinct(np.array([7, 5, 7, 5]))]
    [[5, 7], [1, 0, 1, 0]]
    >>> [found.tolist() for found in _distinct(np.array([7, 5, 7]))]
    [[7, 5, 7], [0, 1, 2]]
    """
    once, places, counts = np.unique(rows, return_inverse=True, return_counts=True)
    if len(once) and counts.min() == counts.max() > 1:
        return once, places
    return rows, np.arange(len(rows))


def training_images(engine: Engine, client: int) -> Tensor:
    """A client's training images."""
    rows = torch.from_numpy(engine.data.clients[client].train).to(engine.device)
    return engine.device_data.images("train", rows)


def _everybodys_images(engine: Engine) -> Iterator[Tensor]:
    return (training_images(engine, client) for client in engine.data.measured)


def threat_key(seed: int, threat: Threat, stage: str) -> Tensor:
    return random.fold(torch.tensor(seed), "evaluate", threat.name, stage)


class LocalMeasure:
    """Measures the clients of an engine of this machine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def served(
        self,
        state: ServerState,
        part: DataPart,
        branches: Branches,
        limit: int | None = None,
        *,
        width: float = 1.0,
        order: Sequence[int] | None = None,
    ) -> ServedClients:
        return ServedClients(self.engine, state, part, branches, limit, width=width, order=order)

    def measure(self, state: ServerState, asked: Sequence[Question], branches: Branches) -> list[list[float | None]]:
        """A figure of each client for each question; None: it has no such rows."""
        served: dict[DataPart, ServedClients] = {}
        found: dict[tuple[DataPart, Attack | None], list[Tensor]] = {}  # an attack under two names runs once
        attacks = {threat: parse_threat(threat) if threat else None for _, threat, _ in asked}
        for part, threat, _ in asked:
            if part not in served:
                served[part] = self.served(state, part, branches)
                found[part, None] = served[part].answers()
            chosen = attacks[threat]
            if chosen and (part, chosen.attack) not in found:
                found[part, chosen.attack] = self._under(served[part], chosen, found[part, None])
        answers = [found[part, chosen.attack if (chosen := attacks[threat]) else None] for part, threat, _ in asked]
        return [served[part].figure_of(metric, each) for (part, _, metric), each in zip(asked, answers, strict=True)]

    def _under(self, served: ServedClients, threat: Threat, answers: list[Tensor]) -> list[Tensor]:
        refuse_inputs(threat.attack, self.engine.data.shape, bounded=self.engine.data.bounded)
        for name, attack in threat.attack.stages():
            answers = served.attacked(attack, answers, threat_key(self.engine.seed, threat, name), ensemble=bool(name))
        return answers


def order_of_bases(
    engine: Engine, state: ServerState, branch: str | None = None, measures: LocalMeasure | None = None
) -> list[int] | None:
    """The bases by their validation accuracy, the best first, where the budget asks for it (Algorithm 1, line 9).
    `measures`: who asks the clients' networks."""
    budget, measures = engine.plan.method.budget, measures or LocalMeasure(engine)
    if not budget.best_first:
        return None
    alone = []
    for base in range(budget.bases):
        served = measures.served(state, "validation", Branches(predict=branch), width=budget.widths[0], order=[base])
        alone.append(summarise(served.standing(), engine.data.profiles)["mean"] or 0.0)
    return sorted(range(budget.bases), key=lambda base: -alone[base])


def shares(hits: Sequence[Mask]) -> list[float | None]:
    """The share of each client's rows; None: it has none."""
    return [float(mask.mean()) if len(mask) else None for mask in hits]


def summarise(hits: Sequence[Mask], clients: Sequence[Client]) -> dict[str, Any]:
    """Mean over clients, worst client, mean by domain; clients without rows do not count."""
    return averages(shares(hits), clients)


def averages(values: Sequence[float | None], clients: Sequence[Client], metric: Metric | None = None) -> dict[str, Any]:
    """The same of the clients' own figures; None: no figure. The worst is the metric's to say."""
    known = [v for v in values if v is not None]
    domains: dict[str, list[float]] = {}
    for value, client in zip(values, clients, strict=True):
        if value is not None:
            domains.setdefault(client.domain, []).append(value)
    return {
        "mean": float(np.mean(known)) if known else None,
        "worst_client": (min if metric is None or metric.higher_is_better else max)(known, default=None),
        "by_domain": {domain: float(np.mean(found)) for domain, found in domains.items()},
        "by_client": list(values),
    }


def standard_error(shares: Sequence[float | None], images: Sequence[int]) -> float | None:
    """Of the mean over clients of their accuracies, which are of so many images each; None: nobody has one.

    Accuracies of 0.8 and 0.5 on 100 images each have errors of 0.04 and 0.05, and their mean √(0.04² + 0.05²) / 2:
    >>> round(standard_error([0.8, 0.5], [100, 100]), 4)
    0.032
    """
    squares = [p * (1 - p) / count for p, count in zip(shares, images, strict=True) if p is not None]
    return math.sqrt(sum(squares)) / len(squares) if squares else None


def success_figures(found: dict[str, Any]) -> dict[str, Any]:
    """The share of triggered rows that is answered with a backdoor's target, as a metric: the higher the worse. Over a
    network the server does not know how many rows those are."""
    known = [value for value in found["by_client"] if value is not None]
    told = {"images": found["images"] or None, "worst_client": max(known, default=None)}
    return {**found, **told, "better": "lower", "missing": []}


def figures(
    values: Sequence[float | None],
    clients: Sequence[Client],
    images: Sequence[int],
    round_number: int,
    metric: Metric | None = None,
    *,
    data: Federation | None = None,
) -> dict[str, Any]:
    """The averages, with the round they are of and the images in all of the clients that have a figure. Of a metric
    also which way is better, and the clients that have images and no figure: it is undefined there, or they did not
    answer."""
    counted = sum(count for count, value in zip(images, values, strict=True) if value is not None)
    found = {**averages(values, clients, metric), "round": round_number, "images": counted}
    if metric is None:
        found["standard_error"] = standard_error(values, images) if counted else None
    else:
        found["better"] = "higher" if metric.higher_is_better else "lower"
        found["missing"] = [at for at, value in enumerate(values) if value is None and images[at]]
    return found | (_of_sample(values, data) if data is not None and data.sample is not None else {})


def _of_sample(values: Sequence[float | None], data: Federation) -> dict[str, Any]:
    """What is said of the figures of some of very many clients: how they are spread, and the error of their mean, in
    which both the draw of the clients and that of their images show."""
    known = np.array([value for value in values if value is not None])
    left = 1 - len(values) / len(data.clients)
    levels = (0.05, 0.25, 0.5, 0.75, 0.95) if len(known) else ()
    return {
        "by_client": [values[at] for at in data.listed],
        "measured": len(values),
        "clients": len(data.clients),
        "quantiles": {f"{level:g}": float(np.quantile(known, level)) for level in levels},
        "standard_error": math.sqrt(known.var(ddof=1) * left / len(known)) if len(known) > 1 else None,
    }
