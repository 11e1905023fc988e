"""Whether `engine = "auto"` chooses well: round times of both engines on the CPU, and what auto picked.

    python benchmarks/auto.py

The two engines take turns round by round, so that a busy moment falls on both. Auto's score in a case is the better
engine's median round over the median round of the engine it picked: 1 is right, and the floor is 0.95.
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

import numpy as np
import torch

from hardy.core.training import Training
from hardy.config import Experiment
from hardy.core.federation import Client, Federation
from hardy.engines import ENGINES, EngineChoice
from hardy.runs.prepare import prepare
from hardy.runs.run import Run
from hardy.core.files import versions

CORES = len(os.sched_getaffinity(0))
CLIENTS, IMAGES, WARM_UP = 10, 60, 2
FLOOR = 0.95
MODELS = {
    "mlp": hardy.models.mlp,
    "tiny_cnn": hardy.models.tiny_cnn,
    "digits_cnn width 0.25": partial(hardy.models.digits_cnn, width=0.25),
}
BATCHES = (10, 30)


def federation() -> Federation:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (CLIENTS * IMAGES, 3, 28, 28), dtype=np.uint8)
    y = rng.integers(0, 10, len(x))
    nothing = np.arange(0)
    return Federation(
        name="noise",
        classes=tuple("0123456789"),
        x_train=x,
        y_train=y,
        x_test=x[:0],
        y_test=y[:0],
        clients=tuple(
            Client(domain="noise", train=rows, validation=nothing, test=nothing)
            for rows in np.arange(len(x)).reshape(CLIENTS, IMAGES)
        ),
    )


def seconds(run: Run) -> float:
    began = time.perf_counter()
    run.state, _ = run.server.round(run.state, run.engine, run.experiment.training.rate)
    return time.perf_counter() - began


def case(threads: int, name: str, batch: int, data: Federation, rounds: int, picks: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    base = Experiment(training=Training(batch=batch))

    def made(engine: str) -> Run:
        choice = EngineChoice(name=engine, device="cpu")
        return prepare(replace(base, engine=choice), model=lambda norm: MODELS[name](norm=norm), data=data)

    runs = {engine: made(engine) for engine in ENGINES}
    times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    picked = []
    for turn in range(WARM_UP + rounds):
        for engine, run in runs.items():
            times[engine].append(seconds(run))
        if turn % max(1, rounds // picks) == 0 and len(picked) < picks:
            picked.append(made("auto").engine.name)
    medians = {engine: statistics.median(found[WARM_UP:]) for engine, found in times.items()}
    return {
        "threads": threads,
        "model": name,
        "batch": batch,
        "seconds_per_round": medians,
        "quartiles": {engine: statistics.quantiles(found[WARM_UP:], n=4)[::2] for engine, found in times.items()},
        "picked": picked,
        "worst_score": min(min(medians.values()) / medians[engine] for engine in picked),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, CORES}), help="torch threads")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--picks", type=int, default=5, help="times auto chooses in each case")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    given = parser.parse_args()
    data, before = federation(), os.getloadavg()[0]
    cases = [
        case(threads, name, batch, data, given.rounds, given.picks)
        for threads in given.threads
        for name in MODELS
        for batch in BATCHES
    ]
    hardware = f"cpu-{CORES}-cores"
    result = {
        "date": given.date,
        "hardware": hardware,
        "machine": platform.machine(),
        "versions": versions(),
        "work": {"clients": CLIENTS, "images": IMAGES, "rounds": given.rounds, "warm_up": WARM_UP},
        "load": [before, os.getloadavg()[0]],
        "floor": FLOOR,
        "worst_score": min(c["worst_score"] for c in cases),
        "cases": cases,
    }
    target = Path(__file__).parent / "results" / f"auto_{hardware}_{given.date}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("| threads | model | batch | sequential, s | vectorised, s | auto picked | score |\n" + "|---" * 7 + "|")
    for c in cases:
        times = (f"{c['seconds_per_round'][engine]:.3f}" for engine in ("sequential", "vectorised"))
        picks = ", ".join(f"{engine} {c['picked'].count(engine)}x" for engine in ENGINES if engine in c["picked"])
        cells = (c["threads"], c["model"], c["batch"], *times, picks, f"{c['worst_score']:.2f}")
        print("|", " | ".join(map(str, cells)), "|")
    print(target)


if __name__ == "__main__":
    main()
