"""A population of a million clients: memory and time of a round beside one of ten thousand, killed and resumed; and
what FedRBN's exchange costs with a hundred thousand.

`python benchmarks/population.py OUT.json` takes a quarter of an hour on two cores. Runs are processes of their own, so
that each has its own peak of memory; the two that are compared take their rounds in turn, so that both meet the same
load. Time is that of the processor (all threads): on a shared machine that on the wall says little.
"""

import argparse
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROUNDS, COHORT = 20, 1000
FEW, MANY = 10_000, 1_000_000
KILLED_AFTER = 7
EXCHANGES = ((10_000, 500), (100_000, 500), (100_000, 100_000))
"""(clients, givers)"""


def smoke() -> None:
    """Tiny sizes."""
    globals().update(ROUNDS=4, COHORT=8, FEW=50, MANY=500, KILLED_AFTER=2, EXCHANGES=((60, 4),))


def experiment(clients: int, **changes: Any) -> dict[str, Any]:
    """FedBN, one local step on 8 of a client's 8 to 64 rows, Dirichlet labels, tiny CNN of a quarter of the width."""
    return {
        "rounds": ROUNDS,
        "population": {"clients": clients, "alpha": 1.0},
        "cohort": {"clients": COHORT},
        "method": "fedbn",
        "model": {"name": "tiny_cnn", "width": 0.25},
        "training": {"rate": 0.05, "batch": 8, "steps": 1},
        "engine": {"device": "cpu", "name": "vectorised", "store": "disk"},
        "evaluation": {"every": ROUNDS, "clients": min(500, clients)},
        "checkpoint": {"every": max(1, ROUNDS // 4)},
        **changes,
    }


def child(order: dict[str, Any]) -> None:
    """Runs or resumes; after each round says what it took, and waits for leave where it is asked to."""
    import torch

    import hardy

    torch.set_num_threads(order["threads"])
    began, cpu = time.perf_counter(), time.process_time()

    def after_round(run: Any, line: dict[str, Any]) -> None:
        nonlocal began, cpu
        now = time.process_time()
        figures = {"round": line["round"], "wall": time.perf_counter() - began, "cpu": now - cpu, **exchange_cost()}
        print(json.dumps(figures), flush=True)
        if order["turns"]:
            sys.stdin.readline()
        began, cpu = time.perf_counter(), time.process_time()

    if order["resume"]:
        run = hardy.resume(order["out"], quiet=True, callbacks=[after_round])
    else:
        run = hardy.fit(**order["keys"], out=order["out"], quiet=True, callbacks=[after_round])
    accuracy = {k: v for k, v in run.summary()["standard_accuracy"].items() if k != "by_client"}
    told = {
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "rows_on_disk_mib": sum(f.stat().st_size for f in Path(order["out"], "clients").rglob("*.rows")) / 2**20,
        "digest": digest(run),
        "standard_accuracy": accuracy,
    }
    print(json.dumps({"end": told}), flush=True)


_SPENT = {"seconds": 0.0, "reads": 0}


def exchange_cost() -> dict[str, Any]:
    """What `exchange` took since the last round."""
    from hardy.core.exchange import OnDisk

    if not hasattr(OnDisk, "timed"):
        inner = OnDisk.__call__

        def timed(self: Any, *arguments: Any) -> Any:
            began = time.process_time()
            found = inner(self, *arguments)
            _SPENT["seconds"] += time.process_time() - began
            _SPENT["reads"] += 1
            return found

        OnDisk.__call__, OnDisk.timed = timed, True  # type: ignore[method-assign,attr-defined]
    spent = {"exchange_cpu": _SPENT["seconds"], "exchange_reads": _SPENT["reads"]}
    _SPENT.update(seconds=0.0, reads=0)
    return spent


def digest(run: Any) -> str:
    """Of the shared tensors and of all rows that anybody has."""
    from hardy.core.store import Slot

    content = hashlib.sha256()
    for _, value in sorted(run.state.shared.items()):
        content.update(value.numpy().tobytes())
    for store in (run.engine.store, run.state.reported):
        held = sorted(store.file.newest) if store else []
        rows = store.read([Slot(number) for number in held]) if held else {}
        content.update(json.dumps(held).encode())
        for _, value in sorted(rows.items()):
            content.update(value.numpy().tobytes())
    return content.hexdigest()


class Process:
    """A run in a process of its own."""

    def __init__(self, out: Path, keys: dict[str, Any], *, turns: bool = False, resume: bool = False) -> None:
        order = {"out": str(out), "keys": keys, "turns": turns, "resume": resume, "threads": 2}
        command = [sys.executable, __file__, "--child", json.dumps(order)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def next(self) -> dict[str, Any]:
        """The next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a run ended without a word, code {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def go(self) -> None:
        """Leave for the next round."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def rest(self) -> list[dict[str, Any]]:
        """All lines to the end."""
        lines = [self.next()]
        while "end" not in lines[-1]:
            lines.append(self.next())
        return lines


def in_turn(folder: Path) -> dict[str, Any]:
    """The two sizes round by round. The first round of each is left out of the figures: it warms up."""
    runs = {clients: Process(folder / f"{clients}", experiment(clients), turns=True) for clients in (FEW, MANY)}
    lines: dict[int, list[dict[str, Any]]] = {FEW: [], MANY: []}
    for clients, run in runs.items():  # both have built everything before the first turn is given
        lines[clients].append(run.next())
    for _ in range(1, ROUNDS):
        for clients, run in runs.items():
            run.go()
            lines[clients].append(run.next())
    ends = {}
    for clients, run in runs.items():
        run.go()
        ends[clients] = run.next()["end"]
    spent = {c: [line["cpu"] for line in found[1:]] for c, found in lines.items()}
    return {
        "cpu_seconds_a_round": {str(c): median(found) for c, found in spent.items()},
        "wall_seconds_a_round": {str(c): median(line["wall"] for line in lines[c][1:]) for c in lines},
        "ratio_cpu": median(spent[MANY]) / median(spent[FEW]),
        "ratio_of_each_round": [many / few for few, many in zip(spent[FEW], spent[MANY], strict=True)],
        **{str(c): end for c, end in ends.items()},
    }


def killed(folder: Path, whole: str) -> dict[str, Any]:
    """The large one again, killed in the middle of a round and resumed: the same bits."""
    out = folder / "killed"
    run = Process(out, experiment(MANY))
    while run.next()["round"] < KILLED_AFTER:
        pass
    time.sleep(1.0 if ROUNDS == 20 else 0.0)  # in the eighth round; the last checkpoint is of the fifth
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    end = Process(out, {}, resume=True).rest()
    return {"first_round_again": end[0]["round"], "same_bits": end[-1]["end"]["digest"] == whole}


def fedrbn(folder: Path, clients: int, givers: int) -> dict[str, Any]:
    """FedRBN, a fifth of the clients AT, cohort 500, PGD of three steps."""
    keys = experiment(
        clients,
        rounds=max(5, ROUNDS // 2),
        data={"adversarial": 0.2},
        cohort={"clients": COHORT // 2},
        method={"name": "fedrbn", "givers": givers, "attack": {"name": "pgd", "steps": 3}},
        evaluation={"every": ROUNDS // 2, "clients": min(200, clients)},
    )
    *lines, end = Process(folder / f"fedrbn-{clients}-{givers}", keys).rest()
    later = lines[-5:]
    return {
        "clients": clients,
        "givers": givers,
        "cpu_seconds_a_round": median(line["cpu"] for line in later),
        "exchange_cpu_seconds_a_round": median(line["exchange_cpu"] for line in later),
        "share": median(line["exchange_cpu"] / line["cpu"] for line in later),
        "peak_mib": end["end"]["peak_mib"],
        "rows_on_disk_mib": end["end"]["rows_on_disk_mib"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path, default=Path("population.json"))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--child")
    chosen = parser.parse_args()
    if chosen.child:
        exchange_cost()
        child(json.loads(chosen.child))
        return
    if chosen.smoke:
        smoke()
    found: dict[str, Any] = {"rounds": ROUNDS, "cohort": COHORT}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        found["fedbn"] = in_turn(folder)
        chosen.out.write_text(json.dumps(found, indent=2) + "\n")
        found["fedbn"]["killed_and_resumed"] = killed(folder, found["fedbn"][str(MANY)]["digest"])
        found["fedrbn"] = []
        for clients, givers in EXCHANGES:
            found["fedrbn"].append(fedrbn(folder, clients, givers))
            chosen.out.write_text(json.dumps(found, indent=2) + "\n")
    print(chosen.out.read_text())


if __name__ == "__main__":
    main()
