"""A federation made by hand is checked before anything is trained, and odd ones still run."""

import dataclasses

import numpy as np
import pytest

import hardy
from conftest import federation, fit
from hardy import papers
from hardy.errors import HardyError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: {"y_train": d.y_train + 7}, "training labels run from 7 to 9; there are 3 classes"),
        (lambda d: {"x_train": d.x_train / 255}, "training inputs are float64"),
        (lambda d: {"x_test": d.x_test[:3]}, "they must be uint8 or float32"),
        (lambda d: {"clients": (dataclasses.replace(d.clients[0], test=np.array([999])),)}, "client 0 holds row 999"),
        (lambda d: {"clients": (dataclasses.replace(d.clients[0], train=np.arange(0)),)}, "holds no training row"),
    ],
)
def test_bad_federations(change, message):
    data = federation()
    with pytest.raises(HardyError, match=message):
        dataclasses.replace(data, **change(data))


def test_clients_without_validation_or_test_rows():
    data = federation()
    none = np.arange(0)
    bare = dataclasses.replace(data, clients=tuple(dataclasses.replace(c, validation=none) for c in data.clients))
    run = fit(papers.fedbn(), data=bare, rounds=1)
    assert run.figures.best is None and run.figures.latest["mean"] is not None
    untested = dataclasses.replace(bare, clients=tuple(dataclasses.replace(c, test=none) for c in bare.clients))
    run = fit(papers.fedavg(), data=untested, rounds=1)
    assert run.figures.latest["mean"] is None


def test_arrays_from_python_reach_a_run(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.random((40, 8, 8)), rng.integers(0, 2, 40)
    dataset = hardy.arrays(x, y, x[:10], y[:10])
    chosen = hardy.Experiment(rounds=1, data=hardy.config.DataChoice(clients=2, split="iid"))
    hardy.fit(chosen, data=dataset, out=tmp_path / "run", quiet=True)
    with pytest.raises(HardyError, match="data of its own"):
        hardy.load(tmp_path / "run")
    assert hardy.load(tmp_path / "run", data=dataset).state.round == 1
