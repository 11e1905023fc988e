"""Membership and inversion attacks on a run, for the rows of attacks.toml.

Five sites with 54 embedded digits each and a dense network, trained until they are learnt by heart. Membership is
measured by the loss against the test rows of the sites; four images are inverted, each from the update of one step.
"""

from typing import Any

import hardy
from hardy.runs.audits import audit_run

BASE = [
    "rounds=10",
    "data.limit=60",
    "data.clients=1",
    "model={name='mlp',hidden=[32]}",
    "training.rate=0.1",
    "training.batch=9",
    "training.epochs=5",
    "engine.device=cpu",
    "evaluation.every=10",
]
SHORT = ["rounds=1", "training.epochs=1"]


def figure(found: dict[str, Any], name: str, images: int) -> dict[str, float]:
    return {"mean": found[name], "images": images, "standard_error": found[f"{name}_error"]}


def measure_row(options: dict[str, list[str]], seed: int, quick: bool) -> dict[str, dict[str, float]]:
    """What both attacks find in a run with the overrides of a row."""
    run = hardy.fit(hardy.read("demo", [*BASE, *options["set"], f"seed={seed}", *(SHORT if quick else [])]), quiet=True)
    found = audit_run(run, "membership,inversion", images=4, iterations=5 if quick else 100)
    clean, loss, inverted = run.summary()["standard_accuracy"], found["membership"]["loss"], found["inversion"]
    rows = loss["members"] + loss["others"]
    return {
        "accuracy": {key: clean[key] for key in ("mean", "images", "standard_error")},
        "advantage": figure(loss, "advantage", rows),
        "area": figure(loss, "auc", rows),
        "inversion, as sent": figure(inverted["sent"], "error", inverted["sent"]["images"]),
        "inversion, as published": figure(inverted["published"], "error", inverted["published"]["images"]),
    }
