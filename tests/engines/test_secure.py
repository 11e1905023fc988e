"""Secure aggregation: the numbers are those of the open round, and the server is sent nothing but masked vectors."""

import dataclasses
from math import inf

import numpy as np
import pytest
import torch

from conftest import assert_close, experiment, federation, fit, net
from hardy import papers
from hardy.config import EvaluationChoice, NetworkChoice
from hardy.core.admission import Admission
from hardy.core.cohort import Cohort
from hardy.core.messages import Updates
from hardy.engines.sequential import Sequential
from hardy.errors import HardyError

pytest.importorskip("flwr", reason="the flower extra is not installed")
pytest.importorskip("cryptography", reason="the flower extra is not installed")

from test_flower import Grid, grid_of, run_over

from hardy.flower import wire
from hardy.flower.masking import decode, encode
from hardy.parts.aggregators.base import mean, pipeline
from hardy.parts.aggregators.client_privacy import client_level_dp
from hardy.parts.aggregators.robust import trimmed_mean
from hardy.parts.aggregators.server_updates import server_momentum
from hardy.parts.aggregators.stages import clipping
from hardy.parts.compression import top_k
from hardy.parts.norms import group


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    monkeypatch.setattr(Grid, "state", tmp_path / "nodes")


SECURE = NetworkChoice(clients=5, deadline=2.0, secure=True)
SIZES = (6, 9, 12, 7, 8)


def secure(grid, method, **changes):
    return run_over(grid, method, **{"network": SECURE, "rounds": 2, **changes})


class Recording(Grid):
    """Keeps the stage of every question; a node in `leaves` is gone from a stage of a round on."""

    def __init__(self, apps, leaves=None):
        super().__init__(apps)
        self.leaves, self.heard = leaves or {}, []

    def pull_messages(self, numbers):
        kept = []
        for number in numbers:
            message = self.waiting.get(number)
            asked = wire.settings(message.content) if message is not None else {}
            when = (int(asked.get("round", -1)), asked.get("stage"))
            left = self.leaves.get(message.metadata.dst_node_id) if message is not None else None
            if left == when:
                self.apps.pop(message.metadata.dst_node_id, None)
            found = super().pull_messages([number])
            self.heard += [(when, reply) for reply in found]
            kept += found
        return kept


def recording(method, leaves=None):
    data = federation(sizes=SIZES)
    base = grid_of(method, data)
    return Recording(list(base.apps.values()), leaves)


METHODS = {
    "fedavg": papers.fedavg(),
    "fedbn": papers.fedbn(),
    "uniform mean and momentum": papers.fedavg(norm=group()).replace(
        aggregator=pipeline(rule=mean(weigh="uniform"), post=(server_momentum(),))
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_numbers_are_those_of_an_open_round(name):
    method = METHODS[name]
    near = fit(method, data=federation(sizes=SIZES), rounds=2, cohort=Cohort(fraction=0.8))
    far = secure(recording(method), method, cohort=Cohort(fraction=0.8))
    assert_close(near.state.shared, far.state.shared, 1e-8)
    assert_close(near.state.memory, far.state.memory, 1e-8)
    assert near.figures.lost == far.figures.lost == {}
    if "uniform" not in name:  # else the mean of the losses is uniform too
        assert near.last_line["loss"] == pytest.approx(far.last_line["loss"], abs=1e-8)


@pytest.mark.parametrize("stage", ["keys", "shares", "masked", "unmask"])
def test_a_node_that_leaves_in_mid_round(stage):
    """Whoever is gone before its vector came is not in the sum; after it, it is. All figures to the last bit."""
    method = papers.fedavg(norm=group())
    grid = recording(method, leaves={102: (0, stage)})
    far = secure(grid, method, rounds=1)
    stayed = [0, 1, 2, 3, 4] if stage == "unmask" else [0, 1, 3, 4]
    assert set(far.last_line["lost"]) == ({"2"} if stage != "unmask" else set())
    sent, replies = own_updates(method)
    total = sum(SIZES)
    exact = np.zeros(sum(t[0].numel() for t in sent.values()), np.uint64)
    for client in stayed:
        exact = exact + encode(SIZES[client] / total * replies[client])
    expected = decode(exact) / sum(SIZES[c] / total for c in stayed)
    found = np.concatenate([(far.state.shared[n][0] - sent[n][0]).flatten().numpy() for n in sorted(sent)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-15 + 2.0**-52 * 4)


def own_updates(method):
    """What was sent down in the first round, and the move of every client, in one row by the names of its tensors."""
    from conftest import with_momentum
    from hardy.runs.prepare import prepare

    run = prepare(experiment(rounds=1), method=with_momentum(method), model=net, data=federation(sizes=SIZES))
    assert isinstance(run.engine, Sequential)
    from hardy.core.messages import Slot, Work

    work = Work(
        round=0, rate=0.1, slots=[Slot(c) for c in range(5)], shared=run.state.shared, reported=run.state.reported
    )
    updates = Updates.join(list(run.engine.train(work)))
    rows = [
        np.concatenate(
            [(updates.shared[n][c] - run.state.shared[n][0]).flatten().numpy() for n in sorted(updates.shared)]
        )
        for c in range(5)
    ]
    return run.state.shared, rows


def test_the_server_is_sent_nothing_but_masked_vectors():
    """All that it receives in a round with a node lost in the middle, value by value."""
    method = papers.fedavg(norm=group())
    grid = recording(method, leaves={102: (0, "masked")})
    secure(grid, method, rounds=1)
    _, moves = own_updates(method)
    vectors, texts = [], []
    for (_, stage), reply in grid.heard:
        content = reply.content
        for name, record in content.array_records.items():
            arrays = wire.unpack_arrays(content, name)
            assert (stage, name, list(record), list(arrays)) == ("masked", "masked", ["tensors"], ["vector"])
            vectors.append(arrays["vector"])
        for name in content.metric_records:
            assert name == "accuracy" and stage is None  # figures of evaluation, which a site may keep
        for record in content.config_records.values():
            allowed = {"keys": {"share", "mask"}, "shares": {"sealed"}, "unmask": {"shares"}, None: {"profile"}}
            assert set(record) <= allowed.get(stage, set())
            texts += [one for value in record.values() for one in (value if isinstance(value, list) else [value])]
    assert len(vectors) == 4 and len(texts) > 4 * 5
    total = sum(SIZES)
    for vector in vectors:
        assert vector.dtype == np.uint64 and abs((vector >> np.uint64(63)).mean() - 0.5) < 0.1
        for client, move in enumerate(moves):
            own = encode(SIZES[client] / total * move)
            near = (vector[:-1] - own).view(np.int64).astype(float)
            assert np.abs(near).min() > 2.0**32  # not one number in the clear
    pairs = [(a, b) for at, a in enumerate(vectors) for b in vectors[at + 1 :]]
    partial = sum(vectors[:3], np.zeros_like(vectors[0]))
    for seen in (*(a + b for a, b in pairs), partial):  # nor in the sum of some
        assert np.abs(decode(seen)).mean() > 2.0**25


def test_a_server_that_tells_two_stories_learns_nothing():
    """It asks for the unmasking shares twice, with others lost: the second question is not answered."""
    method = papers.fedavg(norm=group())
    grid, twice = recording(method), []
    pull = grid.pull_messages

    def again(numbers):
        messages = [grid.waiting.get(n) for n in numbers]
        found = pull(numbers)
        for message in messages:
            if message is not None and wire.settings(message.content).get("stage") == "unmask":
                node = message.metadata.dst_node_id
                with pytest.raises(HardyError, match="keys that this node has not, or no longer"):
                    grid.apps[node](message, grid.contexts[node])
                twice.append(node)
        return found

    grid.pull_messages = again
    secure(grid, method, rounds=1)
    assert sorted(twice) == [100, 101, 102, 103, 104]


def test_too_few_clients_leave_the_network_as_it_was():
    method = papers.fedavg(norm=group())
    grid = recording(method, leaves=dict.fromkeys((101, 102), (0, "masked")))
    far = secure(grid, method, rounds=1)
    assert_close(far.engine.cast(far.server.start().shared), far.state.shared, 0)
    assert set(far.last_line["lost"]) == set("01234")
    assert any("3 clients are left, secure aggregation needs 4" in why for why in far.last_line["lost"].values())


def test_with_differential_privacy_nodes_clip_and_the_server_adds_noise():
    def private(noise):
        stage = client_level_dp(clip=0.05, noise=noise, delta=0.01, entropy="system")
        return papers.fedavg(norm=group()).replace(aggregator=pipeline(pre=(stage,), rule=mean()))

    open_gate = {"admission": Admission(largest_ratio=inf)}
    near = fit(private(0.0), data=federation(sizes=SIZES), rounds=2, **open_gate)
    far = secure(recording(private(0.0)), private(0.0), **open_gate)
    assert_close(near.state.shared, far.state.shared, 1e-8)
    loud = secure(recording(private(2.0)), private(2.0), rounds=1, **open_gate)
    still = secure(recording(private(0.0)), private(0.0), rounds=1, **open_gate)
    noise = torch.cat([(loud.state.shared[n] - t).flatten() for n, t in still.state.shared.items()])
    assert noise.std().item() == pytest.approx(0.05 * 2.0 / 5, rel=0.15)
    assert loud.summary()["privacy"][0]["epsilon"] > 0


def with_rule(rule, *stages):
    return papers.fedavg(norm=group()).replace(aggregator=pipeline(pre=stages, rule=rule))


OPEN = {"admission": Admission(largest_ratio=inf)}
REFUSED = {
    "TrimmedMean": (with_rule(trimmed_mean(f=1)), {}),
    "Clipping": (with_rule(mean(), clipping(radius=1.0)), {}),
    "looks at single updates. Usual fix: on": (
        with_rule(mean(), client_level_dp(clip=1.0, noise=0.1, delta=0.01, entropy="system", quantile=0.5)),
        OPEN,
    ),
    "reads one by one": (papers.fedrbn(), {}),
    "ByRole": (papers.scaffold(), {}),
    "budget": (papers.split_mix(), {}),
    "need single updates": (papers.fedavg(), {"evaluation": EvaluationChoice(drift=True)}),
    "a round asks 2 clients": (papers.fedavg(), {"cohort": Cohort(clients=2)}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_needs_more_than_a_sum_is_refused(why):
    method, changes = REFUSED[why]
    with pytest.raises(HardyError, match=why):
        secure(grid_of(method, federation(sizes=SIZES)), method, **changes)


def test_seeded_noise_is_refused_over_a_network():
    method = with_rule(mean(), client_level_dp(clip=1.0, noise=0.1, delta=0.01))
    with pytest.raises(HardyError, match="follows from the experiment's seed, which every node knows"):
        secure(grid_of(method, federation(sizes=SIZES)), method, **OPEN)


def test_compression_cannot_be_summed():
    with pytest.raises(HardyError, match="cannot be read in a masked sum"):
        NetworkChoice(secure=True, compression=top_k())


def test_a_node_does_not_send_in_the_open_what_was_to_be_masked(monkeypatch):
    from hardy.flower import apps

    method = papers.fedavg(norm=group())
    monkeypatch.setattr(apps, "SecureFlower", apps.Flower)
    grid = grid_of(method, federation(sizes=SIZES))
    with pytest.raises(HardyError, match="0 replies within 2 s"):
        secure(grid, method, rounds=1, network=dataclasses.replace(SECURE, patience=2.0))
    assert not any(reply.content.array_records for reply in grid.replies)
