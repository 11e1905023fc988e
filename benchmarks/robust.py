"""Robust rules against byzfl and Flower: python benchmarks/robust.py OUT.json [--oracle PATH ...] [--smoke]

Every rule and stage on the updates of 10, 50 and 200 clients with 14 million parameters: seconds, and memory beyond
the updates at its peak. `--oracle` names folders to import byzfl or flwr from, if they are not installed; a peer that
is missing is left out. On the CPU updates are cut to `--gib` GiB, so many clients have fewer parameters.
"""

import hardy  # noqa: I001 - first, since it tells torch's threads how to wait

import argparse
import importlib
import json
import math
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines import CUDA, SMOKE
from hardy.core.messages import Slot, Updates
from hardy.core.partition import Role
from hardy.parts.aggregators import stages as mixing, robust
from hardy.core.protocols import RoundContext
from hardy.parts.aggregators.base import Stage

DEVICE = torch.device("cuda" if CUDA else "cpu")
PARAMETERS = 1_000 if SMOKE else 14_000_000
LONGEST = 5.0
"""seconds after which one measurement is enough"""
HOST = 10**9 if DEVICE.type == "cpu" else 2 * 10**8
"""numbers Flower is given at most: it has arrays on the host only, and takes long with more"""


def parts(count: int) -> dict[str, Any]:
    """Every rule and stage, with a fifth of the clients lying, or as many as it allows."""
    f = count // 5
    return {
        "coordinate_median": robust.coordinate_median(),
        "trimmed_mean": robust.trimmed_mean(f=f),
        "geometric_median": robust.geometric_median(),
        "krum": robust.krum(f=f),
        "multi_krum": robust.multi_krum(f=f),
        "bulyan": robust.bulyan(f=min(f, (count - 3) // 4)),
        "minimum_diameter": robust.minimum_diameter(f=min(f, 16)),
        "centred_clipping": robust.centred_clipping(radius=100.0),
        "nearest_neighbour_mixing": mixing.nearest_neighbour_mixing(f=f),
        "bucketing": mixing.bucketing(size=2),
        "clipping": mixing.clipping(radius=100.0),
        "adaptive_clipping": mixing.adaptive_clipping(f=f),
    }


def byzfl_parts(byzfl: Any, count: int, width: int) -> dict[str, Callable[[Any], Any]]:
    f = count // 5
    peers = {
        "coordinate_median": byzfl.Median(),
        "trimmed_mean": byzfl.TrMean(f=f),
        "geometric_median": byzfl.GeometricMedian(),
        "krum": byzfl.Krum(f=f),
        "multi_krum": byzfl.MultiKrum(f=f),
        "minimum_diameter": byzfl.MDA(f=f),
        "centred_clipping": byzfl.CenteredClipping(tau=100.0),
        "nearest_neighbour_mixing": byzfl.NNM(f=f),
        "bucketing": byzfl.Bucketing(s=2),
        "clipping": lambda rows: byzfl.Clipping(c=100.0)(rows.clone()),  # it writes into what it is given
        "adaptive_clipping": lambda rows: byzfl.ARC(f=f)(rows.clone()),
    }
    if math.comb(count, f) > 10_000:
        peers["minimum_diameter"] = _hopeless(f"would try {math.comb(count, f):.1e} sets of clients")
    if (needed := 4 * count * (count - f) * width / 2**30) > (64 if DEVICE.type == "cuda" else 4):
        peers["nearest_neighbour_mixing"] = _hopeless(f"would take {needed:.0f} GiB")
    return peers


def _hopeless(why: str) -> Callable[[Any], Any]:
    def refuse(_: Any) -> Any:
        raise RuntimeError(why)

    return refuse


def flower_parts(flower: Any, count: int) -> dict[str, Callable[[Any], Any]]:
    f = count // 5
    return {
        "coordinate_median": flower.aggregate_median,
        "trimmed_mean": lambda rows: flower.aggregate_trimmed_avg(rows, f / count + 1e-9),
        "krum": lambda rows: flower.aggregate_krum(rows, f, 0),
        "multi_krum": lambda rows: flower.aggregate_krum(rows, f, count - f),
    }


def load_peer(name: str) -> Any:
    """A peer's module, or None."""
    sys.modules.setdefault("byzfl.benchmark", types.ModuleType("byzfl.benchmark"))  # needs torchvision, not used here
    if importlib.util.find_spec("scipy") is None:  # byzfl imports it for arrays only
        scipy = {n: types.ModuleType(n) for n in ("scipy", "scipy.spatial", "scipy.spatial.distance")}
        scipy["scipy.spatial"].distance = scipy["scipy.spatial.distance"]  # type: ignore[attr-defined]
        sys.modules |= scipy
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"without {name}: {error}", flush=True)
        return None


def measure(function: Callable[[], Any]) -> dict[str, Any]:
    """The median of three calls after one to warm up, of one call if that is long; memory at its peak."""
    before, times = start_of_peak(), []
    try:
        for turn in range(4):
            began = time.perf_counter()
            function()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
            if turn == 0 and times[0] > LONGEST:
                break
    except (RuntimeError, MemoryError) as error:
        return {"failed": str(error).splitlines()[0]}
    return {"seconds": statistics.median(times[1:] or times), "peak_MiB": peak(before)}


def start_of_peak() -> float:
    """Bytes held now; what the system or the GPU counts as the peak starts here."""
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def peak(before: float) -> float:
    most = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else _resident("VmHWM")
    return round((most - before) / 2**20, 1)


def _resident(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith(key))


def problem(count: int, width: int) -> tuple[Updates, RoundContext]:
    draw = torch.Generator(DEVICE).manual_seed(0)
    matrix = torch.randn(count, width, generator=draw, device=DEVICE)
    figures = torch.ones(count, device=DEVICE)
    slots = [Slot(client) for client in range(count)]
    updates = Updates(slots=slots, shared={"w": matrix}, reported={}, weights=figures, steps=figures, loss=figures)
    updates.__dict__["matrix"] = matrix  # as after admission, which builds it
    sent = {"w": torch.zeros(1, width, device=DEVICE)}
    return updates, RoundContext(shared=sent, roles={"w": Role.WEIGHT}, bases=1, clients=count)


def call(made: Any, updates: Updates, context: RoundContext) -> Any:
    return made.apply(updates, context, {}) if isinstance(made, Stage) else made.combine(updates, context)


def compare(count: int, width: int, byzfl: Any, flower: Any) -> dict[str, Any]:
    updates, context = problem(count, width)
    matrix = updates.matrix
    peers: dict[str, tuple[dict[str, Callable[[Any], Any]], Any]] = {}
    if byzfl:
        peers["byzfl"] = byzfl_parts(byzfl, count, width), matrix
        if DEVICE.type == "cpu":
            arrays = {n: p for n, p in peers["byzfl"][0].items() if n in ("coordinate_median", "trimmed_mean")}
            peers["byzfl, arrays"] = arrays, matrix.numpy()
    if flower and count * width <= HOST:
        peers["flower"] = flower_parts(flower, count), [([row], 1) for row in matrix.cpu().numpy()]
    table: dict[str, Any] = {}
    for name, made in parts(count).items():
        row = {"hardy": measure(lambda made=made: call(made, updates, context))}
        for peer, (functions, rows) in peers.items():
            if name in functions:
                row[peer] = measure(lambda function=functions[name], rows=rows: function(rows))
                if "seconds" in row[peer]:
                    row[peer]["times_slower"] = round(row[peer]["seconds"] / row["hardy"]["seconds"], 2)
        table[name] = row
        print(count, width, name, json.dumps(row), flush=True)
    return {"clients": count, "parameters": width, "liars": count // 5, "rules": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--oracle", nargs="*", default=[], help="folders to import byzfl and flwr from")
    parser.add_argument("--clients", nargs="*", type=int, default=[10] if SMOKE else [10, 50, 200])
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--gib", type=float, default=16.0 if DEVICE.type == "cuda" else 3.0, help="of updates at most")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only shows that it runs")
    chosen = parser.parse_args()
    sys.path += chosen.oracle  # last, so that torch and numpy stay the same
    byzfl, flower = load_peer("byzfl"), load_peer("flwr.server.strategy.aggregate")
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    result = {
        "device": device,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "hardy": hardy.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "measured": [],
    }
    for count in chosen.clients:
        width = min(chosen.parameters, int(chosen.gib * 2**30 / 4 / count))
        with torch.no_grad():
            result["measured"].append(compare(count, width, byzfl, flower))
        chosen.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
