"""Hardy, Flower and pfl-research on the same work (benchmarks/peers/work.py), on the CPU.

    python benchmarks/peers.py --python-flower PATH --python-pfl PATH

The paths name interpreters that have `flwr[simulation]` and `pfl[pytorch]`; a peer without one is skipped. Every run is
a process of its own. Runs are repeated in turn, so that a busy moment falls on all, and the median round counts.
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
SILENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
LIMIT = 600.0

sys.path.insert(0, str(HERE / "peers"))
import work  # noqa: E402


@dataclass(frozen=True)
class Contestant:
    """A framework set up in one way: processes that train, torch threads in each."""

    framework: str
    option: str
    processes: int
    threads: int

    @property
    def launcher(self) -> list[str]:
        several = self.framework == "pfl" and self.processes > 1  # Flower starts its own workers
        return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}"] if several else []


def contestants() -> list[Contestant]:
    """Every way a framework offers to use the cores: more threads, or more processes of one thread."""
    threads = sorted({1, CORES})
    alone = [Contestant(name, "", 1, n) for name in ("bare", "pfl") for n in threads]
    hardy = [Contestant("hardy", engine, 1, n) for engine in ("sequential", "vectorised", "auto") for n in threads]
    flower = [Contestant("flower", "", CORES // n, n) for n in threads]
    return alone + hardy + flower + [Contestant("pfl", "", CORES, 1)] * (CORES > 1)


def measure(contestant: Contestant, python: str) -> dict[str, Any]:
    """One run in a fresh process, with every file it writes in a folder that goes away."""
    with tempfile.TemporaryDirectory(prefix="peers", ignore_cleanup_errors=True) as folder:
        out, log = Path(folder, "out.json"), Path(folder, "log")
        homes = dict.fromkeys(("HOME", "TMPDIR", "FLWR_HOME", "RAY_TMPDIR"), folder)
        threads = {"OMP_NUM_THREADS": str(contestant.threads), "MKL_NUM_THREADS": str(contestant.threads)}
        script = HERE / "peers" / f"{contestant.framework}_run.py"
        load, began = os.getloadavg()[0], time.monotonic()
        with log.open("w") as stream:
            process = subprocess.Popen(
                [python, *contestant.launcher, str(script), str(out), contestant.option],
                env={**os.environ, **SILENT, **homes, **threads},
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
    laps = found.pop("laps")
    rounds = [after - before for before, after in pairwise(laps)]
    if (len(rounds), found["steps"]) != (work.WARM_UP + work.ROUNDS, len(rounds) * work.STEPS):
        sys.exit(f"{contestant} did other work: {len(rounds)} rounds of {work.STEPS} steps, counted {found['steps']}.")
    timed = rounds[work.WARM_UP :]
    # engines that start lazily pay in their first round, so it belongs to the start
    return {"rounds": timed, "start": laps[1] - began - statistics.median(timed), "load": load, **found}


def sweep(folder: str) -> None:
    """Ends what a run left behind: the processes that carry its folder in their environment."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if folder.encode() in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            pass  # gone, or not ours


def row(contestant: Contestant, runs: list[dict[str, Any]]) -> dict[str, Any]:
    rounds = sorted(seconds for run in runs for seconds in run["rounds"])
    low, median, high = statistics.quantiles(rounds, n=4)
    return {
        **asdict(contestant),
        **({"chosen": [run["engine"] for run in runs]} if contestant.option == "auto" else {}),
        "seconds_per_round": median,
        "quartiles": [low, high],
        "fastest": rounds[0],
        "median_of_each_run": [statistics.median(run["rounds"]) for run in runs],
        "start_seconds": statistics.median(run["start"] for run in runs),
        "steps": [run["steps"] for run in runs],
        "loss": [run["loss"] for run in runs],
        "load_before": [run["load"] for run in runs],
    }


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python-flower", help="interpreter with flwr[simulation]")
    parser.add_argument("--python-pfl", help="interpreter with pfl[pytorch]")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    given = parser.parse_args()
    python = {"bare": sys.executable, "hardy": sys.executable, "flower": given.python_flower, "pfl": given.python_pfl}
    skipped = [name for name, path in python.items() if path is None]
    for name in skipped:
        print(f"{name} skipped: no --python-{name}", file=sys.stderr)

    runs: dict[Contestant, list[dict[str, Any]]] = {c: [] for c in contestants() if python[c.framework]}
    for repeat in range(given.repeats):
        for contestant, found in runs.items():
            found.append(measure(contestant, python[contestant.framework]))
            print(repeat, contestant, f"{statistics.median(found[-1]['rounds']):.3f} s a round", file=sys.stderr)

    rows = [row(contestant, found) for contestant, found in runs.items()]
    hardware = f"cpu-{CORES}-cores"
    result = {
        "date": given.date,
        "hardware": hardware,
        "cpu": cpu(),
        "versions": {name: v for found in runs.values() for name, v in found[0]["versions"].items()}
        | {"python": platform.python_version()},
        "work": {
            name.lower(): getattr(work, name)
            for name in ("CLIENTS", "IMAGES", "COHORT", "BATCH", "RATE", "STEPS", "WARM_UP", "ROUNDS")
        },
        "repeats": given.repeats,
        "skipped": skipped,
        "rows": rows,
    }
    target = HERE / "results" / f"peers_{hardware}_{given.date}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("| framework | processes x threads | seconds a round | quartiles | start, s |\n|---|---|---|---|---|")
    for r in sorted(rows, key=lambda r: r["seconds_per_round"]):
        low, high = r["quartiles"]
        print(
            f"| {r['framework']} {r['option']} | {r['processes']} x {r['threads']} | {r['seconds_per_round']:.3f} "
            f"| {low:.3f}-{high:.3f} | {r['start_seconds']:.1f} |"
        )
    print(target)


if __name__ == "__main__":
    main()
