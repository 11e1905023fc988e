"""What the rule of `engine = "auto"` loses: round times of both engines on the CPU, and which of them the rule takes.

    python benchmarks/auto.py OUT.json [--smoke]

The two engines take turns round by round, so that a busy moment falls on both. The loss of a case is how much longer
the engine that the rule takes needs than the faster one: 0 is right. The rule takes the vectorised engine for layers of
few weights and multiply-accumulates; of the latter the limit that would have lost least is named, so that it can be
drawn again. On two quiet cores it takes about three minutes.
"""

import hardy  # noqa: I001 - first, since it tells torch's threads how to wait

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engines import SMOKE, federation
from hardy.config import Experiment
from hardy.core.federation import Federation
from hardy.core.files import versions
from hardy.core.training import Training
from hardy.engines import ENGINES, EngineChoice
from hardy.engines.auto import layer_size, small_layer
from hardy.runs.prepare import prepare
from hardy.runs.run import Run

CORES = len(os.sched_getaffinity(0))
CLIENTS, IMAGES, WARM_UP = (2, 12, 1) if SMOKE else (10, 60, 2)
MODELS = {
    "mlp": hardy.models.mlp,
    "mlp, 512 hidden": partial(hardy.models.mlp, hidden=(512,)),
    "tiny_cnn": hardy.models.tiny_cnn,
    "digits_cnn width 0.25": partial(hardy.models.digits_cnn, width=0.25),
}
BATCHES = (4, 12) if SMOKE else (2, 5, 10, 30)


def seconds(run: Run) -> float:
    began = time.perf_counter()
    run.state, _ = run.server.round(run.state, run.engine, run.experiment.training.rate)
    return time.perf_counter() - began


def case(threads: int, name: str, batch: int, data: Federation, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    base = Experiment(training=Training(batch=batch))

    def made(engine: str) -> Run:
        choice = EngineChoice(name=engine, device="cpu")
        return prepare(replace(base, engine=choice), model=lambda norm: MODELS[name](norm=norm), data=data)

    runs = {engine: made(engine) for engine in ENGINES}
    times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for _ in range(WARM_UP + rounds):
        for engine, run in runs.items():
            times[engine].append(seconds(run))
    rule = made("auto")
    macs, weights = layer_size(rule.engine.plan, rule.engine.device_data, base.training)
    found = {
        "threads": threads,
        "model": name,
        "batch": batch,
        "macs_of_a_layer": macs,
        "weights_of_a_layer": weights,
        "seconds_per_round": {engine: statistics.median(own[WARM_UP:]) for engine, own in times.items()},
        "quartiles": {engine: statistics.quantiles(own[WARM_UP:], n=4)[::2] for engine, own in times.items()},
        "taken": rule.engine.name,
    }
    return {**found, "loss": loss(found, found["taken"])}


def loss(found: dict[str, Any], engine: str) -> float:
    times = found["seconds_per_round"]
    return times[engine] / min(times.values()) - 1


def mean_loss(cases: list[dict[str, Any]], limit: float) -> float:
    """Of a rule that takes the vectorised engine for layers of few weights and up to so many multiply-accumulates."""

    def taken(case: dict[str, Any]) -> str:
        _, weights = small_layer(case["threads"])
        small = case["macs_of_a_layer"] <= limit and case["weights_of_a_layer"] <= weights
        return "vectorised" if small else "sequential"

    return statistics.mean(loss(case, taken(case)) for case in cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="result file (JSON)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1] if SMOKE else sorted({1, CORES}), help="of torch")
    parser.add_argument("--rounds", type=int, default=2 if SMOKE else 7)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only shows that it runs")
    given = parser.parse_args()
    data, before = federation(CLIENTS, IMAGES), os.getloadavg()[0]
    cases = [
        case(threads, name, batch, data, given.rounds)
        for threads in given.threads
        for name in MODELS
        for batch in BATCHES
    ]
    limits = {
        threads: {
            limit: mean_loss([c for c in cases if c["threads"] == threads], limit)
            for limit in sorted({0, *(c["macs_of_a_layer"] for c in cases)})
        }
        for threads in given.threads
    }
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"cpu-{CORES}-cores",
        "machine": platform.machine(),
        "versions": versions(),
        "work": {"clients": CLIENTS, "images": IMAGES, "rounds": given.rounds, "warm_up": WARM_UP},
        "load": [before, os.getloadavg()[0]],
        "mean_loss": statistics.mean(c["loss"] for c in cases),
        "worst_loss": max(c["loss"] for c in cases),
        "mean_loss_by_limit": limits,
        "cases": cases,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    titles = ("threads", "model", "batch", "million MACs a layer", "sequential, s", "vectorised, s", "taken", "loss")
    print("|", " | ".join(titles), "|\n" + "|---" * len(titles) + "|")
    for c in cases:
        times = (f"{c['seconds_per_round'][engine]:.3f}" for engine in ("sequential", "vectorised"))
        size = f"{c['macs_of_a_layer'] / 1e6:.1f}"
        cells = (c["threads"], c["model"], c["batch"], size, *times, c["taken"], f"{c['loss']:.0%}")
        print("|", " | ".join(map(str, cells)), "|")
    print(f"mean loss {result['mean_loss']:.1%}")
    for threads, losses in limits.items():
        best = min(losses, key=losses.__getitem__)
        print(f"threads {threads}: least with a limit of {best:,.0f} MACs a layer, {losses[best]:.1%}")


if __name__ == "__main__":
    main()
