"""Every published experiment and every row of every table is read and bound as it stands; experiments begin to run."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import hardy
from hardy.config import named
from hardy.data import sources
from hardy.data.dataset import Dataset, Domain
from hardy.engines import EngineChoice
from hardy.reproduce.definition import read_table, table_files
from hardy.reproduce.records import configuration_hash
from hardy.reproduce.row_runs import RowJob, row_experiment
from hardy.reproduce.row_tuning import row_settings
from hardy.runs.prepare import prepare

FOLDER = Path(__file__).parents[1] / "experiments"
FILES = {path: read_table(path) for path in table_files(FOLDER)}
TABLES = list(FILES.values())
EXPERIMENTS = sorted({*FOLDER.glob("*/*.toml")} - FILES.keys() - {*FOLDER.glob("*/paper.toml")})
DOMAINS = {
    "digits": ("mnist", "svhn", "usps", "synth", "mnistm"),
    "domainnet": ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
}
NAMES = [table.path for table in TABLES]


def test_there_are_experiments_and_tables():
    assert EXPERIMENTS and TABLES


class PreparedError(Exception):
    """Stands in place of an engine: everything before it is done."""


@pytest.fixture
def noise(monkeypatch):
    """A little noise in place of real data, in its domains."""

    @cache
    def load_noise(name):
        rng, side = np.random.default_rng(0), 64 if name == "domainnet" else 16
        shape, rows_of_all = (side, side, 1 if name == "mnist" else 3), 600 if name == "domainnet" else 3000

        def images(rows):
            return rng.integers(0, 256, (rows, *shape), dtype=np.uint8), np.arange(rows) % 10

        def domain(name):
            (x, y), (x_test, y_test) = images(rows_of_all), images(400)
            owners = (np.arange(3000) % 250, np.arange(400) % 250) if name == "celeba" else (None, None)
            return Domain(
                name=name,
                x_train=x,
                y_train=y,
                x_test=x_test,
                y_test=y_test,
                owners_train=owners[0],
                owners_test=owners[1],
            )

        names = DOMAINS.get(name, (name,))
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


def refuses_nothing(chosen):
    """The parts, data and options of an experiment fit each other."""
    with pytest.raises(PreparedError):
        prepare(chosen)
    return chosen


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: str(p.relative_to(FOLDER)))
def test_an_experiment_is_read_and_bound(path, noise, without_engine):
    assert refuses_nothing(hardy.read(path)).rounds > 0


def experiments_of(table, *, quick):
    """Row -> its experiment, of the rows that have runs of their own; of rows that are tuned, with their first setting:
    they need not be tuned yet."""
    rows = [row for row in table.rows_of(quick=quick) if not table.rows[row].same] if not table.program else []
    job = RowJob(folder=FOLDER, table=table.path, row="", seed=0, out=Path("unused"), quick=quick)
    settings = {row: row_settings(table, row)[0] if table.tuning else None for row in rows}
    return {row: row_experiment(table, replace(job, row=row, setting=settings[row]))[0] for row in rows}


@pytest.mark.parametrize("table", TABLES, ids=NAMES)
def test_rows_of_a_table_are_read_and_differ(table):
    for quick in (False, True):
        if quick and table.quick is None:
            continue
        assert table.rows_of(quick=quick)
        marks = {row: configuration_hash(one, table.folder) for row, one in experiments_of(table, quick=quick).items()}
        if not quick:  # a short form may have less to tell rows apart by
            assert len(set(marks.values())) == len(marks), marks
        for row in table.rows_of(quick=quick):
            asked = {name for column in table.columns_of(quick=quick) for name in [column.partition(": ")[0]]}
            assert asked & {"cost", *(one.name for one in table.measures_of(row, quick=quick))}, row


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES, ids=NAMES)
def test_rows_of_a_table_are_bound(table, noise, without_engine):
    for quick in (False, True):
        if not (quick and table.quick is None):
            for row, chosen in experiments_of(table, quick=quick).items():
                try:
                    refuses_nothing(chosen)
                except hardy.HardyError as error:
                    pytest.fail(f"{row}: {error}")


SHORT = ("rounds=2", "evaluation.every=2", "evaluation.threats=[]", "evaluation.robustness=[]", "engine.device=cpu")
SMALL = {
    "fat/digits": ["data.limit=200", "model.width=0.125", "training.batch=8", "method.attack={name='pgd',steps=1}"],
    "fbn/cifar10": ["data.limit=1000", "model.width=0.125"],
    "fbn/cifar10_narrow": ["data.limit=1000"],
    "fbn/mini": ["model.width=0.25"],
    "fbn/mini_dsgd": ["model.width=0.25"],
    "fedbn/digits": ["data.limit=200", "model.width=0.125", "training.batch=8"],
    "fedopt/mini_digits": ["model.width=0.25"],
    "field/attacks_small_digits": ["data.limit=400"],
    "field/cifar10_attacks": ["data.limit=600", "data.split.alpha=1.0", "model.width=0.125", "training.batch=16"],
    "field/mini_attacks": ["model.width=0.25"],
    "field/norms_small_digits": ["data.limit=200"],
    "field/subnetworks_small_digits": ["data.limit=200"],
    "field/svhn_attacks": ["data.limit=600", "data.split.alpha=1.0", "model.width=0.125", "training.batch=16"],
    "fedrbn/digits": ["data.limit=200", "model.width=0.125", "training.batch=8", "method.attack={name='pgd',steps=1}"],
    "fedrbn/digits_narrow": ["data.limit=100", "method.attack={name='pgd',steps=1}"],
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
    "split_mix/digits_small": ["data.limit=200", "training.batch=8"],
    "split_mix/mini": ["data.limit=80", "training.batch=8"],
    "split_mix/mini_dat": ["data.limit=80", "training.batch=8", "method.attack={name='pgd',steps=1}"],
}
"""what makes the first two rounds of an experiment take seconds, where USUAL does not fit"""
USUAL = ("data.limit=60", "model.width=0.25")


def marked(path):
    """Real data takes longer to read than the embedded digits."""
    embedded = re.search(r'source = .*"mini_digits"', path.read_text())
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
