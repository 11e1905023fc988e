"""Whatever is combined either trains, or is refused in one line before it does: no traceback, no number that is not
finite. Parts, and their options, are drawn from the registry, so a new part is met here without further work."""

import math
import random
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch

import hardy
from hardy import config
from hardy.config.values import argument_hints
from hardy.config.writing import dump
from hardy.data.given import as_data
from hardy.errors import HardyError
from hardy.registry import KINDS, PARTS

VALUES = {
    "f": 1,
    "radius": 0.5,
    "size": 2,
    "share": 0.5,
    "deviation": 0.01,
    "clip": 0.5,
    "noise": 0.1,
    "norm": 1.0,
    "number": "attack.epsilon",
    "last": 3,
    "widths": [0.5, 1.0],
    "width": 0.5,
    "models": 2,
    "steps": 2,
    "queries": 4,
    "restarts": 1,
    "epsilon": 0.1,
    "after": 1,
    "delta": 1e-3,
    "target": 1,
}
"""of options without a default, or whose default takes long"""

CHANGES = [
    {"training.steps": 1},
    {"training.epochs": 2},
    {"training.replays": 2},
    {"training.independent": True, "training.steps": 2},
    {"training.batch": 100},
    {"cohort.fraction": 0.5},
    {"cohort.fraction": 0.7, "cohort.sampling": "poisson"},
    {"faults.dropped": 0.3, "faults.late": 0.3},
    {"data.adversarial": 0.5},
    {"data.adversarial": "rich", "data.capacity": "exponential"},
    {"data.capacity": {"name": "groups", "widths": [0.5, 1.0]}},
    {"data.held_out": ["c"]},
    {"data.held_out": ["c"], "data.held_out_statistics": "images"},
    {"data.pooled": True},
    {"data.validation": 0.0},
    {"data.test": "shared"},
    {"population.clients": 9, "population.largest": 12},
    {"population.clients": 9, "population.largest": 12, "population.devices": 2, "data.shift": "camera"},
    {"clock.speed": 1e6, "clock.spread": 1.0, "clock.enough": 3},
    {"clock.speed": 1e6, "clock.online": 0.5},
    {"server.rows": 9, "method.aggregator": "fltrust"},
    {"evaluation.threats": ["pgd-1"], "evaluation.checks": False},
    {"evaluation.threats": ["camera-1"], "evaluation.checks": False},
    {"evaluation.select": "fgsm"},
    {"evaluation.robustness": [0.5]},
    {"evaluation.metrics": ["auroc", "ece"], "evaluation.select_metric": "ece"},
    {"evaluation.drift": True},
    {"evaluation.clients": 2},
    {"engine.name": "vectorised"},
    {"engine.name": "vectorised", "engine.lane": 2},
    {"engine.store": "disk"},
    {"engine.precision": "bfloat16"},
    {"model": "mlp"},
    {"admission.largest_ratio": math.inf},
    {"callbacks": ["early_stopping"]},
]


@pytest.fixture(scope="module")
def data():
    """Three domains of 8x8 images."""
    rng = np.random.default_rng(0)
    patterns, domains = rng.random((3, 8, 8, 1)) / 2, {}
    for domain in "abc":
        y = rng.integers(0, 3, 60)
        x = (patterns[y] + rng.random((60, 8, 8, 1)) / 2).clip(0, 1)
        domains[domain] = (x[:40], y[:40], x[40:], y[40:])
    return as_data(hardy.arrays(domains))


def draw_part(rng, kind, deep=2):
    """A part of a kind as a table: some options drawn, parts inside it too."""
    name = rng.choice([*PARTS[kind]])
    return {"name": name} | draw_options(rng, PARTS[kind][name], deep)


def draw_options(rng, factory, deep):
    given = {}
    for option, hint in argument_hints(factory).items():
        inner = KINDS.get(hint)
        if inner and deep and inner != "optimiser" and rng.random() < 0.5:
            given[option] = draw_part(rng, inner, deep - 1)
        elif get_origin(hint) is tuple and (inner := KINDS.get(get_args(hint)[0])) and deep:
            given[option] = [draw_part(rng, inner, deep - 1) for _ in range(rng.choice([0, 1, 1, 2]))]
        elif option in VALUES and not inner:
            given[option] = VALUES[option]
        elif get_origin(hint) is Literal and rng.random() < 0.2:
            given[option] = rng.choice(get_args(hint))
        elif hint is bool and rng.random() < 0.2:
            given[option] = True
    return given


def draw_change(rng):
    """A few keys of an experiment."""
    changes = [lambda: rng.choice(CHANGES)] * 6
    changes += [lambda k=kind: {f"method.{k}": draw_part(rng, k)} for kind in ("norm", "objective", "aggregator")] * 2
    changes += [
        lambda: {"optimiser": draw_part(rng, "optimiser")},
        lambda: {"method.budget": draw_part(rng, "budget"), "method.aggregator": "held_mean"} | CHANGES[10],
        lambda: {"faults.hostile": 1, "faults.byzantine": draw_part(rng, "byzantine_attack")},
        lambda: {"data.split": draw_part(rng, "split")},
        lambda: {"data.shift": draw_part(rng, "shift")},
        lambda: {"data.augmentation": draw_part(rng, "augmentation")},
    ]
    return rng.choice(changes)()


def draw_experiment(seed):
    """An experiment in TOML: a method and up to four changes."""
    rng = random.Random(seed)
    table = {
        "rounds": 2,
        "model": {"name": "tiny_cnn"},
        "training": {"rate": 0.05, "batch": 8, "steps": 2},
        "engine": {"device": "cpu", "name": "sequential"},
        "data": {"validation": 0.2},
    }
    name = rng.choice([*PARTS["method"]])
    table["method"] = {"name": name} | draw_options(rng, PARTS["method"][name], rng.choice([0, 0, 1]))
    if "width" not in table["method"]:
        table["model"]["width"] = 0.25
    for _ in range(rng.randint(0, 4)):
        for key, value in draw_change(rng).items():
            *path, last = key.split(".")
            at = table
            for step in path:
                at = at.setdefault(step, {})
            at[last] = value
    if "epochs" in table["training"]:
        table["training"].pop("steps", None)
    return dump(table)


def trains(text, data):
    """Whether an experiment trains; false: it was refused beforehand, in one line."""
    rounds = []
    try:
        chosen = config.parse(text)
        run = hardy.fit(chosen, data=data, quiet=True, callbacks=[lambda run, line: rounds.append(line)])
    except HardyError as error:
        said = str(error)
        assert not rounds and said.endswith((".", "?")) and "\n" not in said and len(said) < 1000, said
        return False
    for held in (run.state.shared, run.state.reported, run.state.memory):
        assert all(value.isfinite().all() for value in held.values() if torch.is_floating_point(value)), held.keys()
    summary = run.summary()
    assert 0 <= summary["standard_accuracy"]["mean"] <= 1
    assert chosen.faults.hostile or "refused" not in summary["lost"], summary["lost"]
    return True


@pytest.mark.parametrize("first", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 16))])
def test_a_combination_trains_or_is_refused(first, data):
    """Forty of them; a test that refused nearly all would say nothing."""
    trained = 0
    for seed in range(40 * first, 40 * first + 40):
        text = draw_experiment(seed)
        try:
            trained += trains(text, data)
        except Exception as error:
            raise AssertionError(f"draw {seed}: {type(error).__name__}: {error}\n{text}") from error
    assert trained >= 10
