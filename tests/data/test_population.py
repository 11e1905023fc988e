"""A population: a client is a function of the seed and its number, and nobody looks at all of them."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import hardy
from conftest import everything
from hardy.cli.tables import summary_table
from hardy.core import disk_store
from hardy.core.cohort import Cohort
from hardy.core.federation import examples_of
from hardy.data import sources
from hardy.data.capacity import groups
from hardy.data.population import Population, PopulationChoice, populate
from hardy.data.shifts import camera
from hardy.errors import HardyError

DIGITS = sources.load_dataset("mini_digits")
MILLION = 1_000_000
TINY = {
    "model": {"name": "tiny_cnn", "width": 0.25},
    "training": {"rate": 0.05, "batch": 4, "steps": 1},
    "engine": {"device": "cpu", "name": "vectorised"},
}


def population(clients=1000, seed=0, **options):
    own = {key: options.pop(key) for key in ("adversarial", "capacity", "shift", "shift_test") if key in options}
    choice = PopulationChoice(clients=clients, **options)
    return populate(DIGITS, choice, validation=0.1, limit=None, seed=seed, **own)


def same(one, other):
    rows = ("train", "validation", "test")
    facts = ("domain", "kind", "capacity")
    return all(np.array_equal(getattr(one, r), getattr(other, r)) for r in rows) and all(
        getattr(one, f) == getattr(other, f) for f in facts
    )


def test_a_client_is_a_function_of_the_seed_and_its_number():
    many, few = population(MILLION, alpha=0.3).clients, population(100, alpha=0.3).clients
    assert all(same(many[k], few[k]) for k in (0, 7, 99))
    other = population(100, seed=1, alpha=0.3).clients
    assert not any(same(few[k], other[k]) for k in range(20))


def test_rows_are_the_clients_own_domain_and_never_twice():
    data = population(200, alpha=0.1, smallest=20, largest=40)
    ends = np.cumsum([0, *(len(d.y_train) for d in DIGITS.domains)])
    places = {d.name: (ends[n], ends[n + 1]) for n, d in enumerate(DIGITS.domains)}
    for client, examples in zip(data.clients, examples_of(data.clients), strict=True):
        low, high = places[client.domain]
        held = np.concatenate([client.train, client.validation])
        assert len(client.train) == examples and len(set(held.tolist())) == len(held)
        assert (low <= held).all() and (held < high).all()
        assert len(client.test) and len(client.validation)


def test_no_client_validates_on_rows_that_another_one_trains_on():
    clients = list(population(500).clients)
    trained = set(np.concatenate([c.train for c in clients]).tolist())
    assert trained.isdisjoint(np.concatenate([c.validation for c in clients]).tolist())


def test_sizes_follow_the_power_law():
    """Of a Pareto law cut at 8 and 65 with exponent 1.5 a share of (8^-1.5 - 16^-1.5) / (8^-1.5 - 65^-1.5) is below
    16: 0.6757."""
    sizes = np.array(population(100_000).clients.examples)
    assert sizes.min() == 8 and sizes.max() == 64
    assert abs((sizes < 16).mean() - 0.6757) < 4 * 0.0015
    even = np.array(population(100_000, exponent=0).clients.examples)
    assert abs(even.mean() - 36) < 0.3


def test_small_alpha_gives_few_classes():
    def classes(**options):
        data = population(200, smallest=30, largest=30, **options)
        return np.mean([len(set(data.y_train[c.train].tolist())) for c in data.clients])

    assert classes(alpha=0.05) < 4 and classes() > 8


def test_kinds_and_capacities_by_share():
    clients = population(600, adversarial=0.2, capacity=groups(widths=(0.25, 0.5, 1.0))).clients
    assert abs(np.mean([c.kind == "AT" for c in clients]) - 0.2) < 0.07
    assert abs(np.mean([c.capacity == 0.5 for c in clients]) - 1 / 3) < 0.08
    rich = population(100, adversarial="rich", capacity=groups(widths=(0.5, 1.0))).clients
    assert all((c.kind == "AT") == (c.capacity == 1.0) for c in rich)
    pen = population(100, adversarial={"pen": 1.0}).clients
    assert all((c.kind == "AT") == (c.domain == "pen") for c in pen)
    assert {c.kind for c in clients.sorts} == {"AT", "ST"} and {c.capacity for c in clients.sorts} == {0.25, 0.5, 1.0}


def test_clients_share_a_few_devices():
    data = population(200, devices=3, shift=camera())
    plain = population(200)
    whole = len(plain.x_train)
    assert len(data.x_train) == 3 * whole and {int(c.train[0]) // whole for c in data.clients} == {0, 1, 2}
    client, before = data.clients[5], plain.clients[5]
    assert np.array_equal(client.train % whole, before.train)
    assert np.array_equal(data.y_train[client.train], plain.y_train[before.train])
    assert not np.array_equal(data.x_train[client.train], plain.x_train[before.train])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"population": {"smallest": 4}}, "population.clients is 0"),
        ({"population": {"clients": 10, "smallest": 1}}, "smallest is 1"),
        ({"population": {"clients": 10, "largest": 10_000}}, "largest is 10000"),
        ({"population": {"clients": 10}, "data": {"clients": 3}}, "data.clients is 3"),
        ({"population": {"clients": 10}, "data": {"split": "iid"}}, "data.split is 'iid'"),
        ({"population": {"clients": 10, "devices": 2}}, "data.shift absent"),
        ({"population": {"clients": 10}, "data": {"adversarial": [1]}, "method": "fedrbn"}, "by number"),
        ({"population": {"clients": 10}, "server": {"rows": 5}}, "server.rows is 5"),
        ({"population": {"clients": 10}, "method": "centralised"}, "no end"),
        ({"population": {"clients": 10}, "data": {"adversarial": 0.5}}, "looks at a client's kind"),
    ],
)
def test_what_cannot_work_is_refused(options, said):
    with pytest.raises(HardyError, match=said):
        hardy.fit(rounds=1, quiet=True, **{**TINY, **options})


def test_a_round_of_a_million_clients_makes_the_cohort_alone(monkeypatch):
    """Counted, not timed: clients that are made, and rows of tensors that are read and written."""
    from hardy.runs.prepare import prepare

    made, read = [], []
    inner, stored = Population._client, disk_store.DiskStore.stored
    monkeypatch.setattr(Population, "_client", lambda self, k: made.append(k) or inner(self, k))
    monkeypatch.setattr(
        disk_store.DiskStore, "stored", lambda self, slots: read.append(len(slots)) or stored(self, slots)
    )
    asked = {"population.clients": MILLION, "cohort.clients": 20, "method": "fedbn", "engine.store": "disk"}
    experiment = hardy.config.changed(hardy.Experiment(), {**TINY, **asked, "evaluation.clients": 10})
    run = prepare(experiment)
    assert not made
    for number in range(3):
        made.clear()
        read.clear()
        run.state, line = run.server.round(run.state, run.engine, 0.05)
        assert len(made) == len(set(made)) <= 20 and sum(read) == 20
        assert line["cohort"] == 20 and len(run.engine.store.file) == 20 * (number + 1)
    assert run.engine.store.axes == (MILLION, 1) and len(run.server.setting.clients) == MILLION


def test_figures_of_a_sample_with_quantiles_and_the_rest_in_a_table(tmp_path, monkeypatch):
    from hardy.core import federation
    from hardy.runs import folder

    for module in (federation, folder):
        monkeypatch.setattr(module, "LISTED", 5)
    keys = {"population": {"clients": 20_000}, "cohort": {"clients": 4}, "evaluation": {"clients": 12}}
    run = hardy.fit(rounds=1, out=tmp_path / "run", quiet=True, method="fedbn", **{**TINY, **keys})
    found = run.summary()["standard_accuracy"]
    assert found["measured"] == 12 and found["clients"] == 20_000 and len(found["by_client"]) == 5
    assert "mean of clients (12 of 20,000)  " in summary_table(run.summary())
    page = (tmp_path / "run" / "report.html").read_text()
    assert "the 12 clients measured of 20,000" in page and "5 of 20,000 clients hold" in page
    listed = json.loads((tmp_path / "run" / "clients.json").read_text())
    assert len(listed) == 5 and listed[0]["client"] == run.engine.data.sample[0]
    table = np.load(tmp_path / "run" / "tables" / "round-000001-test.npy")
    assert table.shape == (12, 2) and table[:, 0].tolist() == list(run.engine.data.sample)
    assert found["mean"] == pytest.approx(np.nanmean(table[:, 1]))
    assert found["quantiles"]["0.5"] == pytest.approx(np.nanmedian(table[:, 1]))
    known = table[:, 1][np.isfinite(table[:, 1])]
    error = np.sqrt(known.var(ddof=1) * (1 - 12 / 20_000) / len(known))
    assert found["standard_error"] == pytest.approx(error)
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000


def test_a_population_is_resumed_with_the_same_bits(tmp_path):
    keys = {"population": {"clients": 5000, "alpha": 0.5}, "cohort": {"clients": 6}, "evaluation": {"clients": 10}}
    keys |= {**TINY, "method": "fedbn", "checkpoint": {"every": 1}}
    keys["engine"] = {**TINY["engine"], "store": "disk"}
    whole = hardy.fit(rounds=3, out=tmp_path / "whole", quiet=True, **keys)
    hardy.fit(rounds=1, out=tmp_path / "part", quiet=True, **keys)
    config = tmp_path / "part" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 1", "rounds = 3"))
    again = hardy.resume(tmp_path / "part", quiet=True)
    one, other = everything(whole), everything(again)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert whole.summary()["standard_accuracy"] == again.summary()["standard_accuracy"]


def test_one_client_is_served_and_a_run_starts_from_another():
    keys = {"population": {"clients": 20_000}, "cohort": {"clients": 8}, "evaluation": {"clients": 4}, **TINY}
    keys |= {"method": "fedbn", "engine": {**TINY["engine"], "store": "disk"}}
    run = hardy.fit(rounds=1, quiet=True, **keys)
    (client, *_) = run.server.ask(0).cohort
    x = torch.rand(2, 3, 28, 28)
    assert not torch.equal(run.customise(client=client)(x), run.customise(client=19_999)(x))
    with pytest.raises(HardyError, match="choose one"):
        run.customise()
    with pytest.raises(HardyError, match="looks at all clients"):
        run.network_for_new_client("average")
    few = {**keys, "population": {"clients": 50}, "cohort": {"clients": 50}, "engine": TINY["engine"]}
    trained = hardy.fit(rounds=1, quiet=True, **few)
    again = hardy.fit(rounds=1, quiet=True, init=trained, **keys)
    assert isinstance(again.engine.store, disk_store.DiskStore)
    mean = trained.engine.store["norm1.bias"].mean(0)
    torch.testing.assert_close(again.engine.store.first["norm1.bias"], mean)


def test_large_poisson_cohorts_are_as_large_as_they_should_be():
    cohort = Cohort(clients=200, sampling="poisson")
    sizes = [len(cohort.sample(0, number, MILLION)) for number in range(200)]
    assert abs(np.mean(sizes) - 200) < 4 and abs(np.std(sizes) - np.sqrt(200)) < 3
    drawn = cohort.sample(0, 3, MILLION)
    assert drawn == sorted(set(drawn)) and drawn == cohort.sample(0, 3, MILLION)


def test_hostile_clients_of_a_population_attack_replies_but_not_rows():
    keys = {"population": {"clients": 200}, "cohort": {"clients": 20}, "evaluation": {"clients": 5}, **TINY}
    run = hardy.fit(rounds=1, quiet=True, faults={"hostile": 50, "byzantine": "sign_flipping"}, **keys)
    assert run.last_line["hostile_in_cohort"] > 0
    with pytest.raises(HardyError, match="rows of"):
        hardy.fit(rounds=1, quiet=True, faults={"hostile": 50, "byzantine": "label_flipping"}, **keys)


def test_choice_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PopulationChoice(clients=3).clients = 4
