"""Which rules can be computed by many aggregators, how exactly, and what an update costs one of them.

    python benchmarks/tree.py benchmarks/results/tree_cpu-2-cores_DATE.json [--smoke]

Two ways to spread a round over aggregators:

- by clients, a tree: each aggregator combines some clients, and one above combines what came out, weighted by the rows
  beneath it. Seven groups of eight clients here.
- by coordinates: each aggregator has some of the numbers of every client. Four quarters here.

"off" is the largest difference to one aggregator that has everything, as a share of the largest move: of a float's
rounding (below 1e-9, in float64) the rule distributes exactly, else what comes out is another rule.

Costs are of one aggregator: seconds of a core for an update of a million numbers in float32, unpacked, passed by the
gate and combined with 39 others.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hardy.core.admission import Admission, Gate
from hardy.core.files import versions
from hardy.core.messages import Slot, Updates, Work
from hardy.core.partition import Role
from hardy.core.protocols import RoundContext
from hardy.parts.aggregators.base import mean, pipeline
from hardy.parts.aggregators.distances import squared_distances
from hardy.parts.aggregators.robust import (
    bulyan,
    centred_clipping,
    coordinate_median,
    geometric_median,
    krum,
    minimum_diameter,
    multi_krum,
    trimmed_mean,
)
from hardy.parts.aggregators.stages import clipping, nearest_neighbour_mixing

LIARS = 4
RULES = {
    "mean": mean(),
    "mean after clipping": pipeline(pre=(clipping(radius=1.0),)),
    "coordinate_median": coordinate_median(),
    "trimmed_mean": trimmed_mean(f=LIARS),
    "geometric_median": geometric_median(),
    "centred_clipping": centred_clipping(radius=1.0),
    "krum": krum(f=LIARS),
    "multi_krum": multi_krum(f=LIARS),
    "bulyan": bulyan(f=LIARS),
    "minimum_diameter": minimum_diameter(f=LIARS),
    "mean after mixing": pipeline(pre=(nearest_neighbour_mixing(f=LIARS),)),
}
SMALLER = {"krum": krum(f=1), "multi_krum": multi_krum(f=1), "bulyan": bulyan(f=1)}
SMALLER |= {"trimmed_mean": trimmed_mean(f=1), "minimum_diameter": minimum_diameter(f=1)}
SMALLER |= {"mean after mixing": pipeline(pre=(nearest_neighbour_mixing(f=1),))}
"""the same for the eight, or the seven, of a node of the tree"""


def updates(rows: torch.Tensor, weights: torch.Tensor) -> Updates:
    return Updates(
        slots=[Slot(client) for client in range(len(rows))],
        shared={"w": rows},
        reported={},
        weights=weights.to(rows),
        steps=torch.ones(len(rows), dtype=torch.long),
        loss=torch.ones(len(rows), dtype=rows.dtype),
    )


def combined(rule: Any, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What a rule makes of rows, from zero."""
    shared = {"w": torch.zeros(1, rows.shape[1], dtype=rows.dtype)}
    context = RoundContext(shared=shared, roles={"w": Role.WEIGHT}, bases=1, clients=len(rows))
    folded = rule.fold(None, updates(rows, weights), context)
    return rule.finish(folded, context, rule.memory(context))[0]["w"][0]


def exactness(clients: int, numbers: int) -> dict[str, Any]:
    """Rule -> how far a tree of clients, and a split of coordinates, are off."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(clients, numbers, generator=draw, dtype=torch.float64) + 0.5
    rows *= torch.linspace(0.9, 1.1, clients, dtype=torch.float64)[:, None]  # no two are equally good
    weights = torch.randint(10, 100, (clients,), generator=draw).double()
    found = {}
    for name, rule in RULES.items():
        whole, low = combined(rule, rows, weights), SMALLER.get(name, rule)
        groups = torch.arange(clients).split(8)
        above = torch.stack([combined(low, rows[some], weights[some]) for some in groups])
        tree = combined(low, above, torch.stack([weights[some].sum() for some in groups]))
        parts = torch.arange(numbers).split(-(-numbers // 4))
        split = torch.cat([combined(rule, rows[:, some], weights) for some in parts])
        most = float(whole.abs().max())
        found[name] = {
            "by_clients_off": float((tree - whole).abs().max()) / most,
            "by_coordinates_off": float((split - whole).abs().max()) / most,
        }
    whole = distances(rows, weights)
    summed = sum(distances(rows[:, some], weights) for some in torch.arange(numbers).split(-(-numbers // 4)))
    found["distances, summed over coordinates"] = {"off": float((summed - whole).abs().max() / whole.max())}
    return found


def distances(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What rules that choose look at, [clients, clients]."""
    shared = {"w": torch.zeros(1, rows.shape[1], dtype=rows.dtype)}
    context = RoundContext(shared=shared, roles={"w": Role.WEIGHT}, bases=1, clients=len(rows))
    return squared_distances(updates(rows, weights), context)[0]


def fold_costs(clients: int, numbers: int) -> dict[str, Any]:
    """Seconds of one aggregator: what every update costs, and each rule beyond it."""
    from safetensors.numpy import load, save

    rows = torch.randn(clients, numbers, generator=torch.Generator().manual_seed(0))
    weights = torch.full((clients,), 10.0)
    packed = [save({"w": row.numpy()}) for row in rows]
    work = Work(
        round=0,
        rate=0.1,
        slots=[Slot(c) for c in range(clients)],
        shared={"w": torch.zeros(1, numbers)},
        reported={},
        examples=[10] * clients,
        largest_weight=float("inf"),
    )
    costs = {
        "unpack": timed(lambda: [torch.from_numpy(np.array(load(p)["w"])) for p in packed]) / clients,
        "gate": timed(lambda: judged(rows, weights, work)) / clients,
    }
    found: dict[str, Any] = {}
    for name, rule in RULES.items():
        found[name] = timed(lambda rule=rule: combined(rule, rows, weights)) / clients
    return {"clients": clients, "numbers": numbers, "every_update_s": costs, "rule_s_an_update": found}


def judged(rows: torch.Tensor, weights: torch.Tensor, work: Work) -> Any:
    gate = Gate(Admission(), work, {"w": Role.WEIGHT}, {})
    return [gate.read(gate.judge(some)) for some in gate.hold([updates(rows, weights)])]


def timed(call: Any, times: int = 3) -> float:
    """The median, in seconds of this process's CPU: others may use the machine."""
    found = []
    for _ in range(times):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return sorted(found)[times // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "versions": versions(),
        "load_average": os.getloadavg()[0],
        "exactness": exactness(56, 100 if options.smoke else 2000),
        "costs": fold_costs(*((20, 1000) if options.smoke else (40, 10**6))),
    }
    for name, row in result["exactness"].items():
        print(name, row, result["costs"]["rule_s_an_update"].get(name))
    print(result["costs"]["every_update_s"])
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
