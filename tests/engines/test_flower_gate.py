"""Lies over a network, beyond those of a single reply: registration, order of arrival, size, silence."""

import json
import random
import tracemalloc
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import assert_close, experiment
from hardy import papers
from hardy.callbacks import early_stopping
from hardy.config import NetworkChoice
from hardy.core.admission import Admission
from hardy.core.training import Training
from hardy.errors import HardyError
from hardy.faults.injection import Faults

pytest.importorskip("flwr", reason="the flower extra is not installed")

from flwr.app import Array
from test_flower import FLOWER, Grid, fit, grid_of, in_one_process, rewrite, run_over

from hardy.flower.limits import PIECE, ReplyMeter, ReplyTooLarge
from hardy.flower.membership import Membership
from hardy.runs.profiles import Profile, placeholder_federation


@pytest.fixture(autouse=True)
def clock(tmp_path, monkeypatch):
    return in_one_process(tmp_path, monkeypatch)


def late(grid, seed):
    """Every reply comes after a random number of looks for it."""
    luck, looks, pull = random.Random(seed), {}, grid.pull_messages

    def pull_messages(numbers):
        (number,) = numbers
        looks.setdefault(number, luck.randrange(6))
        looks[number] -= 1
        return pull(numbers) if looks[number] < 0 else []

    grid.pull_messages = pull_messages
    return grid


def test_the_order_of_arrival_changes_no_bit():
    """Ten runs over real processes: test_flower_deployed.py."""
    method, options = papers.fedavg(), {"rounds": 1, "training": Training(rate=0.1, batch=4)}
    options["network"] = NetworkChoice(clients=4, deadline=60.0)
    apps = list(grid_of(method).apps.values())
    first = run_over(Grid(apps), method, **options)
    for seed in range(6):
        again = run_over(late(Grid(apps), seed), method, **options)
        for name, tensor in first.state.shared.items():
            assert torch.equal(tensor, again.state.shared[name]), (seed, name)


def introduced(grid, node, **claims):
    """The node says other things of itself."""

    def spoil(which, kind, reply):
        if which == node and kind == "query":
            said = json.loads(reply.content.config_records["settings"]["profile"])
            reply.content.config_records["settings"]["profile"] = json.dumps(said | claims)
        return reply

    grid.spoil = spoil
    return grid


def test_claimed_rows_cost_no_memory_and_no_more_than_half_the_weight():
    method = papers.fedavg()
    tracemalloc.start()
    run = run_over(introduced(grid_of(method), 101, train=10**7), method, rounds=1)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 80e6  # ten million rows as numbers would be 80 MB
    assert run.server._largest_weight == 27  # 10 + 12 + 5 of the others
    huge = Profile(
        client=0,
        domain="",
        kind="",
        capacity=1.0,
        train=10**9,
        validation=10**9,
        test=0,
        shape=(1, 8, 8),
        classes=("0",),
    )
    assert placeholder_federation([huge]).clients[0].train.strides == (0,)


@pytest.mark.parametrize("rows", [10**8, 10**9])
def test_too_many_rows_are_one_refusal(rows, caplog):
    grid = introduced(grid_of(papers.fedavg()), 101, train=rows)
    with pytest.raises(HardyError, match=r"clients \[1\] did not register"):
        run_over(grid, papers.fedavg(), network=NetworkChoice(clients=4, patience=30.0))
    assert f"node 101 is refused: it says it holds {rows} rows, limit 10000000 (admission.most_rows)" in caplog.text


def test_a_million_claimed_rows_count_for_half(tmp_path):
    """The aggregate is that of a client with as many rows as all others together."""
    method = papers.fedavg()
    lied = run_over(introduced(grid_of(method), 101, train=10**6), method, rounds=1)
    honest = run_over(grid_of(method), method, rounds=1, admission=Admission(largest_share=1.0))
    assert lied.state.shared.keys() == honest.state.shared.keys() and lied.server._largest_weight == 27
    assert lied.figures.lost == {}  # the replies are honest, and each counts by rows that its client has trained on
    for name, tensor in honest.state.shared.items():
        assert torch.equal(tensor, lied.state.shared[name]), name


def assert_without(run, client):
    """The run is that of the others: each round says that the client was away, and it counts for nothing."""
    assert run.state.round == 2 and list(run.figures.lost) == ["away"]
    accuracy = run.summary()["standard_accuracy"]["by_client"]
    assert [found is None for found in accuracy] == [number == client for number in range(4)]
    near = fit(papers.fedavg(), rounds=2, faults=_Away(client=client))
    assert_close(near.state.shared, run.state.shared, 1e-9)


@dataclass(frozen=True)
class _Away(Faults):
    client: int = 0

    def sample_faults(self, seed, round, cohort):
        return {self.client: "dropped"}


@pytest.mark.parametrize("claims", [{"shape": [1, 9, 9]}, {"classes": ["a", "b"]}], ids=str)
@pytest.mark.parametrize("node", [100, 102])
def test_other_inputs_or_classes_are_one_refusal_and_the_run_goes_on(claims, node, caplog):
    """Also from the first client, which was the measure of all."""
    grid = introduced(grid_of(papers.fedavg()), node, **claims)
    run = run_over(grid, papers.fedavg(), rounds=2, network=NetworkChoice(clients=4, patience=30.0))
    assert f"node {node} is refused: it holds inputs" in caplog.text
    assert f"the run goes on without client {node - 100}" in caplog.text
    assert_without(run, node - 100)


def test_a_certified_client_that_claims_too_many_rows_is_done_without(caplog, monkeypatch):
    monkeypatch.setattr("hardy.flower.apps._certified", lambda: lambda: {n: 100 + n for n in range(4)})
    grid = introduced(grid_of(papers.fedavg()), 101, train=10**9)
    run = run_over(grid, papers.fedavg(), rounds=2, network=NetworkChoice(clients=4, patience=30.0))
    assert "the run goes on without client 1, which was refused: it says it holds 1000000000 rows" in caplog.text
    assert_without(run, 1)


def test_nodes_without_a_certificate_are_not_even_greeted(monkeypatch):
    """A site may register as many nodes as it likes: only the one that its certificate was last used by counts."""
    monkeypatch.setattr("hardy.flower.apps._certified", lambda: lambda: {n: 100 + n for n in range(4)})
    grid, asked = grid_of(papers.fedavg()), []
    grid.apps |= dict.fromkeys(range(104, 110), grid.apps[100])
    grid.contexts |= dict.fromkeys(range(104, 110), grid.contexts[100])
    push = grid.push_messages
    grid.push_messages = lambda messages: (asked.extend(m.metadata.dst_node_id for m in messages), push(messages))[1]
    run_over(grid, papers.fedavg(), rounds=1, network=NetworkChoice(clients=4, deadline=60.0))
    assert set(asked) == {100, 101, 102, 103}


def test_one_that_boasts_does_not_end_a_run():
    """The honest get better; by the mean with the liar's 1.0 the first round would be the best for good."""
    grid = grid_of(papers.fedavg())

    def boast(node, kind, reply):
        said = reply.content.metric_records.get("accuracy", {})
        for name in set(said) - {"round"}:
            said[name] = float(said["round"] == 1) if node == 103 else 0.1 * said["round"]
        return reply

    grid.spoil = boast
    run = run_over(grid, papers.fedavg(), rounds=3, callbacks=(early_stopping(patience=1),))
    assert run.state.round == 3 and run.figures.stopped is None and run.figures.best["round"] == 3


def oversize(reply):
    record = reply.content.array_records["shared/0"]
    record[next(iter(record))] = Array(np.zeros(2**20, np.float64))


def bomb(reply):
    """A header that asks for a terabyte."""
    array = next(iter(reply.content.array_records["shared/0"].values()))
    header = json.dumps({"w": {"dtype": "F64", "shape": [2**37], "data_offsets": [0, 2**40]}}).encode()
    array.data = len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("lie", "reason"),
    [(oversize, "bytes, limit"), (bomb, "adds 'bytes that cannot be read'")],
    ids=["oversize", "header"],
)
def test_a_reply_that_is_too_large_is_refused_before_it_is_decoded(lie, reason, tmp_path, monkeypatch):
    grid = grid_of(papers.fedavg())
    grid.spoil = lambda node, kind, reply: (lie(reply), reply)[1] if node == 101 and kind == "train" else reply
    run_over(grid, papers.fedavg(), rounds=1, out=tmp_path / "run")
    (line,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert line["lost"].keys() == {"1"} and reason in line["lost"]["1"]


class Link:
    """The parts of Flower's client that the meter looks at."""

    def __init__(self, content):
        self.content, self._client = content, SimpleNamespace(event_hooks={"request": [], "response": []})

    def PullObject(self, request):
        for hook in self._client.event_hooks["response"]:
            hook(SimpleNamespace(headers={"content-length": str(len(self.content))}))
        return SimpleNamespace(object_content=self.content)


def test_bytes_and_pieces_are_counted_while_they_are_fetched():
    link = Link(b"x" * 10**6)
    meter = ReplyMeter(SimpleNamespace(_runtime_client=link))
    with meter.limit(3 * 10**6):
        for _ in range(3):
            link.PullObject(None)
        with pytest.raises(ReplyTooLarge, match="more than 3000000 bytes"):
            link.PullObject(None)
    link.PullObject(None)  # nothing is counted outside
    link.content = b'Array abc 99\x00{"arraychunk_ids": [' + b"0, " * 5000 + b"0]}"
    with meter.limit(100 * PIECE), pytest.raises(ReplyTooLarge, match="arrays of more than"):
        link.PullObject(None)


def test_a_silent_node_costs_one_deadline(clock):
    """It is not asked to evaluate in the round in which it was silent."""
    method, asked = papers.fedavg(), []
    grid = grid_of(method)
    push = grid.push_messages

    def pushed(messages):
        asked.extend((m.metadata.dst_node_id, m.metadata.message_type) for m in messages)
        assert all(m.metadata.ttl >= 110 for m in messages)  # Flower keeps it until we have given it up
        return push(messages)

    grid.push_messages = pushed
    grid.spoil = lambda node, kind, reply: None if node == 101 and kind == "train" else reply
    run_over(grid, method, rounds=1, network=NetworkChoice(clients=4, deadline=50.0))
    assert (101, "train") in asked and (101, "evaluate") not in asked and (102, "evaluate") in asked
    assert 50 <= clock.now < 60


def test_one_that_sends_1e17_over_the_network_is_refused(tmp_path):
    method = papers.fedavg()
    grid = grid_of(method)

    def lie(node, kind, reply):
        if node == 101 and kind == "train" and reply.content.metric_records["figures/0"]["round"] == 1:
            rewrite(reply, lambda arrays: arrays.update({n: np.full_like(a, 1e17) for n, a in arrays.items()}))
        return reply

    grid.spoil = lie
    run = run_over(grid, method, rounds=3, out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [list(line["lost"]) for line in lines] == [[], ["1"], []]
    assert "times as long as usual" in lines[1]["lost"]["1"]
    assert all(t.abs().max() < 100 for t in run.state.shared.values())


def test_most_rows_is_for_a_network():
    with pytest.raises(HardyError, match="most_rows has no effect with engine 'sequential'"):
        experiment(admission=Admission(most_rows=5))
    assert experiment(admission=Admission(most_rows=5), engine=FLOWER).admission.for_network(3).largest_share == 2 / 3
    shares = {count: Admission().for_network(count).largest_share for count in (1, 2, 4, 100)}
    assert shares == {1: 1.0, 2: 1.0, 4: 0.5, 100: 0.5}


def test_a_reply_is_looked_for_when_its_node_has_sent_something(clock):
    """Every look is a request: with fifty nodes most would find nothing."""
    sent = {7: 0}
    roll = Membership(grid=None, experiment="", clients=1, heard=lambda node: sent[node])
    assert roll.due(7, "first") and not roll.due(7, "first")
    assert roll.due(7, "second")  # another message
    sent[7] = 5
    assert roll.due(7, "second") and not roll.due(7, "second")
    clock.now += 5.1
    assert roll.due(7, "second")  # Flower itself may have ended it
    assert Membership(grid=None, experiment="", clients=1).due(7, "a") is True
