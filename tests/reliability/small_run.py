"""The run that is killed, cut off and damaged: three rounds with private tensors, shared extras and a best round."""

import json
from pathlib import Path

import torch

import hardy
from conftest import everything, federation, fit, net, with_momentum
from hardy import papers
from hardy.config import CheckpointChoice
from hardy.core.cohort import Cohort

ROUNDS = 3
OPTIONS = {"rounds": ROUNDS, "cohort": Cohort(fraction=0.5), "checkpoint": CheckpointChoice(every=1)}
METHOD = with_momentum(papers.scaffold(norm=papers.fedbn().norm))
GIVEN = {"method": METHOD, "model": net, "data": federation()}


def start(folder: Path) -> None:
    fit(METHOD, out=folder, **OPTIONS)


def go_on(folder: Path) -> list[str]:
    """Starts or resumes; what was said about the folder."""
    said: list[str] = []
    if (folder / "config.toml").exists():
        hardy.resume(folder, **GIVEN, quiet=True, remark=said.append)
    else:
        start(folder)
    return said


def lines(folder: Path) -> list[dict]:
    return [{**json.loads(line), "seconds": 0} for line in (folder / "metrics.jsonl").read_text().splitlines()]


def outcome(folder: Path) -> dict:
    """All that must be the same after a fault: tensors, lines and figures."""
    run = hardy.load(folder, **GIVEN)
    summary = json.loads((folder / "summary.json").read_text())
    timed = {"seconds": 0, "files_sha256": 0, "sha256": 0}
    return {"tensors": everything(run), "lines": lines(folder), "summary": {**summary, **timed}}


def same(first: dict, second: dict) -> bool:
    tensors = [found["tensors"] for found in (first, second)]
    return (
        tensors[0].keys() == tensors[1].keys()
        and all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())
        and first["lines"] == second["lines"]
        and first["summary"] == second["summary"]
    )


def leftovers(folder: Path) -> list[str]:
    """Half-written files that a finished run still holds."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if "draft" in path.name]
