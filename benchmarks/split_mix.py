"""Speed of Split-Mix on one machine: python benchmarks/split_mix.py OUT.json [--clients 50] [--smoke]

1. A round of Split-Mix on the digits CNN, ×0.125 bases, capacities 1 to 1/8, 112 images a client in batches of 32:
   sequential and vectorised; and of SHeteroFL and FedAvg ×1 on the same clients.
2. Changing width and robustness of a trained network in place, and its latency for one image.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import hardy
from engines import CUDA, SMOKE, federation, provenance
from hardy import papers
from hardy.attacks.gradient import pgd
from hardy.core.training import Training
from hardy.data.capacity import exponential, with_capacity
from hardy.engines import EngineChoice
from hardy.models import digits_cnn
from hardy.parts.optimisers import sgd
from hardy.runs.prepare import prepare


def rounds(method, data, width: float, engine: str, times: int = 1 if SMOKE else 3) -> float:
    """Median seconds of a round, the first left out."""
    chosen = hardy.Experiment(training=Training(rate=0.01, batch=32), engine=EngineChoice(name=engine))
    method = method.replace(optimiser=sgd(momentum=0.9))
    run = prepare(chosen, method=method, model=lambda norm, width=width: digits_cnn(norm=norm, width=width), data=data)
    seconds = []
    for _ in range(times + 1):
        began = time.perf_counter()
        run.state, _ = run.server.round(run.state, run.engine, 0.01)
        if CUDA:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def customising(data) -> dict[str, float]:
    """Milliseconds to go through the widths and levels of robustness, and for one image at the ends."""
    chosen = hardy.Experiment(rounds=1, training=Training(steps=1))
    method = papers.split_mix_dat(attack=pgd(steps=1))
    run = prepare(chosen, method=method, model=lambda norm, width=0.125: digits_cnn(norm=norm, width=width), data=data)
    predictor, seconds = run.customise(robustness=0.0), []
    for width, robustness in ((1.0, 0.0), (0.125, 1.0), (0.5, 0.2), (1.0, 0.8), (0.25, 0.5)) * 4:
        began = time.perf_counter()
        predictor.customise(width=width, robustness=robustness)
        if CUDA:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    found = {"change, median": 1e3 * statistics.median(seconds), "change, slowest": 1e3 * max(seconds)}
    return found | {f"latency x{w:g}": 1e3 * predictor.customise(width=w).latency() for w in (0.125, 0.5, 1.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="result file (JSON)")
    parser.add_argument("--clients", type=int, default=4 if SMOKE else 50)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only shows that it runs")
    options = parser.parse_args()
    out, clients = options.out, options.clients
    alike = federation(clients, 34 if SMOKE else 112)
    data = with_capacity(alike, exponential(), seed=0)
    full = 0.25 if SMOKE else 1.0
    found = {"provenance": provenance(), "clients": clients, "seconds a round": {}}
    rows = {"split_mix x0.125": (papers.split_mix(), data, full / 8), "sheterofl": (papers.sheterofl(), data, full)}
    rows["fedavg x1"] = (papers.fedavg(), alike, full)  # which looks at no capacity
    for name, (method, own, width) in rows.items():
        for engine in ("sequential", "vectorised"):
            found["seconds a round"][f"{name}, {engine}"] = rounds(method, own, width, engine)
            out.write_text(json.dumps(found, indent=1))
            print(name, engine, found["seconds a round"][f"{name}, {engine}"], flush=True)
    found["customising, ms"] = customising(data)
    out.write_text(json.dumps(found, indent=1))
    print(found["customising, ms"])


if __name__ == "__main__":
    main()
