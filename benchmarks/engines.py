"""Speed of the engines on one machine: python benchmarks/engines.py OUT.json

1. One training step of the digits CNN (14.2M parameters), 50 clients, batch 32, sequential and vectorised: standard,
   and adversarial (PGD-7, then clean and attacked loss). The first step of a round and a later one differ: at the
   first all clients hold the same weights.
2. PGD-20 on the networks of 50 clients with BatchNorm of their own, 36 and 180 images each.
3. Peak memory of a FedAvg round against the number of clients.
4. A whole round of one step (FBN's CNN, 10 clients, batch 50) against the bare step it contains.
"""

import gc
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

import hardy
from hardy.attacks.threats import parse_threat as parse
from hardy.core import client, tensors
from hardy.core.engine import Branches
from hardy.core.federation import Client, Federation
from hardy.core.training import Training
from hardy.engines import EngineChoice
from hardy.evaluation.measure import ServedClients
from hardy.models import digits_cnn, fbn_cnn

CUDA = torch.cuda.is_available()


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


def prepare(model, data, engine, training, method=None, lane=None):
    chosen = hardy.Experiment(training=training, engine=EngineChoice(name=engine, lane=lane))
    return hardy.runs.prepare.prepare(chosen, method=method or hardy.papers.fedavg(), model=model, data=data)


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
    from hardy.core.messages import Slot, Work

    slots = [Slot(i) for i in range(len(run.engine.train_rows))]
    return Work(round=0, rate=0.01, slots=slots, shared=run.state.shared, reported=run.state.reported)


def bare_step(run):
    """The vectorised step on device_data tensors, without any federation around it."""
    engine, work = run.engine, work_of(run)
    rows = torch.stack([torch.from_numpy(engine.batches(0, s.client)[0]) for s in work.slots]).to(engine.device)
    received = tensors.gather(work.shared, 0)
    each = tensors.apply(lambda t: t.expand(len(work.slots), *t.shape).clone(), received)
    state = client.begin(engine.plan, each, {})
    keys = torch.from_numpy(client.keys(0, 0, work.slots, 1)[0]).to(engine.device)
    rate = torch.tensor(0.01, device=engine.device)
    look = torch.vmap(partial(client.slope, engine.plan, engine.plan.method.objective), (None, 0, 0, 0))
    momentum = tensors.apply(torch.zeros_like, state.trained) if engine.training.momentum else {}

    def step():
        found = look(received, state, engine.batch(rows), keys)
        client.move(engine.training, engine.plan.method.objective, state, momentum, found, rate)

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
        run = prepare(lambda norm: digits_cnn(norm=norm), data, engine, Training(batch=32, steps=steps), method)
        few = 3 if engine == "sequential" else repeats
        times[steps] = milliseconds(
            partial(train_only, run, work_of(run)), few, warm=1 if engine == "sequential" else 3
        )
        del run
        empty()
    return {"first": times[1], "later": (times[4] - times[1]) / 3, "mean": times[4] / 4}


def evaluation_times(data) -> dict[str, float]:
    """Seconds to attack every client's own network by PGD-20."""
    seconds = {}
    for engine in ("sequential", "vectorised"):
        run = prepare(
            lambda norm: digits_cnn(norm=norm), data, engine, Training(batch=32, steps=1), hardy.papers.fedbn()
        )
        deployed = ServedClients(run.engine, run.state, "test", Branches(), None)
        everyone = [np.ones(len(rows), dtype=bool) for rows in deployed.rows]
        measure = partial(deployed.attacked, parse("pgd-20").attack, everyone, torch.tensor(0))
        seconds[engine] = milliseconds(measure, 2 if engine == "sequential" else 5, warm=1) / 1e3
        del run
        empty()
    return {**seconds, "speed_up": seconds["sequential"] / seconds["vectorised"]}


def empty() -> None:
    if CUDA:
        gc.collect()
        torch.cuda.empty_cache()


def main(out: Path) -> None:
    result = provenance()
    repeats = 20 if CUDA else 3
    print(result, flush=True)

    clients = 50 if CUDA else 10
    data = federation(clients, 112)
    methods = {"standard_step_ms": hardy.papers.fedbn(), "adversarial_step_ms": hardy.papers.fatbn()}
    for what, method in methods.items():
        step = {engine: step_times(data, engine, method, repeats) for engine in ("sequential", "vectorised")}
        step["speed_up"] = step["sequential"]["mean"] / step["vectorised"]["mean"]
        result[what] = {"model": "digits_cnn", "clients": clients, "batch": 32, **step}
        print(what, result[what], flush=True)
    result["pgd_20_evaluation_s"] = {
        images: evaluation_times(federation(clients, 112, tested=images)) for images in (36, 180)
    }
    print("evaluation", result["pgd_20_evaluation_s"], flush=True)

    training = Training(batch=32, steps=1)
    if CUDA:
        memory = {}
        for number in (100, 1000):
            empty()
            run = prepare(lambda norm: digits_cnn(norm=norm), federation(number, 32), "vectorised", training, lane=50)
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

    small = Training(batch=50, steps=1)
    run = prepare(lambda norm: fbn_cnn(norm=norm), federation(10, 500, (3, 32, 32)), "vectorised", small)
    bare, whole = milliseconds(bare_step(run), repeats * 3), milliseconds(partial(one_round, run), repeats * 3)
    least = milliseconds(captured(bare_step(run)), repeats * 3)
    figures = {"bare_step": bare, "captured_bare_step": least, "round": whole, "ratio": whole / bare}
    result["one_step_round_ms"] = {"model": "fbn_cnn", "clients": 10, **figures}
    print(result["one_step_round_ms"], flush=True)
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
