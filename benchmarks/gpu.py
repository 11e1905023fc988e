"""The rows wanted of a GPU, in one go of under ten minutes: python benchmarks/gpu.py OUT.json [ROW ...] [--smoke]

agreement  the kernels against float64, and three rounds of them against TF32 (benchmarks/kernels.py)
standard   a standard step of the digits CNN, 50 clients, fused and by torch's layers; wanted: 8 ms
fbn        a round of FBN of one step, 10 clients, fused and by torch's layers, and where its time goes; wanted: 3.5 ms
nin        standard and adversarial steps of NIN, 10 clients, fused and by torch's layers; wanted: nothing slower
preresnet18  the same of PreResNet-18
autoattack AutoAttack on the networks of 50 clients, four images each; wanted: 15 s
fifth      `hardy run` of FedRBN, 300 rounds, a fifth attack, in a new process, by phase; wanted: 20 s of rounds and 8 s
all        the same where all attack; wanted: 35 s of rounds and 8 s

Rows are kept as they are measured: what is cut off loses no other. The last two need HARDY_DATA. `--smoke` runs every
row in tiny sizes on the CPU, where no figure means anything.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from startup import ROOT, TINY, whole_command

import hardy
import kernels
from engines import CUDA, SMOKE, WIDTH, digits, federation, milliseconds, one_round, provenance
from hardy.attacks.gradient import pgd
from hardy.attacks.threats import parse_threat
from hardy.core.engine import Branches
from hardy.core.training import Training
from hardy.engines import EngineChoice
from hardy.evaluation.measure import LocalMeasure
from hardy.models import fbn_cnn, nin, preresnet18
from hardy.runs.prepare import prepare

CLIENTS, FEW = (2, 2) if SMOKE else (50, 10)
ATTACKED = pgd(steps=1 if SMOKE else 7)
BOTH = (True, False) if CUDA else (True,)
"""with the kernels, and without; there are none on a CPU"""


def agreement() -> dict:
    if not CUDA:
        return {"kernels": "need a GPU"}
    return {"kernels": kernels.agreement(kernels.SHAPES), "rounds": kernels.rounds_agree()}


def steps(net, clients: int, shape, method) -> dict:
    """Milliseconds of a step, in a round of four."""
    data = federation(clients, 16 if SMOKE else 128, shape)
    measure = partial(kernels.step, net, data, method, "bfloat16", steps=1 if SMOKE else 4, repeats=1 if SMOKE else 5)
    return {name_of(fused): measure(fused, batch=8 if SMOKE else 32)[0] for fused in BOTH}


def name_of(fused: bool) -> str:
    return "fused_ms" if fused else "torch_ms"


def standard() -> dict:
    return steps(digits, CLIENTS, (3, 28, 28), hardy.papers.fedbn())


def network(net) -> dict:
    """Both kinds of step of a network without norms or with norms of each client's own."""
    methods = {"standard": hardy.papers.fedbn(), "adversarial": hardy.papers.fatbn(attack=ATTACKED)}
    if net is nin:  # without norms
        methods = {"standard": hardy.papers.fedavg(), "adversarial": hardy.papers.fatavg(attack=ATTACKED)}
    made = partial(net, width=WIDTH)
    return {kind: steps(lambda norm: made(norm=norm), FEW, (3, 32, 32), method) for kind, method in methods.items()}


def fbn() -> dict:
    """A whole round, and its kernels."""
    data, found = federation(FEW, 50 if SMOKE else 500, (3, 32, 32)), {}
    for fused in BOTH:
        choice = EngineChoice(name="vectorised", precision="bfloat16", **({} if fused else {"kernels": False}))
        chosen = hardy.Experiment(training=Training(batch=50, steps=1), engine=choice)
        run = prepare(chosen, method=hardy.papers.fbn(), model=lambda norm: fbn_cnn(norm=norm, width=WIDTH), data=data)
        found[name_of(fused)] = milliseconds(partial(one_round, run), 2 if SMOKE else 60, warm=1 if SMOKE else 5)
        if CUDA:
            found[f"{name_of(fused)}_kernels"] = kernels.whereabouts(partial(one_round, run))
    return found


def autoattack() -> dict:
    """Seconds on networks of the clients' own after a round, so that they are not all alike."""
    data = federation(CLIENTS, 32, tested=1 if SMOKE else 4)
    choice = EngineChoice(name="vectorised")
    run = prepare(
        hardy.Experiment(training=Training(batch=16, steps=1), engine=choice),
        method=hardy.papers.fedbn(),
        model=digits,
        data=data,
    )
    one_round(run)
    served = LocalMeasure(run.engine).served(run.state, "test", Branches())
    right = [torch.nn.functional.one_hot(labels, 10).float() for labels in served.labels]  # none falls before
    found = {}
    for name, attack in parse_threat("autoattack").attack.stages():
        if SMOKE and name != "apgd_ce":
            continue
        began = time.perf_counter()
        served.attacked(attack, right, torch.tensor(0), ensemble=True)
        found[name] = time.perf_counter() - began
    return {"seconds": sum(found.values()), "by_stage": found}


def command(*settings: str) -> dict:
    """A whole command by phase."""
    given = [*settings, *(TINY if SMOKE else ("engine.precision=bfloat16",))]
    if not SMOKE and not os.environ.get("HARDY_DATA"):
        return {"left out": "HARDY_DATA names no folder"}
    return {"settings": given, **whole_command(given, str(ROOT / "experiments/fedrbn/digits.toml"))}


ONE_BRANCH = ("evaluation.attack_branch=clean", "evaluation.predict_branch=clean")
ROWS: dict[str, Callable[[], dict]] = {
    "agreement": agreement,
    "standard": standard,
    "fbn": fbn,
    "nin": partial(network, nin),
    "preresnet18": partial(network, preresnet18),
    "autoattack": autoattack,
    "fifth": command,
    "all": partial(command, "data.adversarial=1.0", "method=fatbn", *ONE_BRANCH),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="result file (JSON)")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU: only shows that it runs")
    options = parser.parse_args()
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"no row is named {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if not (CUDA or SMOKE):
        parser.error("no GPU is here; --smoke shows that it runs")
    result = provenance()
    for name in options.rows or ROWS:
        began = time.perf_counter()
        result[name] = {**ROWS[name](), "took_s": time.perf_counter() - began}
        print(name, result[name], flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
