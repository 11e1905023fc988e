"""One process and several on the same rounds: speed, memory of each rank, and how equal the results are.

    python benchmarks/distributed.py OUT.json [--smoke] [--repeats N] [--rounds N] [--rows N] [--width SHARE]

FedRBN with all clients attacking (PGD-7) on the digits CNN; on a CPU half as wide unless told otherwise, so that two
cores are done in five minutes. On a CPU: one rank with all cores and with one, and two ranks that share them. On a GPU:
one rank, two ranks on that GPU, and the same under NVIDIA's MPS, started and stopped here. The ways take turns; the
quietest median round of each counts, since other work on the machine can only add to it, and what the processes took of
the CPU is given beside it. The load average before each run is in the result.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import hardy
from hardy.flower.processes import descendants

CORES = len(os.sched_getaffinity(0))
EXPERIMENT = ["method=fedrbn", "data.adversarial=1.0", "training.epochs=1", "evaluation.every=1000"]


def ways(device: str) -> dict[str, dict[str, Any]]:
    if device == "cuda":
        one = {"workers": 1, "threads": CORES}
        return {"one rank": one, "two ranks": {"workers": 2, "threads": CORES}, "two ranks, MPS": {**one, "workers": 2}}
    return {
        "one rank, all cores": {"workers": 1, "threads": CORES},
        "one rank, one thread": {"workers": 1, "threads": 1},
        "two ranks": {"workers": 2, "threads": CORES},
    }


class Watch(threading.Thread):
    """The largest memory of a process and of those it started, in MiB, and their CPU seconds."""

    def __init__(self, process: int, *, gpu: bool) -> None:
        super().__init__(daemon=True)
        self.process, self.gpu, self.ended = process, gpu, threading.Event()
        self.host: dict[int, float] = {}
        self.card: dict[int, float] = {}
        self.cpu: dict[int, float] = {}

    def run(self) -> None:
        while not self.ended.wait(0.2):
            for number in [self.process, *descendants(self.process)]:
                with suppress(OSError, ValueError, IndexError):
                    lines = Path(f"/proc/{number}/status").read_text().splitlines()
                    most = next((line for line in lines if line.startswith("VmHWM")), "")  # one that has ended has none
                    self.host[number] = int(most.split()[1]) / 1024
                    spent = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[11:13]
                    self.cpu[number] = sum(map(int, spent)) / os.sysconf("SC_CLK_TCK")
            if self.gpu:
                asked = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
                said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
                for line in said.splitlines():
                    number, used = (int(word) for word in line.split(","))
                    self.card[number] = max(self.card.get(number, 0.0), used)


@contextmanager
def mps(wanted: bool, folder: Path) -> Iterator[dict[str, str]]:
    """NVIDIA's Multi-Process Service, if wanted."""
    places = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    environment = {**os.environ, **places} if wanted else dict(os.environ)
    if wanted:
        for place in places.values():
            Path(place).mkdir(parents=True)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)
    try:
        yield environment
    finally:
        if wanted:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=environment, check=False)


def measure(name: str, way: dict[str, Any], keys: list[str], device: str, out: Path) -> dict[str, Any]:
    """One run of its own processes; what it took."""
    command = [sys.executable, "-m", "hardy", "run", "demo", "--alone", "--quiet", "--out", str(out)]
    command += ["--device", device, "--workers", str(way["workers"]), *EXPERIMENT, *keys]
    load = os.getloadavg()[0]
    with mps("MPS" in name, out.with_name(f"{out.name}.mps")) as environment:
        began = time.time()
        process = subprocess.Popen(
            command, env={**environment, "OMP_NUM_THREADS": str(way["threads"])}, stdout=subprocess.DEVNULL
        )
        watch = Watch(process.pid, gpu=device == "cuda")
        watch.start()
        if process.wait():
            sys.exit(f"{name} ended with {process.returncode}")
        seconds = time.time() - began
        watch.ended.set()
        watch.join()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rounds = [line["seconds"] for line in lines]
    ranks = sorted(watch.host, key=lambda number: -watch.host[number])[: way["workers"]]
    return {
        "rounds": rounds,
        "start_and_end_seconds": seconds - sum(rounds),
        "host_mib_of_each_rank": [round(watch.host[number]) for number in ranks],
        "gpu_mib_of_each_rank": [round(watch.card.get(number, 0)) for number in ranks] if device == "cuda" else None,
        "cpu_seconds": sum(watch.cpu.values()),
        "cpu_seconds_of_busiest_rank": max(watch.cpu[number] for number in ranks),
        "load_average": load,
        "loss": [line["loss"] for line in lines],
    }


def furthest(one: Path, other: Path) -> float:
    """The largest difference between two runs' tensors, relative to the largest number of a tensor."""
    runs = [hardy.load(folder) for folder in (one, other)]
    held = [{**run.state.shared, **run.state.reported, **run.engine.store} for run in runs]
    return max(
        float((held[0][n].double() - held[1][n].double()).abs().max() / held[0][n].double().abs().max().clamp_min(1e-9))
        for n in held[0]
        if held[0][n].is_floating_point()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only shows that it runs")
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--width", type=float, default=None, help="of the digits CNN; 0.5 on a CPU, 1 on a GPU")
    parser.add_argument("--rows", type=int, default=None, help="training rows a domain, for its two clients")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    repeats = given.repeats or (1 if given.smoke else 2)
    rounds = given.rounds or (1 if given.smoke else 5)
    rows = given.rows or (12 if given.smoke else 64)
    width = given.width or (1.0 if device == "cuda" else 0.5)
    steps = 1 if given.smoke else 7
    model = "tiny_cnn" if given.smoke else f'{{ name = "digits_cnn", width = {width:g} }}'
    keys = [
        f"rounds={rounds}",
        f"data.limit={rows}",
        f'method.attack={{ name = "pgd", steps = {steps} }}',
        f"model={model}",
    ]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways(device)}
    with tempfile.TemporaryDirectory(prefix="distributed") as place:
        for repeat in range(repeats):
            for number, (name, way) in enumerate(ways(device).items()):
                found[name].append(measure(name, way, keys, device, Path(place, f"{repeat}-{number}")))
                print(repeat, name, f"{statistics.median(found[name][-1]['rounds']):.2f} s a round", file=sys.stderr)
        first, *_, last = range(len(found))
        apart = furthest(Path(place, f"0-{first}"), Path(place, f"0-{last}"))
        same = repeats < 2 or furthest(Path(place, f"0-{last}"), Path(place, f"1-{last}")) == 0
    seconds = {
        name: min(statistics.median(run["rounds"][1:] or run["rounds"]) for run in runs) for name, runs in found.items()
    }
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": torch.cuda.get_device_name() if device == "cuda" else f"cpu-{CORES}-cores",
        "versions": {"torch": torch.__version__, "hardy": hardy.__version__, "python": platform.python_version()},
        "work": {"experiment": ["demo", *EXPERIMENT, *keys], "repeats": repeats},
        "seconds_per_round": seconds,
        "largest_relative_difference": apart,
        "two_runs_of_several_ranks_have_the_same_bits": same,
        "runs": found,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        "| | s a round, quietest run | CPU s of the busiest rank | MiB of each rank | start and end, s |\n"
        + "|---" * 5
        + "|"
    )
    for name, runs in found.items():
        best = min(runs, key=lambda run: statistics.median(run["rounds"]))
        memory = " / ".join(map(str, best["gpu_mib_of_each_rank"] or best["host_mib_of_each_rank"]))
        busy = min(run["cpu_seconds_of_busiest_rank"] for run in runs)
        print(f"| {name} | {seconds[name]:.2f} | {busy:.1f} | {memory} | {best['start_and_end_seconds']:.1f} |")
    print(f"largest relative difference between the first way and the last: {apart:.2g}")


if __name__ == "__main__":
    main()
