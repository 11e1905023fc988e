"""What robust training costs a round: HARDY_DATA=FOLDER python benchmarks/fedrbn.py OUT.json [overrides]

Rounds of `experiments/fedrbn/digits.toml` (50 clients in five digit domains, digits CNN) without evaluation: FedRBN,
FATBN and FATAvg with slack, where a fifth of the clients or all of them attack; and those that do not, on their own.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch

import hardy
from engines import provenance, train_only
from hardy.core.messages import Slot, Work

EXPERIMENT = Path(__file__).parents[1] / "experiments/fedrbn/digits.toml"
ONE = ["evaluation.attack_branch=clean", "evaluation.predict_branch=clean"]  # one set of statistics
SLACK = "method.aggregator={name='by_role',weight={name='pipeline',pre=[{name='slack',chosen=10}]}}"
CASES = {
    "standard: FedBN": ["method=fedbn", "data.adversarial=0.0", *ONE],
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
    run = hardy.runs.prepare.prepare(hardy.read(str(EXPERIMENT), overrides))
    slots = [Slot(number) for number, client in enumerate(run.server.clients) if client.kind == only]

    def round() -> None:
        if only is None:
            run.state, _ = run.server.round(run.state, run.engine, 0.01)
        else:
            state = run.state
            train_only(run, Work(round=0, rate=0.01, slots=slots, shared=state.shared, reported=state.reported))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    seconds = []
    for _ in range(3 + repeats):
        began = time.perf_counter()
        round()
        seconds.append(time.perf_counter() - began)
    first, later = sum(seconds[:3]), statistics.median(seconds[3:])
    return {"first_three": first, "later": later, f"{ROUNDS}_rounds": first + (ROUNDS - 3) * later}


def main() -> None:
    out, engine = Path(sys.argv[1]), "vectorised" if torch.cuda.is_available() else "sequential"
    found = {"provenance": provenance(), "overrides": sys.argv[2:], "seconds": {}}
    for name, overrides in CASES.items():
        only = "ST" if name.startswith("the 80%") else None
        found["seconds"][name] = times([f"engine.name={engine}", *overrides, *sys.argv[2:]], only, 12)
        out.write_text(json.dumps(found, indent=1) + "\n")
        print(name, found["seconds"][name], flush=True)


if __name__ == "__main__":
    main()
