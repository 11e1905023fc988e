"""The gate bounds a reply by the others', a client by its share, and the state by what is finite."""

import dataclasses
from itertools import product

import numpy as np
import pytest
import torch

import hardy
from conftest import everything, experiment, federation, fit, net, with_momentum
from hardy import papers
from hardy.core.admission import Admission
from hardy.core.engine import Trains
from hardy.core.lengths import median_lengths, remembered_lengths, too_long, usual_lengths
from hardy.core.server import PipelinedServer, Server
from hardy.core.training import Training
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.faults.injection import Faults
from hardy.parts.aggregators.base import Mean
from hardy.runs.prepare import prepare

SIX = (8, 12, 16, 8, 20, 12)
FLOAT32 = EngineChoice(name="sequential", device="cpu", precision="float32")


class Lying(Trains):
    """An engine of which one client's reply is another in one round."""

    def __init__(self, engine, client, turn, change):
        self.engine, self.client, self.turn, self.change = engine, client, turn, change

    def expect(self, round_number, slots):
        pass

    def train(self, work):
        for updates in self.engine.train(work):
            if work.round == self.turn and updates.slots[0].client == self.client:
                updates = dataclasses.replace(updates, **self.change(updates))
            yield updates


def filled(value, kind="shared"):
    return lambda u: {kind: {n: torch.full_like(t, value) for n, t in getattr(u, kind).items()}}


@dataclasses.dataclass(frozen=True)
class _Without(Faults):
    client: int = 0
    turn: int = 0

    def sample_faults(self, seed, round, cohort):
        return {self.client: "dropped"} if round == self.turn else {}


def rounds(kind=Server, *, method=None, lie=None, count=4, **changes):
    method = with_momentum(method or papers.fedavg())
    run = prepare(experiment(engine=FLOAT32, **changes), method=method, model=net, data=federation(sizes=SIX))
    server = kind(**{f.name: getattr(run.server, f.name) for f in dataclasses.fields(Server)})
    engine, lines = Lying(run.engine, *lie) if lie else run.engine, []
    for _ in range(count):
        run.state, line = server.round(run.state, engine, 0.1)
        lines.append(line)
    return run, lines


@pytest.mark.parametrize("turn", [0, 2])
@pytest.mark.parametrize("kind", [Server, PipelinedServer])
def test_one_of_six_sends_1e17_once(kind, turn):
    """Refused, and the run goes on, bit for bit, as if the client had been away in that round."""
    run, lines = rounds(kind, lie=(3, turn, filled(1e17)))
    absent, _ = rounds(faults=_Without(client=3, turn=turn))
    assert lines[turn]["lost"].keys() == {"3"} and "times as long as usual, limit 100" in lines[turn]["lost"]["3"]
    assert [line["lost"] for at, line in enumerate(lines) if at != turn] == [{}] * 3
    for name, tensor in everything(absent).items():
        assert torch.equal(tensor, everything(run)[name]), name
    for group, past in absent.state.lengths.items():
        assert torch.equal(past, run.state.lengths[group])


@pytest.mark.parametrize("method", [papers.fedrbn(), papers.scaffold(), papers.fbn()], ids=lambda m: m.name)
@pytest.mark.parametrize("kind", ["shared", "reported"])
def test_statistics_and_control_variates_are_bounded_too(method, kind):
    if kind == "reported" and method.name != "fedrbn":
        pytest.skip("reports nothing")
    run, lines = rounds(method=method, lie=(3, 1, filled(1e6, kind)), count=2)
    assert lines[1]["lost"].keys() == {"3"}
    assert all(t.abs().max() < 1e5 for t in run.state.shared.values())


def test_honest_clients_of_unlike_sizes_pass():
    sizes = (4, 4, 4, 4, 400)
    run = prepare(
        experiment(engine=FLOAT32, training=Training(rate=0.1, batch=4, epochs=3)),
        method=papers.fedavg(),
        model=net,
        data=federation(sizes=sizes),
    )
    for _ in range(2):
        run.state, line = run.server.round(run.state, run.engine, 0.1)
        assert line["lost"] == {}


def test_the_running_median():
    history = {}
    for length in (3.0, 1.0, 2.0, 9.0):
        history = remembered_lengths(history, {"weights": length})
    assert usual_lengths(history) == {"weights": 2.0}  # the lower of the two middle ones of 1 2 3 9
    for length in range(10, 18):
        history = remembered_lengths(history, {"weights": float(length)})
    assert history["weights"].tolist() == [10, 11, 12, 13, 14, 15, 16, 17] and usual_lengths(history)["weights"] == 13
    assert median_lengths({"means": [0.0, float("nan"), float("inf")], "weights": [0.0, 5.0]}) == {"weights": 5.0}


def test_a_short_change_is_never_too_long():
    """Where the others have stopped to move, one that moves by less than a tenth of the model is not refused."""
    assert too_long({"weights": 1.0, "near": 2.0}, {"weights": 1e-9}, 100.0, 0.1) is None
    assert "1e+09 times" in too_long({"weights": 1.0, "near": 0.5}, {"weights": 1e-9}, 100.0, 0.1)


def test_what_is_usual_is_resumed(tmp_path):
    data, method = federation(sizes=SIX), papers.fedavg()
    whole = fit(method, data=data, out=tmp_path / "whole")
    assert whole.state.lengths["weights"].count_nonzero() == 4
    again = hardy.load(tmp_path / "whole", method=with_momentum(method), model=net, data=data)
    assert again.state.lengths.keys() == whole.state.lengths.keys()
    for group, past in whole.state.lengths.items():
        assert torch.equal(past, again.state.lengths[group])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Overflowing(Mean):
    def finish(self, folded, context, memory):
        shared, memory = super().finish(folded, context, memory)
        return {n: t * float("inf") if context.round == 1 else t for n, t in shared.items()}, memory


@pytest.mark.parametrize("kind", [Server, PipelinedServer])
def test_a_state_that_is_not_finite_is_never_the_next_one(kind):
    method = papers.fedavg().replace(aggregator=_Overflowing())
    before, _ = rounds(kind, method=method, count=1)
    run, lines = rounds(kind, method=method, lie=(3, 1, lambda u: {"shared": {n: 3 * t for n, t in u.shared.items()}}))
    after, _ = rounds(
        kind, method=method, lie=(3, 1, lambda u: {"shared": {n: 3 * t for n, t in u.shared.items()}}), count=2
    )
    for name, tensor in before.state.shared.items():
        assert torch.equal(tensor, after.state.shared[name]) and run.state.shared[name].isfinite().all()
    assert lines[1]["loss"] is None and lines[1]["bytes_up"] == 0 and len(lines[1]["lost"]) == 6
    assert lines[1]["lost"]["0"].startswith(
        "refused: the round's result was not finite; the longest reply was client 3's"
    )
    assert run.state.round == 4 and lines[2]["lost"] == {}


@pytest.mark.parametrize(
    ("rows", "share", "weight"),
    [
        ((10, 10, 80), 0.5, 20.0),  # 20 of 40
        ((10, 20, 80), 0.5, 30.0),  # 30 of 60
        ((10, 50, 60), 0.4, 20.0),  # both large ones: 20 of 50
        ((10, 10, 10), 1 / 3, float("inf")),
        ((5, 7, 9), 1 / 3, 5.0),
        ((1, 10**6), 1.0, float("inf")),
    ],
)
def test_the_largest_weight(rows, share, weight):
    found = Admission(largest_share=share).largest_weight(rows)
    assert found == pytest.approx(weight)
    counted = [min(r, found) for r in rows]
    assert max(counted) <= share * sum(counted) * (1 + 1e-12)


def test_a_share_is_a_weight_in_the_mean():
    """Client 4 holds 20 of 76 rows; with a share of 0.2 it counts as 14 of 70."""
    run = prepare(
        experiment(engine=FLOAT32, admission=Admission(largest_share=0.2, largest_ratio=float("inf"))),
        method=papers.fedavg(),
        model=net,
        data=federation(sizes=(12, 14, 14, 16, 20)),
    )

    def numbered(updates):
        client = updates.slots[0].client
        return {"shared": {n: torch.full_like(t, float(client)) for n, t in updates.shared.items()}}

    class Numbered(Trains):
        def train(self, work):
            for updates in run.engine.train(work):
                yield dataclasses.replace(updates, **numbered(updates))

    state, _ = run.server.round(run.state, Numbered(), 0.1)
    rows = np.array([12, 14, 14, 16, 20])
    capped = np.minimum(rows, run.server.admission.largest_weight(rows.tolist()))
    assert capped.max() / capped.sum() == pytest.approx(0.2)
    expected = float((capped * np.arange(5)).sum() / capped.sum())
    assert state.shared["conv1.weight"].mean().item() == pytest.approx(expected, rel=1e-6)


def test_a_share_nobody_can_keep_to_is_refused():
    with pytest.raises(
        HardyError, match=r"largest_share is 0\.2, but there are 4 clients, so that one has 0\.25 or more"
    ):
        fit(papers.fedavg(), admission=Admission(largest_share=0.2))
    for key, value in {"largest_share": 0.0, "largest_ratio": 1.0, "most_rows": 0}.items():
        with pytest.raises(HardyError, match=f"admission.{key} is"):
            Admission(**{key: value})


def test_local_steps_are_counted_without_making_the_batches():
    for count, batch, remainder, epochs, replays in product(
        (1, 2, 7, 8, 9, 33), (1, 4, 8), ("keep", "drop", "wrap"), (1, 3), (1, 2)
    ):
        training = Training(batch=batch, remainder=remainder, epochs=epochs, replays=replays)
        made = training.batches(np.arange(count), np.random.default_rng(0), 0)
        assert training.local_steps(count, 0) == len(made)
    assert Training(batch=32).local_steps(10**15, 0) == 10**15 // 32  # at once, and without memory
