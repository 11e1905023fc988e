"""A federation made by hand is checked before anything is trained, and odd ones still run."""

import dataclasses

import numpy as np
import pytest

import hardy
from conftest import federation, fit
from hardy import papers
from hardy.data.capacity import groups, with_capacity
from hardy.data.kinds import with_kinds
from hardy.errors import HardyError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: {"y_train": d.y_train + 7}, "training labels run from 7 to 9; there are 3 classes"),
        (lambda d: {"x_train": d.x_train / 255}, "training images are float64"),
        (lambda d: {"x_test": d.x_test[:3]}, "they must be uint8"),
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


@pytest.mark.parametrize(
    ("adversarial", "able"),
    [
        (None, None),
        (0.0, []),
        (1.0, [0, 1, 2, 3, 4, 5]),
        (0.4, [0, 1]),  # one of three in each domain
        (("odd",), [1, 3, 5]),
        ((4, 1), [1, 4]),
        ({"odd": 0.7}, [1, 3]),
        ({"even": 1.0, "odd": 0.4}, [0, 1, 2, 4]),
    ],
)
def test_who_can_afford_adversarial_training(adversarial, able):
    data = with_kinds(federation(sizes=(5,) * 6), adversarial)
    kinds = [client.kind for client in data.clients]
    assert kinds == ([""] * 6 if able is None else ["AT" if n in able else "ST" for n in range(6)])


def test_the_rich_are_those_of_the_largest_capacity():
    data = with_capacity(federation(sizes=(5,) * 6), groups(widths=(0.25, 0.5), shuffled=False), seed=0)
    rich = [client.capacity == 0.5 for client in data.clients]
    assert [client.kind == "AT" for client in with_kinds(data, "rich").clients] == rich and any(rich) and not all(rich)


def test_kinds_are_written_in_toml_and_come_back():
    for text in ("0.2", '"rich"', '["pen"]', "[0, 3]", "{ pen = 0.5, mail = 1.0 }"):
        chosen = hardy.config.parse(f"[data]\nadversarial = {text}")
        assert hardy.config.parse(chosen.to_toml()) == chosen
