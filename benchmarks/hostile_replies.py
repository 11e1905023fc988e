"""One client of ten answers what cannot be right: what becomes of the round, in Hardy, Flower and ByzFL.

    python benchmarks/hostile_replies.py [--smoke]

prints Markdown tables. Flower and ByzFL are measured where they can be imported (`pip install --no-deps byzfl`), else
left out. A cell says what the aggregate is: "unchanged" is, bit for bit, that of the nine honest replies alone; in a
"near" one no number is further from that than the honest replies lie apart; in a "hijacked" one some are. An exception
ends the run. A cell is the worst of three trials: the bad client is the first, the fifth or the last.
`--smoke` tries a few rules and replies.
"""

import argparse
import inspect
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hardy import models, papers
from hardy.core.engine import Trains
from hardy.core.federation import Client
from hardy.core.messages import Answer, Slot, Work
from hardy.core.server import Server
from hardy.core.training import Training
from hardy.parts.aggregators.base import Aggregator, pipeline
from hardy.registry import PARTS

Arrays = Mapping[str, NDArray[Any]]
CLIENTS, EXAMPLES, F = 10, 50, 1
WORSE = ("unchanged", "near", "hijacked", "Inf model", "NaN model", "no model", "exception")
torch.set_num_threads(1)
torch.manual_seed(0)
MODEL = papers.fedavg().bind(lambda norm: models.mlp(norm=norm, shape=(1, 4, 4), classes=3, hidden=(8,)), (1, 4, 4))


@dataclass(frozen=True)
class Reply:
    """One client's reply, in no framework's words."""

    arrays: Arrays
    examples: float = EXAMPLES
    round: int = 0
    metrics: tuple[str, ...] = ()


def honest_replies() -> list[Reply]:
    rng = np.random.default_rng(0)
    start = {name: tensor.numpy() for name, tensor in MODEL.start.items()}
    return [
        Reply({n: (a + rng.uniform(0.05, 0.15, a.shape)).astype(np.float32) for n, a in start.items()})
        for _ in range(CLIENTS)
    ]


def fill(value: float) -> Callable[[Reply], Reply]:
    return lambda reply: replace(reply, arrays={n: np.full_like(a, value) for n, a in reply.arrays.items()})


def first(change: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[[Reply], Reply]:
    def changed(reply: Reply) -> Reply:
        name, array = next(iter(reply.arrays.items()))
        return replace(reply, arrays={**reply.arrays, name: change(array)})

    return changed


def renamed(reply: Reply) -> Reply:
    return replace(reply, arrays={f"{n}2" if n == min(reply.arrays) else n: a for n, a in reply.arrays.items()})


def twice(reply: Reply) -> list[Reply]:
    return [reply, fill(1e6)(reply)]


INJECTIONS: dict[str, Callable[[Reply], Reply | list[Reply]]] = {
    "all NaN": fill(np.nan),
    "all +Inf": fill(np.inf),
    "all −Inf": fill(-np.inf),
    "all 1e38": fill(1e38),
    "1e12 examples": lambda reply: replace(fill(7.0)(reply), examples=10**12),
    "−1000 examples": lambda reply: replace(reply, examples=-1000),
    "NaN examples": lambda reply: replace(reply, examples=float("nan")),
    "array renamed": renamed,
    "array missing": lambda reply: replace(reply, arrays=dict(list(reply.arrays.items())[1:])),
    "array added": lambda reply: replace(reply, arrays={**reply.arrays, "payload": np.zeros(10)}),
    "wrong shape": first(lambda a: a[:-1]),
    "oversize (× 1000)": first(lambda a: np.tile(a, (1000, *[1] * (a.ndim - 1)))),
    "wrong type (float64)": first(lambda a: a.astype(np.float64)),
    "metric added": lambda reply: replace(reply, metrics=("speed",)),
    "reply of another round": lambda reply: replace(fill(0.0)(reply), round=-1),
    "two replies": twice,
}
VALUES = ("all NaN", "all +Inf", "all −Inf", "all 1e38")
PAIRED = ("reply of another round", "two replies")
"""what Flower's transport is there to prevent: it pairs each reply with the message it answers"""


Rule = Callable[[Mapping[int, Sequence[Reply]]], Arrays | None]
"""the aggregate of the replies of each client"""


def outcome(rule: Rule, name: str) -> str:
    """The worst that happens, wherever among the others the bad client stands."""
    return max((_outcome(rule, name, bad) for bad in (0, 4, CLIENTS - 1)), key=WORSE.index)


def _outcome(rule: Rule, name: str, bad: int) -> str:
    honest = dict(enumerate(honest_replies()))
    heard = {client: [reply] for client, reply in honest.items() if client != bad or name == "two replies"}
    sent = INJECTIONS[name](honest[bad])
    expected = rule(heard)
    assert expected is not None
    try:
        found = rule(
            {client: [honest[client]] for client in honest} | {bad: sent if isinstance(sent, list) else [sent]}
        )
    except Exception:
        return "exception"
    if found is None:
        return "no model"
    if all(np.array_equal(found[n], expected[n]) for n in expected):
        return "unchanged"
    for words, holds in (("NaN", np.isnan), ("Inf", np.isinf)):
        if any(holds(found[n]).any() for n in expected):
            return f"{words} model"
    apart = {n: np.ptp([reply.arrays[n] for reply in honest.values()], 0) for n in expected}
    return "near" if all((abs(found[n] - expected[n]) <= apart[n]).all() for n in expected) else "hijacked"


def hardy_rules() -> dict[str, Rule]:
    def example(factory: Callable[..., Any]) -> Any:
        usual = {"f": F, "radius": 100.0, "size": 2, "share": 0.4, "deviation": 1e-6}
        return factory(**{k: v for k, v in usual.items() if k in inspect.signature(factory).parameters})

    rules = {
        name: example(rule) for name, rule in PARTS["aggregator"].items() if name not in ("control_mean", "fltrust")
    }
    stages = {
        name: stage for name, stage in PARTS["stage"].items() if name != "client_level_dp"
    }  # no shared statistics
    rules |= {name: pipeline(pre=(example(stage),)) for name, stage in stages.items()}
    rules |= {name: pipeline(post=(example(update),)) for name, update in PARTS["server_update"].items()}
    return {name: _hardy(rule) for name, rule in rules.items()}


def _hardy(aggregator: Aggregator) -> Rule:
    plan = replace(MODEL, method=MODEL.method.replace(aggregator=aggregator))
    rows = np.arange(EXAMPLES)
    clients = [Client(domain="", train=rows, validation=rows[:0], test=rows[:0]) for _ in range(CLIENTS)]
    server = Server(plan=plan, clients=clients, seed=0, training=Training(batch=EXAMPLES))

    def rule(replies: Mapping[int, Sequence[Reply]]) -> Arrays:
        class Outside(Trains):
            def train(self, work: Work) -> Iterator[list[Answer]]:
                yield [
                    Answer(
                        slot=Slot(client),
                        round=work.round + reply.round,
                        shared=reply.arrays,
                        reported={},
                        examples=reply.examples,
                        steps=1,
                        loss=1.0,
                    )
                    for client, sent in replies.items()
                    for reply in sent
                ]

            def cast(self, values: Any) -> Any:
                return values

        after, _ = server.round(server.start(), Outside(), 0.1)
        return {name: tensor[0].numpy() for name, tensor in after.shared.items()}

    return rule


def flower_rules() -> dict[str, Rule]:
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    try:
        from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
        from flwr.serverapp import strategy
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return {}
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # a ServerApp is given these

    def message(reply: Reply) -> Any:
        arrays = ArrayRecord({name: Array(np.asarray(a)) for name, a in reply.arrays.items()})
        metrics = MetricRecord({"num-examples": reply.examples, **dict.fromkeys(reply.metrics, 1.0)})
        asked = Message(RecordDict(), dst_node_id=1, message_type="train")
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=asked)

    def made(cls: Any, **options: Any) -> Rule:
        def rule(replies: Mapping[int, Sequence[Reply]]) -> Arrays:
            arrays, _ = cls(**options).aggregate_train(1, [message(r) for sent in replies.values() for r in sent])
            return {name: array.numpy() for name, array in arrays.items()}

        return rule

    return {
        "FedAvg": made(strategy.FedAvg),
        "FedMedian": made(strategy.FedMedian),
        "FedTrimmedAvg": made(strategy.FedTrimmedAvg, beta=F / CLIENTS),
        "Krum": made(strategy.Krum, num_malicious_nodes=F),
        "MultiKrum": made(strategy.MultiKrum, num_malicious_nodes=F, num_nodes_to_select=CLIENTS - F - 2),
        "Bulyan": made(strategy.Bulyan, num_malicious_nodes=F),
    }


def byzfl_rules() -> dict[str, Rule]:
    sys.modules.setdefault("byzfl.benchmark", types.ModuleType("byzfl.benchmark"))  # it wants torchvision
    try:
        import byzfl
    except ImportError:
        return {}

    def made(name: str, *stages: Any) -> Rule:
        def rule(replies: Mapping[int, Sequence[Reply]]) -> Arrays | None:
            first = replies[1][0].arrays
            rows = np.stack([np.concatenate([a.ravel() for a in r.arrays.values()]) for (r,) in replies.values()])
            found = torch.from_numpy(rows)
            for cls in (*stages, getattr(byzfl, name)):  # made anew: some remember
                found = cls(**{k: v for k, v in {"f": F, "s": 2}.items() if k in inspect.signature(cls).parameters})(
                    found
                )
            if found is None:
                return None
            pieces = np.split(np.asarray(found), np.cumsum([a.size for a in first.values()])[:-1])
            return {n: piece.reshape(a.shape) for piece, (n, a) in zip(pieces, first.items(), strict=True)}

        return rule

    alone = ("Average", "Median", "TrMean", "GeometricMedian", "Krum", "MultiKrum", "CenteredClipping", "MDA", "Meamed")
    rules = {name: made(name) for name in (*alone, "CAF", "SMEA")}  # not MoNNA, which trusts the first client
    return rules | {
        f"{stage.__name__} + Median": made("Median", stage)
        for stage in (byzfl.NNM, byzfl.Bucketing, byzfl.Clipping, byzfl.ARC)
    }


def table(corner: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [[corner, *columns], ["---"] * (len(columns) + 1), *([name, *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few rules and replies: only shows that it runs")
    smoke = parser.parse_args().smoke
    warnings.simplefilter("ignore")
    ours, flower, byzfl = hardy_rules(), flower_rules(), byzfl_rules()
    if smoke:
        ours, flower, byzfl = ({n: rules[n] for n in list(rules)[:4]} for rules in (ours, flower, byzfl))
    rows = {}
    for name in ("all NaN", "array renamed", "two replies") if smoke else INJECTIONS:
        if name == "metric added":
            cells = ["no such field"]
        else:
            cells = [" / ".join(sorted({outcome(rule, name) for rule in ours.values()}))]
        cells += ["not measured" if name in PAIRED else outcome(rule, name) for rule in flower.values()]
        rows[name] = cells
    print(f"Hardy's rules: {', '.join(ours)}.\n")
    print(table("injected reply", [f"Hardy, {len(ours)} rules", *flower], rows))
    if flower:
        print(f"\nFlower {version('flwr')}.")
    if byzfl:
        found = {name: [outcome(rule, value) for value in VALUES] for name, rule in byzfl.items()}
        print(f"\n{table('ByzFL ' + version('byzfl'), VALUES, found)}")


if __name__ == "__main__":
    main()
