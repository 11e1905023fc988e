"""Every published experiment and every row of every grid is read and bound as it stands; experiments begin to run."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import hardy
from hardy.attacks.threats import parse_threat as parse
from hardy.config import named
from hardy.data import sources
from hardy.data.dataset import Dataset, Domain
from hardy.engines import EngineChoice
from hardy.runs.prepare import prepare

FOLDER = Path(__file__).parents[1] / "experiments"
FILES = sorted(FOLDER.rglob("*.toml"))
GRIDS = [path for path in FILES if path.stem.startswith("grid")]
DIGITS = ("mnist", "svhn", "usps", "synth", "mnistm")
spec = importlib.util.spec_from_file_location("grid", FOLDER / "grid.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def test_there_are_experiments():
    assert FILES and GRIDS


EXPERIMENTS = [path for path in FILES if path not in GRIDS]


class PreparedError(Exception):
    """Stands in place of an engine: everything before it is done."""


@pytest.fixture
def noise(monkeypatch):
    """A little noise in place of real data, in its domains."""

    @cache
    def load_noise(name):
        rng, shape = np.random.default_rng(0), (16, 16, 1 if name == "mnist" else 3)

        def images(rows):
            return rng.integers(0, 256, (rows, *shape), dtype=np.uint8), np.arange(rows) % 10

        def domain(name):
            (x, y), (x_test, y_test) = images(3000), images(400)
            return Domain(name=name, x_train=x, y_train=y, x_test=x_test, y_test=y_test)

        names = DIGITS if name == "digits" else (name,)
        return Dataset(name=name, classes=tuple("0123456789"), domains=tuple(map(domain, names)))

    real = sources.load_dataset

    def load(name, root, **options):
        return real(name, root, **options) if name == "mini_digits" else load_noise(name)

    monkeypatch.setattr(sources, "load_dataset", load)


@pytest.fixture
def without_engine(monkeypatch):
    def stop(*_, **__):
        raise PreparedError

    monkeypatch.setattr(EngineChoice, "make", stop)


def refuses_nothing(path, overrides=()):
    """An experiment is read, and its parts, data and options fit each other."""
    chosen = hardy.read(str(path), overrides)
    with pytest.raises(PreparedError):
        prepare(chosen)
    return chosen


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: str(p.relative_to(FOLDER)))
def test_an_experiment_is_read_and_bound(path, noise, without_engine):
    assert refuses_nothing(path).rounds > 0


@pytest.mark.parametrize("path", GRIDS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_rows_of_a_grid_are_bound_and_differ(path, noise, without_engine):
    grid = tomllib.loads(path.read_text())
    experiment = path.parent / grid["experiment"]
    bound = [refuses_nothing(experiment, row) for row in grid["rows"].values()]
    assert len({chosen.to_toml() for chosen in bound}) == len(bound)
    names = [name for name, _ in tool.every_row(grid)]
    for how in grid.get("again", {}).values():
        assert any(re.search(how["rows"], name) for name in names) and all(map(parse, how["threats"]))


SHORT = ("rounds=2", "evaluation.every=2", "evaluation.threats=[]", "evaluation.robustness=[]", "engine.device=cpu")
SMALL = {
    "fat/digits": ["data.limit=200", "model.width=0.125", "training.batch=8", "method.attack={name='pgd',steps=1}"],
    "fbn/cifar10": ["data.limit=1000", "model.width=0.125"],
    "fbn/mini": ["model.width=0.25"],
    "fedbn/digits": ["data.limit=200", "model.width=0.125", "training.batch=8"],
    "fedopt/mini_digits": ["model.width=0.25"],
    "fedrbn/digits": ["data.limit=200", "model.width=0.125", "training.batch=8", "method.attack={name='pgd',steps=1}"],
    "fedrbn/mini": ["data.limit=40"],
    "fedrobust/cifar": ["data.clients=2", "data.limit=100", "model.width=0.125"],
    "fedrobust/mnist": ["data.clients=4", "data.limit=200", "model.width=0.125"],
    "private/clients": ["data.clients=100", "data.limit=60", "cohort.fraction=0.5"],
    "sfat/cifar10": ["data.limit=400", "model.width=0.125"],
    "sfat/cifar10_small": ["data.limit=400", "model.width=0.125"],
    "sfat/liar": ["data.limit=60", "model.width=0.25", "training.batch=8"],
    "sfat/mini_digits": ["data.limit=60", "model.width=0.25", "training.batch=8"],
    "sfat/svhn": ["data.limit=400", "model.width=0.125", "training.batch=32"],
    "split_mix/cifar10": ["data.clients=15", "data.limit=900", "training.batch=16", "training.epochs=1"],
    "split_mix/digits": ["data.limit=200", "training.batch=8"],
    "split_mix/digits_dat": ["data.limit=200", "training.batch=8", "method.attack={name='pgd',steps=1}"],
}
"""what makes the first two rounds of an experiment take seconds, where USUAL does not fit"""
USUAL = ("data.limit=60", "model.width=0.25")


def marked(path):
    """Real data takes longer to read than the embedded digits."""
    embedded = "mini_digits" in path.read_text()
    return pytest.param(path, marks=() if embedded else pytest.mark.slow, id=str(path.relative_to(FOLDER)))


@pytest.mark.parametrize("path", [marked(path) for path in EXPERIMENTS])
def test_the_first_two_rounds_run(path):
    name = path.relative_to(FOLDER).with_suffix("").as_posix()
    chosen = hardy.read(str(path), [*SHORT, *SMALL.get(name, USUAL)])
    source, _ = named(chosen.data.source, "data.source")
    (listed,) = (one for one in sources.available() if one.name == source)
    if not listed.present:
        pytest.skip(f"no {source}: {listed.where} (HARDY_DATA)")
    run = hardy.fit(chosen, quiet=True)
    assert run.state.round == 2 and 0 <= run.summary()["standard_accuracy"]["mean"] <= 1
    assert all(tensor.isfinite().all() for tensor in run.state.shared.values() if tensor.is_floating_point())


def test_a_grid_runs_every_seed_fine_tunes_and_goes_on(tmp_path):
    demo = Path(hardy.__file__).parent / "bundled" / "demo.toml"
    again = '[again]\n"tuned" = { rows = "^a, seed 1", fine_tune = { steps = 1 }, threats = ["fgsm"] }\n'
    (tmp_path / "grid.toml").write_text(f'experiment = "{demo.as_posix()}"\nseeds = [0, 1]\n[rows]\n"a" = []\n{again}')
    out = tmp_path / "out.json"
    command = [sys.executable, FOLDER / "grid.py", tmp_path / "grid.toml", "--out", out]
    tiny = ["rounds=1", "evaluation.every=1", "model.width=0.25", "data.limit=60", "engine.name=sequential"]
    for only in ("seed 1", ""):
        shown = subprocess.run([*command, "--only", only, *tiny], capture_output=True, text=True, check=True).stdout
        assert shown.count(" in ") == 1, shown
    found = json.loads(out.read_text())
    assert [found[f"a, seed {n}"]["seed"] for n in (0, 1)] == [0, 1]
    assert "fgsm" in found["a, seed 1"]["again"]["tuned"]["robust_accuracy"] and not found["a, seed 0"]["again"]


def test_a_grid_goes_on_in_the_middle_of_a_row_and_keeps_its_networks(tmp_path):
    demo = Path(hardy.__file__).parent / "bundled" / "demo.toml"
    tiny = ["rounds=3", "evaluation.every=1", "model.width=0.25", "data.limit=60", "checkpoint.every=1"]
    whole = hardy.fit(hardy.read(str(demo), tiny), out=tmp_path / "a_b")
    shutil.rmtree(tmp_path / "a_b" / "checkpoint" / "round-000003")  # as if it had been killed after round 2
    name, found = tool.run_row(demo, None, tmp_path, {}, ("a, b", tiny))
    assert name == "a, b" and found["standard_accuracy"] == whole.summary()["standard_accuracy"]
    assert len(found["curve"]) == 3 and hardy.load(tmp_path / "a_b").state.round == 3
    _, found = tool.run_row(demo, None, tmp_path, {}, ("a, b", [*tiny, "seed=5"]))
    assert "other settings" in found["error"]
