"""Cost of FedRobust on one machine: python benchmarks/fedrobust.py OUT.json [--smoke]

1. A local step of FedAvg, of FedRobust with every structure of Λ, and of FGM and PGD-10 (L2) training: 10 clients,
   batch 50, 32x32 images, one step a round as in the paper; the small AlexNet on a GPU, the tiny CNN on a CPU; on a GPU
   also rounds of five steps. Methods take turns, so that a busy moment falls on all.
2. Memory a client keeps for Λ and δ, and the time of its step, on 32x32 and 256x256 images.

Bounds: full Λ at most 1.2 times a FedAvg step on a GPU; PGD-10 at least 5 times a FedRobust step; channel and diagonal
at most 2 times on a CPU.
"""

import json
import statistics
import time
from pathlib import Path

import torch

from engines import CUDA, SMOKE, federation, output, prepare, provenance, train_only, work_of
from hardy import papers
from hardy.attacks.gradient import fgsm, pgd
from hardy.core import tensors
from hardy.core.training import Training
from hardy.errors import HardyError
from hardy.models import flra_alexnet, tiny_cnn
from hardy.papers.fedrobust import Structure
from hardy.parts.norms import absent

STRUCTURES = Structure.__args__


def methods():
    """Everything timed against FedAvg, without norms as in the paper's AlexNet."""
    ball = {"ball": "l2", "epsilon": 1.25}
    robust = {f"fedrobust {s}": papers.fedrobust(structure=s, norm=absent()) for s in STRUCTURES}
    trained = {
        "fgm": papers.fatavg(attack=fgsm(**ball), mix=1.0),
        "pgd-10": papers.fatavg(attack=pgd(**ball, step=0.3125, steps=10), mix=1.0),
    }
    return {
        "fedavg": papers.fedavg(norm=absent()),
        **robust,
        **{n: m.replace(norm=absent()) for n, m in trained.items()},
    }


def milliseconds_in_turns(functions, repeats: int, warm: int = 3) -> dict[str, float]:
    """The median of each function; they are called in turns, each call ended by a synchronisation."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warm + repeats):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            if CUDA:
                torch.cuda.synchronize()
            if turn >= warm:
                times[name].append((time.perf_counter() - began) * 1e3)
    return {name: statistics.median(own) for name, own in times.items()}


def round_times(model, data, batch: int, engine: str, repeats: int, steps: int) -> dict[str, float]:
    """Milliseconds of a round's training of so many steps, by method."""
    functions = {}
    for name, method in methods().items():
        run = prepare(model, data, engine, Training(batch=batch, steps=steps), method=method)
        functions[name] = lambda run=run, work=work_of(run): train_only(run, work)
    return milliseconds_in_turns(functions, repeats)


def against_fedavg(times: dict[str, float]) -> dict[str, dict[str, float]]:
    return {
        name: {"ms": own, "of_fedavg": own / times["fedavg"], "pgd_over_this": times["pgd-10"] / own}
        for name, own in times.items()
    }


def structures(shape, batch: int, repeats: int) -> dict[str, dict[str, float | str]]:
    """Bytes a client keeps, and milliseconds of its step on the tiny CNN, for every structure that is possible."""
    found: dict[str, dict[str, float | str]] = {}
    data = federation(1, batch, shape)
    functions = {}
    for name, method in methods().items():
        if not name.startswith("fed"):
            continue
        try:
            run = prepare(
                lambda norm: tiny_cnn(norm=norm, shape=shape),
                data,
                "sequential",
                Training(batch=batch, steps=1),
                method,
            )
        except HardyError as error:
            found[name] = {"refused": str(error)}
            continue
        functions[name] = lambda run=run, work=work_of(run): train_only(run, work)
        found[name] = {"bytes": tensors.count_bytes(run.engine.store)}
    for name, own in milliseconds_in_turns(functions, repeats).items():
        found[name]["ms"] = own
    return found


def main(out: Path) -> None:
    result = provenance()
    repeats = 1 if SMOKE else 30 if CUDA else 7
    clients, batch = (2, 4) if SMOKE else (10, 50)
    side = 16 if SMOKE else 32
    data = federation(clients, 500, (3, side, side))
    model = flra_alexnet if CUDA else tiny_cnn
    cases = [("vectorised", 1), ("vectorised", 5)] if CUDA else [("sequential", 1), ("vectorised", 1)]
    for engine, steps in cases:
        times = round_times(lambda norm: model(norm=norm, shape=data.shape), data, batch, engine, repeats, steps)
        case = f"{'one' if steps == 1 else 'five'}_step_round_{engine}"
        about = {"model": model.__name__, "clients": clients, "batch": batch}
        result[case] = {**about, "methods": against_fedavg(times)}
        print(json.dumps(result[case], indent=1), flush=True)
    for side in (8,) if SMOKE else (32, 256):
        result[f"client_{side}x{side}"] = structures((3, side, side), 4 if SMOKE else 16, repeats)
        print(json.dumps(result[f"client_{side}x{side}"], indent=1), flush=True)
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(output(__doc__))
