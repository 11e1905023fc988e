"""Backdoors: who trains on what, and how success is measured."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from conftest import federation, fit
from hardy import config, papers
from hardy.core.federation import Client, Federation
from hardy.errors import HardyError
from hardy.faults.backdoors import backdoor, blended, edge_case, pixel_pattern, semantic
from hardy.faults.byzantine import AttackView
from hardy.faults.injection import Faults
from hardy.parts.aggregators.base import pipeline
from hardy.parts.aggregators.server_updates import gaussian_noise
from hardy.report.compare import compare
from hardy.report.run_page import write_report


def digits(dtype=np.uint8, clients=4, rows=12) -> Federation:
    """Grey pictures of five rows and columns, three classes in turn, two domains."""
    rng = np.random.default_rng(0)
    x = rng.integers(20, 200, (clients * rows, 1, 5, 5)).astype(np.uint8)
    x = x if dtype == np.uint8 else (x / 255).astype(np.float32)
    y = np.arange(clients * rows) % 3
    held = np.split(np.arange(clients * rows), clients)
    return Federation(
        name="digits",
        classes=("a", "b", "c"),
        x_train=x,
        y_train=y,
        x_test=x.copy(),
        y_test=y.copy(),
        clients=tuple(
            Client(domain="pen" if at < 2 else "mail", train=own, validation=own[:0], test=own)
            for at, own in enumerate(held)
        ),
    )


def spoilt(data, attack, hostile=(1, 3)):
    return Faults(hostile=hostile, byzantine=attack).add_hostile_clients(data, 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("trigger", [pixel_pattern(size=2), blended(strength=0.5)])
def test_a_share_of_the_hostile_rows_bears_the_trigger(trigger, dtype):
    data = digits(dtype)
    made = spoilt(data, backdoor(trigger=trigger, target=2, share=0.25))
    assert made.clients[0].train is data.clients[0].train and made.x_train.dtype == dtype
    for number in (1, 3):
        before, after = data.clients[number].train, made.clients[number].train
        changed = (made.x_train[after] != data.x_train[before]).any((1, 2, 3))
        assert changed.sum() == 3  # a quarter of twelve
        assert (made.y_train[after][changed] == 2).all()
        assert (made.y_train[after][~changed] == data.y_train[before][~changed]).all()
        assert (made.x_train[after][changed] == trigger.stamp(data.x_train[before][changed])).all()
    for before, after in zip(data.clients, made.clients, strict=True):
        others = before.test[data.y_test[before.test] != 2]
        assert (made.x_test[after.triggered] == trigger.stamp(data.x_test[others])).all()
        assert (made.y_test[after.triggered] == 2).all() and len(after.triggered) == 8
        assert np.array_equal(after.test, before.test)


def test_stamps_by_hand():
    grey = np.full((1, 1, 3, 3), 100, np.uint8)
    whole = pixel_pattern(size=2, pieces=2).stamp(grey)[0, 0]
    assert whole.tolist() == [[100, 100, 100], [100, 255, 0], [100, 0, 255]]
    pieces = [pixel_pattern(size=2, pieces=2).stamp(grey, piece)[0, 0].tolist() for piece in range(3)]
    assert pieces[0] == pieces[2] == [[100, 100, 100], [100, 255, 100], [100, 0, 100]]
    assert pieces[1] == [[100, 100, 100], [100, 100, 0], [100, 100, 255]]
    pattern = blended(strength=1.0).stamp(grey)
    half = blended(strength=0.5).stamp(grey)
    assert np.abs(half.astype(float) - (pattern.astype(float) + 100) / 2).max() <= 1
    assert (grey == 100).all()


def test_a_semantic_backdoor_is_a_class_of_a_domain():
    data = digits()
    made = spoilt(data, backdoor(trigger=semantic(domain="pen", label=1), target=2, share=0.5), hostile=(3,))
    pool = {data.x_train[row].tobytes() for row in range(24) if data.y_train[row] == 1}
    own = made.clients[3].train
    taken = [row for row in own if made.x_train[row].tobytes() in pool]
    assert len(taken) == 6 and (made.y_train[taken] == 2).all()
    assert [len(client.triggered) for client in made.clients] == [4, 4, 0, 0]
    assert (made.y_test[made.clients[0].triggered] == 2).all()


def test_edge_cases_are_the_tail_of_a_class():
    data = digits()
    made = spoilt(data, backdoor(trigger=edge_case(label=0, tail=0.25), target=1), hostile=(0,))
    of_class = data.x_train[data.y_train == 0].astype(float)
    away = np.linalg.norm((of_class - of_class.mean(0)).reshape(len(of_class), -1), axis=1)
    furthest = {row.astype(np.uint8).tobytes() for row in of_class[np.argsort(-away)[:4]]}
    tested = np.concatenate([client.triggered for client in made.clients])
    assert {made.x_test[row].tobytes() for row in tested} == furthest
    taken = [row for row in made.clients[0].train if made.x_train[row].tobytes() in furthest]
    assert len(taken) >= 6 and (made.y_train[[r for r in taken if r >= len(data.y_train)]] == 1).sum() >= 6


def test_model_replacement_multiplies_changes_of_weights_alone():
    def numbers(*values):
        return torch.tensor([values]).double()

    view = AttackView(numbers(3.0), numbers(1.0), numbers(1.0), numbers(1.0))
    assert backdoor(boost=5.0).craft_reply(view).tolist() == [[11.0]]
    assert backdoor(boost=5.0).craft_reply(view._replace(statistic=True)).tolist() == [[3.0]]


def test_success_stands_beside_accuracy(tmp_path):
    attack = backdoor(trigger=pixel_pattern(size=2), target=1, share=0.5)
    run = fit(papers.fedavg(), data=federation(), faults=Faults(hostile=(1, 2), byzantine=attack), out=tmp_path / "bad")
    found = json.loads((tmp_path / "bad" / "summary.json").read_text())["metrics"]["backdoor_success"]
    assert found["better"] == "lower" and found["round"] == 4 and found["missing"] == []
    known = [value for value in found["by_client"] if value is not None]
    assert found["worst_client"] == max(known) and found["mean"] == pytest.approx(np.mean(known))
    assert found["images"] == sum(len(client.triggered) for client in run.engine.data.clients) > 0
    assert run.history[0]["metrics/backdoor_success/mean"] >= 0
    assert "backdoor_success" in write_report(tmp_path / "bad").read_text()
    assert "backdoor_success" in str(compare([tmp_path / "bad"]))
    honest = fit(papers.fedavg(), rounds=1)
    assert not honest.summary()["metrics"]


def test_noise_is_the_same_again_and_of_its_size():
    rule = pipeline(post=(gaussian_noise(deviation=0.5),))
    one, other = (fit(papers.fedavg().replace(aggregator=rule), rounds=2).state.shared for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    update, zeros = gaussian_noise(deviation=0.5), {"w": torch.zeros(200, 50)}
    first, memory = update.apply(zeros, zeros, update.memory(zeros))
    second, _ = update.apply(zeros, zeros, memory)
    assert first["w"].std() == pytest.approx(0.5, rel=0.02) and not torch.equal(first["w"], second["w"])


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: backdoor(share=0.0), "share is 0.0"),
        (lambda: backdoor(boost=float("inf")), "boost is inf"),
        (lambda: backdoor(trigger=semantic(domain="pen", label=0)), "target is 0, the class that"),
        (lambda: pixel_pattern(size=2, pieces=3), "pieces from 1 to size"),
        (lambda: blended(strength=0.0), "strength"),
        (lambda: edge_case(label=1, tail=1.0), "tail"),
        (lambda: gaussian_noise(deviation=0.0), "deviation"),
        (lambda: spoilt(digits(), backdoor(target=9)), "target is 9; there are 3 classes"),
        (lambda: spoilt(digits(), backdoor(trigger=pixel_pattern(size=6))), "larger than the images, 5 x 5"),
        (lambda: spoilt(digits(), backdoor(trigger=semantic(domain="pan", label=1))), "pan.*pen"),
        (lambda: spoilt(digits(), backdoor(trigger=semantic(domain="pen", label=7))), "no training row bears"),
        (lambda: spoilt(vectors(), backdoor()), "vectors of 25 features"),
    ],
)
def test_what_cannot_work_is_refused(make, words):
    with pytest.raises(HardyError, match=words):
        make()


def vectors():
    data = digits(np.float32)
    return dataclasses.replace(data, x_train=data.x_train.reshape(-1, 25), x_test=data.x_test.reshape(-1, 25))


def test_written_in_toml():
    text = """
[faults]
hostile = [1, 6]
byzantine = { name = "backdoor", trigger = { name = "pixel_pattern", pieces = 2 }, target = 3, boost = 10.0 }
"""
    expected = backdoor(trigger=pixel_pattern(pieces=2), target=3, boost=10.0)
    made = config.parse(text)
    assert made.faults.byzantine == expected and config.parse(made.to_toml()).faults == made.faults
