"""What robust training costs a round: HARDY_DATA=FOLDER python benchmarks/fedrbn.py OUT.json [overrides] [--smoke]

Rounds of `experiments/fedrbn/digits.toml` (50 clients in five digit domains, digits CNN) without evaluation: FedRBN,
FATBN and FATAvg with slack, where a fifth of the clients or all of them attack; and those that do not, on their own.
`--smoke` takes the embedded digits (experiments/fedrbn/mini.toml).
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import hardy
from engines import CUDA, SMOKE, provenance, train_only
from hardy.core.messages import Slot, Work
from hardy.runs.prepare import prepare

EXPERIMENT = Path(__file__).parents[1] / "experiments/fedrbn" / ("mini.toml" if SMOKE else "digits.toml")
TINY = ["data.limit=8", "data.adversarial=0.5", "model.width=0.25", "training.batch=4"] if SMOKE else []
WEAK = ["method.attack={name='pgd',steps=1}"] if SMOKE else []
ONE = ["evaluation.attack_branch=clean", "evaluation.predict_branch=clean"]  # one set of statistics
SLACK = "method.aggregator={name='by_role',weight={name='pipeline',pre=[{name='slack',chosen=10}]}}"
CASES = {
    "standard: FedBN": ["method=fatbn", "data.adversarial=0.0", *ONE],  # nobody attacks
    "20%: FATBN": ["method=fatbn", *ONE],
    "20%: FedRBN": [],
    "all: FATBN": ["method=fatbn", "data.adversarial=1.0", *ONE],
    "all: FedRBN": ["data.adversarial=1.0"],
    "all: FATAvg": ["method=fatavg", "data.adversarial=1.0", *ONE],
    "all: FATAvg x SFAT": ["method=fatavg", SLACK, "data.adversarial=1.0", *ONE],
    "the 80% that do not attack: FATBN": ["method=fatbn", *ONE],
    "the 80% that do not attack: FedRBN": [],
}
ROUNDS = 300


def times(overrides: list[str], only: str | None, repeats: int) -> dict[str, float]:
    """Seconds of the first three rounds, in which steps are captured, and of a later one."""
    run = prepare(hardy.read(str(EXPERIMENT), overrides))
    slots = [Slot(number) for number, client in enumerate(run.server.clients) if client.kind == only]

    def round() -> None:
        if only is None:
            run.state, _ = run.server.round(run.state, run.engine, 0.01)
        else:
            state = run.state
            train_only(run, Work(round=0, rate=0.01, slots=slots, shared=state.shared, reported=state.reported))
        if CUDA:
            torch.cuda.synchronize()

    seconds = []
    for _ in range(3 + repeats):
        began = time.perf_counter()
        round()
        seconds.append(time.perf_counter() - began)
    first, later = sum(seconds[:3]), statistics.median(seconds[3:])
    return {"first_three": first, "later": later, f"{ROUNDS}_rounds": first + (ROUNDS - 3) * later}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="result file (JSON)")
    parser.add_argument("overrides", nargs="*", help="for all cases, such as engine.precision=bfloat16")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only shows that it runs")
    options = parser.parse_intermixed_args()
    out, engine = options.out, "vectorised" if CUDA else "sequential"
    found = {"provenance": provenance(), "overrides": options.overrides, "seconds": {}}
    for name, overrides in CASES.items():
        only = "ST" if name.startswith("the 80%") else None
        own = [f"engine.name={engine}", *TINY, *overrides, *WEAK, *options.overrides]
        found["seconds"][name] = times(own, only, 1 if SMOKE else 12)
        out.write_text(json.dumps(found, indent=1) + "\n")
        print(name, found["seconds"][name], flush=True)


if __name__ == "__main__":
    main()
