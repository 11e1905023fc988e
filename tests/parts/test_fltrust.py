"""FLTrust: the server's own rows, and what it makes of the clients' updates."""

import dataclasses

import numpy as np
import pytest
import torch

import hardy
from conftest import assert_close, everything, experiment, federation, fit, net, with_momentum
from hardy import papers
from hardy.config.experiment import ServerChoice
from hardy.core.messages import Slot, Updates
from hardy.core.partition import Role
from hardy.core.protocols import RoundContext
from hardy.core.server import PipelinedServer, Server
from hardy.data.server_rows import take_rows
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.faults.byzantine import sign_flipping
from hardy.faults.injection import Faults
from hardy.parts.aggregators.trust import fltrust
from hardy.runs.prepare import prepare

ROWS = ServerChoice(rows=8)


def updates(rows, variances=None):
    each = torch.ones(len(rows), dtype=torch.float64)
    variances = [[1.0]] * len(rows) if variances is None else variances
    return Updates(
        slots=[Slot(at) for at in range(len(rows))],
        shared={
            "var": torch.tensor(variances).double(),
            "w": torch.tensor(rows).double(),
            "n": torch.arange(len(rows)),
        },
        reported={},
        weights=each,
        steps=each,
        loss=each,
    )


def result(rows, own, sent=(0.0, 0.0), variances=None):
    shared = {"var": torch.tensor([[1.0]]).double(), "w": torch.tensor([sent]).double(), "n": torch.tensor([0])}
    roles = {"var": Role.NORM_VAR, "w": Role.WEIGHT, "n": Role.COUNTER}
    context = RoundContext(shared=shared, roles=roles, bases=1, clients=9, server_update=updates([own]))
    rule = fltrust()
    left, _ = rule.finish(rule.fold(None, updates(rows, variances), context), context, {})
    return left


def test_by_hand():
    assert result([[6.0, 0.0], [0.0, 3.0], [-1.0, 0.0]], [2.0, 0.0])["w"].tolist() == [[2.0, 0.0]]
    # cosines 1 and 1/√2; lengths become 2: ((2, 0) + (√2, √2)/√2) / (1 + 1/√2)
    found = result([[7.0, 5.0], [6.0, 6.0]], [7.0, 5.0], sent=(5.0, 5.0), variances=[[2.0], [8.0]])
    trust = np.array([1, np.sqrt(0.5)])
    moved = (np.array([2.0, 0]) + np.array([1.0, 1.0])) / trust.sum()
    np.testing.assert_allclose(found["w"][0].numpy(), 5 + moved, rtol=1e-12)
    np.testing.assert_allclose(found["var"][0].numpy(), (trust @ [2.0, 8.0]) / trust.sum(), rtol=1e-12)
    assert found["n"].tolist() == [1]


def test_nobody_trusted_changes_nothing():
    found = result([[-1.0, 0.0], [0.0, 0.0]], [2.0, 0.0], variances=[[3.0], [4.0]])
    assert found["w"].tolist() == [[0.0, 0.0]] and found["var"].tolist() == [[1.0]]


def test_identical_updates_and_order():
    same = [[3.0, 4.0]] * 3
    torch.testing.assert_close(result(same, [3.0, 4.0])["w"], torch.tensor([[3.0, 4.0]]).double())
    rows = [[1.0, 2.0], [-3.0, 1.0], [5.0, 0.1]]
    torch.testing.assert_close(result(rows, [1.0, 1.0])["w"], result(rows[::-1], [1.0, 1.0])["w"])


def test_a_majority_of_far_liars_is_left_out():
    honest = [[1.0, 0.9], [0.9, 1.1]]
    liars = [[-1e9, -1e9]] * 5
    torch.testing.assert_close(result(honest + liars, [1.0, 1.0])["w"], result(honest, [1.0, 1.0])["w"])


def trusting(**changes):
    return papers.fedavg().replace(aggregator=fltrust()), {"server": ROWS, **changes}


def test_the_servers_rows_are_nobody_elses():
    data = federation()
    left, own = take_rows(data, 8, seed=3)
    held = np.concatenate([client.train for client in left.clients])
    assert len(own.x_train) == len(own.clients[0].train) == 8 and len(own.x_test) == 0
    before = np.concatenate([client.train for client in data.clients])
    gone = np.setdiff1d(before, held)
    assert len(gone) == 8 and {r.tobytes() for r in data.x_train[gone]} == {r.tobytes() for r in own.x_train}
    assert np.array_equal(take_rows(data, 8, seed=3)[1].x_train, own.x_train)
    for rows, words in ((10_000, "hold"), (len(before) - 1, "would leave client")):
        with pytest.raises(HardyError, match=words):
            take_rows(data, rows, 0)


def test_it_learns_among_a_majority_of_liars():
    method, options = trusting(faults=Faults(hostile=3, byzantine=sign_flipping()))
    run = fit(method, rounds=6, **options)
    plain = fit(papers.fedavg(), rounds=6, faults=options["faults"])
    assert run.last_line["loss"] < plain.last_line["loss"]


def test_engines_resuming_and_both_rounds_agree(tmp_path):
    method, options = trusting()
    data = federation()
    vectorised = EngineChoice(name="vectorised", device="cpu", precision="float64", lane=2)
    whole, many = fit(method, data=data, **options), fit(method, data=data, engine=vectorised, **options)
    assert_close(everything(whole), everything(many), 1e-9)
    fit(method, data=data, rounds=2, out=tmp_path, **options)
    settings = tmp_path / "config.toml"
    assert "[server]\nrows = 8" in settings.read_text()
    settings.write_text(settings.read_text().replace("rounds = 2", "rounds = 4"))
    resumed = hardy.resume(tmp_path, method=with_momentum(method), model=net, data=data, quiet=True)
    for name, tensor in everything(whole).items():
        assert torch.equal(tensor, everything(resumed)[name]), name
    ends = []
    for kind in (Server, PipelinedServer):
        run = prepare(experiment(**options), method=with_momentum(method), model=net, data=data)
        server = kind(**{f.name: getattr(run.server, f.name) for f in dataclasses.fields(Server)})
        for _ in range(3):
            run.state, _ = server.round(run.state, run.engine, 0.1)
        ends.append(everything(run))
    assert_close(*ends, 0)


@pytest.mark.parametrize(
    "method, server, words",
    [
        (papers.fedavg().replace(aggregator=fltrust()), ServerChoice(), "server.rows is 0"),
        (papers.fedavg(), ROWS, "server.rows is 8, but no rule compares"),
        (papers.fedbn().replace(aggregator=fltrust()), ROWS, "keeps tensors with its clients"),
        (
            papers.fedavg().replace(aggregator=fltrust()),
            ServerChoice(rows=9, source="mini_digits"),
            "source like",
        ),
    ],
)
def test_what_cannot_work_is_refused(method, server, words):
    with pytest.raises(HardyError, match=words):
        fit(method, rounds=1, server=server)
    with pytest.raises(HardyError, match="has no effect"):
        ServerChoice(source="mini_digits")


def test_a_source_of_its_own():
    text = {"data.source": {"name": "mini_digits", "domains": ["pen"]}, "data.limit": 60, "rounds": 1, "seed": 1}
    own = {
        "server": {"rows": 20, "source": {"name": "mini_digits", "domains": ["print"]}},
        "method.aggregator": "fltrust",
    }
    run = hardy.fit(None, {**text, **own, "training.batch": 8}, quiet=True)
    held = {row.tobytes() for row in run.server.own.data.x_train}
    assert len(held) == 20 and not held & {row.tobytes() for row in run.engine.data.x_train}
