"""Hardy, Flower and pfl-research on the same work (benchmarks/peers/work.py), on the CPU.

    python benchmarks/peers.py OUT.json --python-flower PATH --python-pfl PATH [--smoke]

The paths name interpreters that have `flwr[simulation]` and `pfl[pytorch]`, by default this one; a peer that is not
there is skipped. Every run is a process of its own and waits for free cores first. Runs are repeated in turn. Given
are the median round of a framework's quietest run, since other work on the machine can only add to it, and that of all
its runs.

Processes have one torch thread unless told otherwise: for a network this small a second one gains little, and where
anything else runs on the cores torch's threads wait for each other (seen: a hundred times as long).
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CORES = len(os.sched_getaffinity(0))
PEERS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray would run its workers below everybody else
}
NEEDS = {"flower": "flwr.simulation, ray", "pfl": "pfl.model.pytorch"}
LIMIT = 600.0

sys.path.insert(0, str(HERE / "peers"))
import work  # noqa: E402

SIZE = ["--smoke"] if work.SMOKE else []


@dataclass(frozen=True)
class Contestant:
    """A framework set up in one way: processes that train, torch threads in each."""

    framework: str
    option: str
    processes: int
    threads: int

    @property
    def launcher(self) -> list[str]:
        several = self.framework in ("pfl", "hardy") and self.processes > 1  # Flower starts its own workers
        return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}"] if several else []


def contestants(threads: int) -> list[Contestant]:
    """Hardy and pfl run in one process or on all cores; Flower always on all."""
    several = CORES // threads
    return [
        Contestant("bare", "", 1, threads),
        *(Contestant("hardy", engine, 1, threads) for engine in ("sequential", "vectorised", "auto")),
        *(Contestant("hardy", engine, several, threads) for engine in ("sequential", "vectorised") if several > 1),
        *(Contestant("pfl", "", processes, threads) for processes in sorted({1, several})),
        Contestant("flower", "", several, threads),
    ]


def idle(seconds: float = 0.2 if work.SMOKE else 1.0) -> float:
    """The share of the cores that nobody uses."""

    def ticks() -> list[int]:
        return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]

    before = ticks()
    time.sleep(seconds)
    spent = [after - earlier for after, earlier in zip(ticks(), before, strict=True)]
    return sum(spent[3:5]) / sum(spent)


def free_cores(wanted: int, patience: float) -> float:
    """Waits until so many cores are nearly idle, but not for ever; returns how many are."""
    until = time.monotonic() + patience
    while (free := CORES * idle()) < 0.9 * wanted and time.monotonic() < until:
        pass
    return free


def lack(python: str, modules: str) -> str:
    """What an interpreter says that cannot import them; empty: it can."""
    tried = subprocess.run(
        [python, "-c", f"import {modules}"], check=False, env={**os.environ, **PEERS}, capture_output=True, text=True
    )
    return tried.stderr.strip().rpartition("\n")[2] if tried.returncode else ""


def measure(contestant: Contestant, python: str, patience: float) -> dict[str, Any]:
    """One run in a fresh process, with every file it writes in a folder that goes away."""
    with tempfile.TemporaryDirectory(prefix="peers", ignore_cleanup_errors=True) as folder:
        out, log = Path(folder, "out.json"), Path(folder, "log")
        homes = dict.fromkeys(("HOME", "TMPDIR", "FLWR_HOME", "RAY_TMPDIR"), folder)
        threads = {"OMP_NUM_THREADS": str(contestant.threads), "MKL_NUM_THREADS": str(contestant.threads)}
        script = HERE / "peers" / f"{contestant.framework}_run.py"
        free = free_cores(contestant.processes * contestant.threads, patience)
        began = time.monotonic()
        with log.open("w") as stream:
            process = subprocess.Popen(
                [python, *contestant.launcher, str(script), str(out), contestant.option, *SIZE],
                env={**os.environ, **PEERS, **homes, **threads},
                cwd=folder,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
            finally:
                sweep(folder)
                process.wait()
        if process.returncode or not out.exists():
            sys.exit(f"{contestant} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        found = json.loads(out.read_text())
    laps, busy = found.pop("laps"), found.pop("busy")
    rounds = [after - before for before, after in pairwise(laps)]
    if (len(rounds), found["steps"]) != (work.WARM_UP + work.ROUNDS, len(rounds) * work.STEPS):
        sys.exit(f"{contestant} did other work: {len(rounds)} rounds of {work.STEPS} steps, counted {found['steps']}.")
    timed = rounds[work.WARM_UP :]
    # engines that start lazily pay in their first round, so it belongs to the start
    return {
        "rounds": timed,
        "start": laps[1] - began - statistics.median(timed),
        "free_cores": free,
        "load": os.getloadavg()[0],
        "busy": [b - a for a, b in pairwise(busy)][work.WARM_UP :],
        **found,
    }


def sweep(folder: str) -> None:
    """Ends what a run left behind: the processes that work in its folder."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink().is_relative_to(folder):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            pass  # gone, or not ours


def row(contestant: Contestant, runs: list[dict[str, Any]]) -> dict[str, Any]:
    medians = [statistics.median(run["rounds"]) for run in runs]
    return {
        **asdict(contestant),
        **({"chosen": [run["engine"] for run in runs]} if contestant.option == "auto" else {}),
        "seconds_per_round": min(medians),
        "seconds_per_round_all_runs": statistics.median(seconds for run in runs for seconds in run["rounds"]),
        "median_of_each_run": medians,
        "cpu_seconds_per_round": min(statistics.median(run["busy"]) for run in runs),
        "start_seconds": min(run["start"] for run in runs),
        "steps": [run["steps"] for run in runs],
        "loss": [run["loss"] for run in runs],
        "free_cores_before": [run["free_cores"] for run in runs],
        "load_average": [run["load"] for run in runs],
    }


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="result file (JSON)")
    parser.add_argument("--python-flower", default=sys.executable, help="interpreter with flwr[simulation]")
    parser.add_argument("--python-pfl", default=sys.executable, help="interpreter with pfl[pytorch]")
    parser.add_argument("--only", nargs="*", help="frameworks to run, of bare, hardy, flower and pfl; all unless given")
    parser.add_argument("--threads", type=int, default=1, help="torch threads a process")
    parser.add_argument("--repeats", type=int, default=1 if work.SMOKE else 5)
    parser.add_argument(
        "--patience", type=float, default=0.0 if work.SMOKE else 60.0, help="seconds to wait for free cores"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only shows that it runs")
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(1))  # by way of `measure`, which leaves nothing behind
    python = {"bare": sys.executable, "hardy": sys.executable, "flower": given.python_flower, "pfl": given.python_pfl}
    lacking = {name: why for name, modules in NEEDS.items() if (why := lack(python[name], modules))}
    for name, why in lacking.items():
        print(f"{name} skipped: {why}", file=sys.stderr)

    runs: dict[Contestant, list[dict[str, Any]]] = {
        c: []
        for c in contestants(given.threads)
        if c.framework not in lacking and c.framework in (given.only or python)
    }
    for repeat in range(given.repeats):
        for contestant, found in runs.items():
            found.append(measure(contestant, python[contestant.framework], given.patience))
            print(repeat, contestant, f"{statistics.median(found[-1]['rounds']):.3f} s a round", file=sys.stderr)

    rows = [row(contestant, found) for contestant, found in runs.items()]
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"cpu-{CORES}-cores",
        "cpu": cpu(),
        "versions": {name: v for found in runs.values() for name, v in found[0]["versions"].items()}
        | {"python": platform.python_version()},
        "work": {
            name.lower(): getattr(work, name)
            for name in ("CLIENTS", "IMAGES", "COHORT", "BATCH", "RATE", "STEPS", "WARM_UP", "ROUNDS")
        },
        "repeats": given.repeats,
        "skipped": lacking,
        "rows": rows,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    words = (
        "framework | processes x threads | s a round, quietest run | all runs | CPU s a round, one process | start, s"
    )
    print(f"| {words} |\n" + "|---" * 6 + "|")
    for r in sorted(rows, key=lambda r: r["seconds_per_round"]):
        figures = ("seconds_per_round", "seconds_per_round_all_runs", "cpu_seconds_per_round")
        times = (*(f"{r[figure]:.3f}" for figure in figures), f"{r['start_seconds']:.1f}")
        print("|", " | ".join((f"{r['framework']} {r['option']}", f"{r['processes']} x {r['threads']}", *times)), "|")


if __name__ == "__main__":
    main()
