"""What a rank of tests/engines/test_distributed.py runs: every case, one after another, in one process."""

import dataclasses
import sys
from pathlib import Path

import torch

import hardy
from conftest import assert_close, everything, experiment, federation, net, shortened, with_momentum
from hardy import papers
from hardy.attacks.gradient import pgd
from hardy.config import EvaluationChoice
from hardy.core.cohort import Cohort
from hardy.engines import EngineChoice
from hardy.faults.byzantine import sign_flipping
from hardy.faults.injection import Faults
from hardy.papers.fedrobust import primal_gap
from hardy.parts.aggregators.base import pipeline
from hardy.parts.aggregators.robust import trimmed_mean
from hardy.parts.aggregators.server_updates import server_adam
from hardy.registry import PARTS
from hardy.runs.workers import torchrun_ranks


def kinds(data):
    clients = (dataclasses.replace(c, kind="AT" if number < 2 else "ST") for number, c in enumerate(data.clients))
    return dataclasses.replace(data, clients=tuple(clients))


PARTIAL = {"cohort": Cohort(fraction=0.75), "faults": Faults(dropped=0.1, crashed=0.1, late=0.1)}
ATTACKED = EvaluationChoice(threats=("pgd-2",), metrics=("ece",), checks=False)
VECTORISED = EngineChoice(name="vectorised", device="cpu", precision="float64", lane=3)


def cases() -> dict:
    """Name -> (method, options of the experiment, data)"""
    few = federation(sizes=(10, 7, 12, 5, 9, 6))
    rbn = papers.fedrbn(attack=pgd(steps=2))
    return {
        "sum": (papers.fedavg(), {**PARTIAL, "evaluation": ATTACKED}, None),
        "gathers": (papers.fedavg().replace(aggregator=trimmed_mean(f=1)), {}, few),
        "server optimiser": (papers.fedavg().replace(aggregator=pipeline(post=(server_adam(),))), {}, None),
        "fedrbn": (rbn, {"evaluation": ATTACKED}, kinds(federation())),
        "fedrbn, vectorised": (rbn, {"engine": VECTORISED}, kinds(federation())),
        "hostile": (
            papers.fedbn().replace(aggregator=trimmed_mean(f=1)),
            {"faults": Faults(hostile=1, byzantine=sign_flipping())},
            few,
        ),
        "diagnosis": (shortened(papers.fedrobust()), {"evaluation": EvaluationChoice(diagnosis=(primal_gap(),))}, None),
        "drift": (papers.scaffold(), {"evaluation": EvaluationChoice(drift=True)}, None),
        "nobody asked of one rank": (papers.fedbn(), {"cohort": Cohort(clients=1)}, None),
        **{
            name: (with_momentum(shortened(PARTS["method"][name]())), PARTIAL, None)
            for name in ("sfat_scaffold", "fednova", "heterofl", "fedrobust", "split_mix_dat", "fbn", "local_only")
        },
    }


def lines(run) -> list:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in run.history]


def figures(run) -> dict:
    return {"lines": lines(run), "robust": run.robust, "metrics": run.robust_metrics, "lost": run.figures.lost}


def fit(name: str, **changes) -> hardy.Run:
    method, options, data = cases()[name]
    chosen = experiment(rounds=3, **{**options, **changes})
    return hardy.fit(chosen, method=method, model=net, data=data or federation(), quiet=True)


def main(out: Path) -> None:
    torch.set_num_threads(1)
    rank, _ = torchrun_ranks()
    for number, name in enumerate(cases()):
        runs = [fit(name) for _ in range(2 if name in ("sum", "gathers", "fedrbn") else 1)]
        if rank:
            continue
        torch.save((everything(runs[0]), figures(runs[0])), out / f"{number}.pt")
        if len(runs) == 2:
            assert_close(everything(runs[0]), everything(runs[1]), 0)
            assert figures(runs[0]) == figures(runs[1])
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
