"""One client of ten answers nonsense: it is refused with its reason, and the others get, bit for bit, what they get
when that client never answers. Every kind of nonsense with every aggregator."""

import dataclasses
import inspect
from functools import cache

import numpy as np
import pytest
import torch

from conftest import everything, experiment, federation, fit, net
from hardy import papers
from hardy.core.admission import Admission
from hardy.core.engine import Trains
from hardy.core.messages import Answer, Slot, Updates
from hardy.core.partition import Placement, Role
from hardy.core.training import Training
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.faults.injection import Faults
from hardy.papers.heterofl import corners
from hardy.parts.aggregators.base import pipeline
from hardy.parts.budgets import full
from hardy.parts.norms import BatchNormalisation
from hardy.registry import PARTS
from hardy.runs.prepare import prepare

BAD = 4
FLOAT32 = EngineChoice(name="sequential", device="cpu", precision="float32")


def filled(value):
    return lambda arrays: {n: np.full_like(a, value) if a.dtype.kind == "f" else a for n, a in arrays.items()}


def first(change):
    """Changes one array of floating numbers."""

    def changed(arrays):
        name = next(n for n, a in arrays.items() if a.dtype.kind == "f")
        return {**arrays, name: change(arrays[name])}

    return changed


def with_one(value):
    return first(lambda a: np.where(np.arange(a.size).reshape(a.shape) == a.size - 1, value, a).astype(a.dtype))


ARRAYS = {
    "all NaN": filled(np.nan),
    "one NaN": with_one(np.nan),
    "infinity": filled(np.inf),
    "one minus infinity": with_one(-np.inf),
    "1e38": filled(1e38),
    "renamed": lambda arrays: {n + "\n" * (n == min(arrays)): a for n, a in arrays.items()},
    "missing": lambda arrays: {n: a for n, a in arrays.items() if n != min(arrays)},
    "extra": lambda arrays: {**arrays, "payload": np.zeros(10**6)},
    "nothing": lambda arrays: {},
    "wrong shape": first(lambda a: a[:-1]),
    "one more axis": first(lambda a: a[None]),
    "oversize": first(lambda a: np.tile(a, (1000, *[1] * (a.ndim - 1)))),
    "double precision": first(lambda a: a.astype(np.float64)),
    "other byte order": first(lambda a: a.astype(">f4")),
    "whole numbers": first(lambda a: a.astype(np.int64)),
    "objects": first(lambda a: a.astype(object)),
    "text": first(lambda a: "weights"),
    "negative variance": lambda arrays: {n: -a if n.endswith(".var") else a for n, a in arrays.items()},
}
SPOILT = {name: (lambda a, change=change: {"shared": change(a.shared)}) for name, change in ARRAYS.items()}
FIGURES = {
    "examples": (10**12, -1000, 0, 21, float("nan"), float("inf"), 10**5000, "many", None),
    "steps": (0, -1, 10**9, 2.5, float("nan"), 10**5000, None),
    "loss": (float("nan"), float("inf"), -1.0, 10**5000, "low", None),
    "round": (-1, 1, float("nan"), 10**5000, "0", None),
}
for figure, values in FIGURES.items():
    for number, value in enumerate(values):
        SPOILT[f"{figure} {number}"] = lambda a, figure=figure, value=value: {figure: value}


def example(factory):
    usual = {"f": 1, "radius": 100.0, "size": 2, "share": 0.4}
    return factory(**{name: value for name, value in usual.items() if name in inspect.signature(factory).parameters})


RULES = {name: example(rule) for name, rule in PARTS["aggregator"].items() if name not in ("control_mean", "fltrust")}
STAGES = {name: stage for name, stage in PARTS["stage"].items() if name != "client_level_dp"}  # no shared statistics
RULES |= {f"pipeline({name})": pipeline(pre=(example(stage),)) for name, stage in STAGES.items()}


class Outside(Trains):
    """An engine whose clients are far away: what they once answered, changed on the way."""

    def __init__(self, run):
        self.answers, self.change = [], lambda answers: answers
        run.server.round(run.state, Recorder(run.engine, self.answers), 0.1)

    def train(self, work):
        yield self.change(self.answers)


class Recorder(Trains):
    def __init__(self, engine, answers):
        self.engine, self.answers = engine, answers

    def train(self, work):
        for updates in self.engine.train(work):
            for i, slot in enumerate(updates.slots):
                shared, reported = (
                    {n: t[i].numpy().copy() for n, t in held.items()} for held in (updates.shared, updates.reported)
                )
                count, steps, loss = (t[i].item() for t in (updates.weights, updates.steps, updates.loss))
                self.answers.append(
                    Answer(
                        slot=slot,
                        round=work.round,
                        shared=shared,
                        reported=reported,
                        examples=int(count),
                        steps=steps,
                        loss=loss,
                    )
                )
            yield updates


@cache
def answered(rule):
    """A run before its first round, and the answers of its ten clients."""
    budget = corners() if rule == "held_mean" else full()
    method = papers.fedavg().replace(aggregator=RULES[rule], budget=budget)
    data = federation(sizes=(8, 12, 16, 8, 20, 12, 8, 16, 12, 8))
    training = Training(rate=0.1, batch=4)
    run = prepare(experiment(engine=FLOAT32, training=training), method=method, model=net, data=data)
    return run, Outside(run)


def ended(run, outside, change, server=None):
    """Everything a round with these answers leaves behind, and its figures."""
    outside.change = change
    after, line = (server or run.server).round(run.state, outside, 0.1)
    return everything(dataclasses.replace(run, state=after)), line


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def without(client):
    return lambda answers: [answer for answer in answers if answer.slot.client != client]


def spoiling(name):
    def change(answers):
        return [dataclasses.replace(a, **SPOILT[name](a)) if a.slot.client == BAD else a for a in answers]

    return change


@pytest.mark.parametrize("rule", sorted(RULES))
def test_nonsense_is_refused_and_the_round_goes_on(rule):
    run, outside = answered(rule)
    expected, dropped = ended(run, outside, without(BAD))
    honest, _ = ended(run, outside, list)
    assert any(not torch.equal(honest[name], expected[name]) for name in expected), "the client would not be missed"
    for name in SPOILT:
        left, line = ended(run, outside, spoiling(name))
        assert_same(expected, left)
        assert line["lost"].keys() == {str(BAD)} and line["lost"][str(BAD)].startswith("refused: "), name
        assert len(line["lost"][str(BAD)]) < 200 and "\n" not in line["lost"][str(BAD)], name
        assert line["loss"] == dropped["loss"], name


def test_answers_give_what_an_engine_in_the_house_gives():
    run, outside = answered("mean")
    inside, _ = run.server.round(run.state, run.engine, 0.1)

    class OneByOne(Trains):
        def train(self, work):
            yield from ([answer] for answer in outside.answers)  # sums are rounded alike only if folded alike

    after, _ = run.server.round(run.state, OneByOne(), 0.1)
    assert_same(inside.shared, after.shared)


def test_reasons_hold_value_and_limit():
    run, outside = answered("mean")

    def reason(name):
        return ended(run, outside, spoiling(name))[1]["lost"][str(BAD)]

    assert reason("examples 0") == "refused: claims 1e+12 examples, must be above 0 and up to the 20 registered"
    assert reason("steps 2") == "refused: 1000000000 steps, must be a whole number from 1 to 5"
    assert reason("loss 2") == "refused: loss -1, must be a number from -0.001 to inf"
    assert reason("round 0") == "refused: belongs to round -1, now is 0"
    assert reason("all NaN") == "refused: not finite, or too large to be squared (length nan)"
    assert "lacks" in reason("renamed") and "adds" in reason("renamed") and "must hold the 1" in reason("renamed")
    assert "is float64, must be float32" in reason("double precision")
    assert "has shape [4000, " in reason("oversize") and ", must have [4, " in reason("oversize")
    assert reason("negative variance").startswith("refused: variance -")


@pytest.mark.parametrize("cut", [10, 12, 1])
def test_the_first_of_two_answers_counts(cut):
    """Whether they come in one message or in several."""
    run, outside = answered("mean")
    expected, _ = ended(run, outside, list)
    second = dataclasses.replace(outside.answers[BAD], shared=filled(7.0)(outside.answers[BAD].shared))
    answers = [*outside.answers[:8], second, *outside.answers[8:], second]

    class Cut(Trains):
        def train(self, work):
            yield from (answers[i : i + cut] for i in range(0, len(answers), cut))

    after, line = run.server.round(run.state, Cut(), 0.1)
    assert line["lost"] == {str(BAD): "refused: has answered already"}
    for name, tensor in after.shared.items():
        torch.testing.assert_close(tensor, expected[f"shared/{name}"])


def test_a_slot_nobody_asked_is_refused():
    run, outside = answered("mean")
    expected, _ = ended(run, outside, without(BAD))
    for slot in (Slot(99), Slot(-1), Slot(BAD, 1)):
        moved = [dataclasses.replace(a, slot=slot) if a.slot.client == BAD else a for a in outside.answers]
        left, line = ended(run, outside, lambda answers, moved=moved: moved)
        assert_same(expected, left)
        assert line["lost"] == {str(slot.client): "refused: was not asked"}


def test_a_round_without_a_good_answer_changes_nothing():
    run, outside = answered("mean")
    ruined = [dataclasses.replace(a, round=7) for a in outside.answers]
    for change in (lambda answers: ruined, lambda answers: []):
        after, line = ended(run, outside, change)
        assert_same(everything(run), after)
        assert line["loss"] is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reporting(BatchNormalisation):
    """Statistics that belong to the client and are reported."""

    def placement(self, tag):
        return Placement.SHARED if tag.role is Role.NORM_AFFINE else Placement.REPORTED


def test_reported_tensors_are_looked_at_too():
    run = prepare(experiment(engine=FLOAT32), method=papers.fedavg(norm=Reporting()), model=net, data=federation())
    outside = Outside(run)
    expected, _ = ended(run, outside, without(1))
    for name, change in ARRAYS.items():
        spoilt = [
            dataclasses.replace(a, reported=change(a.reported)) if a.slot.client == 1 else a for a in outside.answers
        ]
        left, line = ended(run, outside, lambda answers, spoilt=spoilt: spoilt)
        assert_same(expected, left)
        assert line["lost"].keys() == {"1"}, name


def test_odd_but_honest_numbers_are_admitted():
    """Denormals, minus zero and numbers whose sum overflows though each can be squared."""
    run, outside = answered("mean")
    for value in (1e-42, -0.0, 1e15):
        spoilt = [dataclasses.replace(a, shared=filled(value)(a.shared)) for a in outside.answers]
        positive = [
            dataclasses.replace(a, shared={n: abs(v) if n.endswith(".var") else v for n, v in a.shared.items()})
            for a in spoilt
        ]
        assert ended(run, outside, lambda answers, sent=positive: sent)[1]["lost"] == {}


def test_limits_of_the_user_hold():
    run, outside = answered("mean")
    steady = [float(a.loss) for a in outside.answers]
    limits = Admission(smallest_loss=sorted(steady)[2], largest_loss=sorted(steady)[-2], largest_update=1e3)
    _, line = ended(run, outside, list, dataclasses.replace(run.server, admission=limits))
    low, high = np.argsort(steady)[:2], np.argsort(steady)[-1:]
    assert {int(client) for client in line["lost"]} == {*low.tolist(), *high.tolist()}
    far = Admission(largest_update=1e-6)
    _, line = ended(run, outside, list, dataclasses.replace(run.server, admission=far))
    assert len(line["lost"]) == 10 and all("limit 1e-06" in reason for reason in line["lost"].values())


def test_stacked_updates_pass_the_same_checks():
    run, _ = answered("mean")
    for change in (
        lambda u: {"weights": u.weights.index_fill(0, torch.tensor(0), 1e9)},
        lambda u: {"loss": u.loss.index_fill(0, torch.tensor(0), -2.0)},
        lambda u: {"shared": {n: t.index_fill(0, torch.tensor(0), torch.inf) for n, t in u.shared.items()}},
    ):
        outer = run.engine

        class Spoiling(Trains):
            def train(self, work, change=change, outer=outer):
                honest = Updates.join(list(outer.train(work)))
                yield dataclasses.replace(honest, **change(honest))

        _, line = run.server.round(run.state, Spoiling(), 0.1)
        assert line["lost"].keys() == {"0"}


def test_a_run_of_which_nothing_can_be_counted_stops(tmp_path):
    strict = Admission(largest_update=1e-6)
    with pytest.raises(HardyError, match=r"last 10 rounds was refused \(round 10, client 0: .*1e-06"):
        fit(papers.fedavg(), rounds=12, admission=strict, out=tmp_path / "run")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 10
    silent = Faults(dropped=0.999)
    assert fit(papers.fedavg(), rounds=12, admission=strict, faults=silent).state.round == 12  # absent, not refused
