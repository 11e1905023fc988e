"""Speed of the engines on one machine: python benchmarks/engines.py OUT.json [--smoke]

1. One training step of the digits CNN (14.2M parameters), 50 clients, batch 32, sequential and vectorised: standard,
   and adversarial (PGD-7, then clean and attacked loss). The first step of a round and a later one differ: at the
   first all clients hold the same weights.
2. PGD-20 on the networks of 50 clients with BatchNorm of their own, 36 and 180 images each.
3. Peak memory of a FedAvg round against the number of clients.
4. A whole round of one step (FBN's CNN, 10 clients, batch 50) against the bare step it contains.

The other benchmarks take their data and their clock from here. `--smoke`, of any of them, only shows that it runs: tiny
sizes, in seconds, on the CPU.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

import hardy
from hardy.attacks.gradient import pgd
from hardy.attacks.threats import parse_threat as parse
from hardy.core import client, tensors
from hardy.core.engine import Branches
from hardy.core.federation import Client, Federation
from hardy.core.messages import Slot, Work
from hardy.core.training import Training
from hardy.engines import EngineChoice
from hardy.engines.vectorised import vmap
from hardy.evaluation.measure import ServedClients
from hardy.models import digits_cnn, fbn_cnn
from hardy.runs.prepare import prepare as prepare_run

SMOKE = "--smoke" in sys.argv
if SMOKE:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch has not looked yet
    torch.set_num_threads(1)  # others may be at work, and its threads would wait for each other
CUDA = torch.cuda.is_available()
WIDTH, BATCH = (0.125, 8) if SMOKE else (1.0, 32)
"""of the networks; of a step of the digits CNN"""


def provenance() -> dict[str, str]:
    """What a figure was measured with."""
    return {
        "device": torch.cuda.get_device_name() if CUDA else f"cpu, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "hardy": hardy.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def federation(clients: int, rows: int, shape=(3, 28, 28), tested: int = 1) -> Federation:
    """Random images; every client holds `rows` of them and is tested on `tested`."""
    rng = np.random.default_rng(0)
    pool = min(clients * rows, 20_000)  # clients may share rows: speed does not care
    held = [np.arange(i * rows, (i + 1) * rows) % pool for i in range(clients)]
    x, y = rng.integers(0, 256, (pool, *shape), dtype=np.uint8), rng.integers(0, 10, pool)
    made = tuple(Client(domain="d", train=r, validation=r[:0], test=np.arange(tested) % 256) for r in held)
    return Federation(
        name="random", classes=tuple("0123456789"), x_train=x, y_train=y, x_test=x[:256], y_test=y[:256], clients=made
    )


def digits(norm):
    return digits_cnn(norm=norm, width=WIDTH)


def prepare(model, data, engine, training, method=None, lane=None):
    chosen = hardy.Experiment(training=training, engine=EngineChoice(name=engine, lane=lane))
    return prepare_run(chosen, method=method or hardy.papers.fedavg(), model=model, data=data)


def milliseconds(function, repeats: int, warm: int = 3) -> float:
    """The median over repeats, each ended by a synchronisation."""
    times = []
    for i in range(warm + repeats):
        began = time.perf_counter()
        function()
        if CUDA:
            torch.cuda.synchronize()
        if i >= warm:
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def one_round(run) -> None:
    run.state, _ = run.server.round(run.state, run.engine, 0.01)


def train_only(run, work) -> None:
    for _ in run.engine.train(work):
        pass


def work_of(run):
    slots = [Slot(i) for i in range(len(run.engine.train_rows))]
    return Work(round=0, rate=0.01, slots=slots, shared=run.state.shared, reported=run.state.reported)


def bare_step(run):
    """The vectorised step on device_data tensors, without any federation around it."""
    engine, work = run.engine, work_of(run)
    rows = torch.stack([torch.from_numpy(engine.batches(0, s.client)[0]) for s in work.slots]).to(engine.device)
    received = tensors.gather(work.shared, 0)
    each = tensors.apply(lambda t: t.expand(len(work.slots), *t.shape).clone(), received)
    counts = engine.label_counts([slot.client for slot in work.slots])
    state = client.fresh_copies(client.init_client(engine.plan, each, {}, counts))
    keys = torch.from_numpy(client.step_keys(0, 0, work.slots, 1)[0]).to(engine.device)
    rate = torch.tensor(0.01, device=engine.device)
    method = engine.plan.method
    gradients = vmap(partial(client.compute_gradients, engine.plan, method.objective), (None, 0, 0, 0, None))

    def step():
        with engine.arithmetic():
            found = gradients(received, state, engine.batch(rows, keys, state.label_counts), keys, rate)
        client.apply_gradients(method.optimiser, method.objective, state, found, rate)

    return step


def captured(function):
    """The same function as a CUDA graph: the least a step can cost."""
    if not CUDA:
        return function
    for _ in range(3):
        function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def step_times(data, engine, method, repeats) -> dict[str, float]:
    """Milliseconds of the first step of a round, of a later one, and their mean over a round of four."""
    times = {}
    for steps in (1, 4):
        run = prepare(digits, data, engine, Training(batch=BATCH, steps=steps), method)
        few = engine == "sequential" or SMOKE
        times[steps] = milliseconds(
            partial(train_only, run, work_of(run)), min(3, repeats) if few else repeats, warm=1 if few else 3
        )
        del run
        empty()
    return {"first": times[1], "later": (times[4] - times[1]) / 3, "mean": times[4] / 4}


def evaluation_times(data) -> dict[str, float]:
    """Seconds to attack every client's own network by PGD-20."""
    seconds = {}
    for engine in ("sequential", "vectorised"):
        run = prepare(digits, data, engine, Training(batch=BATCH, steps=1), hardy.papers.fedbn())
        deployed = ServedClients(run.engine, run.state, "test", Branches(), None)
        everyone = [torch.nn.functional.one_hot(labels, 10).float() for labels in deployed.labels]
        measure = partial(deployed.attacked, parse("pgd-20").attack, everyone, torch.tensor(0))
        seconds[engine] = milliseconds(measure, 1 if SMOKE else 2 if engine == "sequential" else 5, warm=1) / 1e3
        del run
        empty()
    return {**seconds, "speed_up": seconds["sequential"] / seconds["vectorised"]}


def empty() -> None:
    if CUDA:
        gc.collect()
        torch.cuda.empty_cache()


def main(out: Path) -> None:
    result = provenance()
    repeats = 20 if CUDA else 1 if SMOKE else 3
    print(result, flush=True)

    clients, rows = (50 if CUDA else 10, 112) if not SMOKE else (2, 16)
    data = federation(clients, rows)
    methods = {
        "standard_step_ms": hardy.papers.fedbn(),
        "adversarial_step_ms": hardy.papers.fatbn(attack=pgd(steps=1 if SMOKE else 7)),
    }
    for what, method in methods.items():
        step = {engine: step_times(data, engine, method, repeats) for engine in ("sequential", "vectorised")}
        step["speed_up"] = step["sequential"]["mean"] / step["vectorised"]["mean"]
        result[what] = {"model": "digits_cnn", "clients": clients, "batch": BATCH, **step}
        print(what, result[what], flush=True)
    result["pgd_20_evaluation_s"] = {
        images: evaluation_times(federation(clients, rows, tested=images)) for images in ((2,) if SMOKE else (36, 180))
    }
    print("evaluation", result["pgd_20_evaluation_s"], flush=True)

    training = Training(batch=BATCH, steps=1)
    if CUDA:
        memory = {}
        for number in (100, 1000):
            empty()
            run = prepare(digits, federation(number, BATCH), "vectorised", training, lane=50)
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            one_round(run)
            torch.cuda.synchronize()
            memory[number] = {
                "peak_GiB": torch.cuda.max_memory_allocated() / 2**30,
                "seconds": time.perf_counter() - began,
            }
            del run
        result["memory_of_a_round"] = {"model": "digits_cnn", "lane": 50, "by_clients": memory}
        print(result["memory_of_a_round"], flush=True)

    small, data = Training(batch=50, steps=1), federation(2 if SMOKE else 10, 50 if SMOKE else 500, (3, 32, 32))
    run = prepare(lambda norm: fbn_cnn(norm=norm, width=WIDTH), data, "vectorised", small)
    bare, whole = milliseconds(bare_step(run), repeats * 3), milliseconds(partial(one_round, run), repeats * 3)
    least = milliseconds(captured(bare_step(run)), repeats * 3)
    figures = {"bare_step": bare, "captured_bare_step": least, "round": whole, "ratio": whole / bare}
    result["one_step_round_ms"] = {"model": "fbn_cnn", "clients": len(data.clients), **figures}
    print(result["one_step_round_ms"], flush=True)
    out.write_text(json.dumps(result, indent=2) + "\n")


def output(about: str) -> Path:
    """The result file named on the command line."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="result file (JSON)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only shows that it runs")
    return parser.parse_args().out


if __name__ == "__main__":
    main(output(__doc__))
