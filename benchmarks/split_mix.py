"""Speed of Split-Mix on one machine: python benchmarks/split_mix.py OUT.json [clients]

1. A round of Split-Mix on the digits CNN, ×0.125 bases, capacities 1 to 1/8, 112 images a client in batches of 32:
   sequential and vectorised; and of SHeteroFL and FedAvg ×1 on the same clients.
2. Changing width and robustness of a trained network in place, and its latency for one image.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch

import hardy
from engines import federation, provenance
from hardy import papers
from hardy.attacks.gradient import pgd
from hardy.core.training import Training
from hardy.data.capacity import exponential, with_capacity
from hardy.engines import EngineChoice
from hardy.models import digits_cnn


def rounds(method, data, width: float, engine: str, times: int = 3) -> float:
    """Median seconds of a round, the first left out."""
    chosen = hardy.Experiment(training=Training(rate=0.01, momentum=0.9, batch=32), engine=EngineChoice(name=engine))
    run = hardy.runs.prepare.prepare(
        chosen, method=method, model=lambda norm: digits_cnn(norm=norm, width=width), data=data
    )
    seconds = []
    for _ in range(times + 1):
        began = time.perf_counter()
        run.state, _ = run.server.round(run.state, run.engine, 0.01)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def customising(data) -> dict[str, float]:
    """Milliseconds to go through the widths and levels of robustness, and for one image at the ends."""
    chosen = hardy.Experiment(rounds=1, training=Training(steps=1))
    method = papers.split_mix_dat(attack=pgd(steps=1))
    run = hardy.runs.prepare.prepare(
        chosen, method=method, model=lambda norm: digits_cnn(norm=norm, width=0.125), data=data
    )
    predictor, seconds = run.customise(robustness=0.0), []
    for width, robustness in ((1.0, 0.0), (0.125, 1.0), (0.5, 0.2), (1.0, 0.8), (0.25, 0.5)) * 4:
        began = time.perf_counter()
        predictor.customise(width=width, robustness=robustness)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    found = {"change, median": 1e3 * statistics.median(seconds), "change, slowest": 1e3 * max(seconds)}
    return found | {f"latency x{w:g}": 1e3 * predictor.customise(width=w).latency() for w in (0.125, 0.5, 1.0)}


def main() -> None:
    out, clients = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 50
    data = with_capacity(federation(clients, 112), exponential(), seed=0)
    found = {"provenance": provenance(), "clients": clients, "seconds a round": {}}
    rows = {"split_mix x0.125": (papers.split_mix(), 0.125), "sheterofl": (papers.sheterofl(), 1.0)}
    rows["fedavg x1"] = (papers.fedavg(), 1.0)
    for name, (method, width) in rows.items():
        for engine in ("sequential", "vectorised"):
            found["seconds a round"][f"{name}, {engine}"] = rounds(method, data, width, engine)
            out.write_text(json.dumps(found, indent=1))
            print(name, engine, found["seconds a round"][f"{name}, {engine}"], flush=True)
    found["customising, ms"] = customising(data)
    out.write_text(json.dumps(found, indent=1))
    print(found["customising, ms"])


if __name__ == "__main__":
    main()
