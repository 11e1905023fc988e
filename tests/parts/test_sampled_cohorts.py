"""Cohorts that may hold a majority of liars: the chance of it, stages that remember, DnC."""

import dataclasses
import doctest
import itertools

import numpy as np
import pytest
import torch

import hardy
from conftest import everything, federation, fit, net, with_momentum
from hardy import papers
from hardy.core import cohort_odds as odds
from hardy.core.cohort import Cohort
from hardy.core.messages import Slot, Updates
from hardy.core.partition import Role
from hardy.core.protocols import RoundContext
from hardy.errors import HardyError
from hardy.faults.byzantine import sign_flipping
from hardy.faults.injection import Faults
from hardy.parts.aggregators import spectral
from hardy.parts.aggregators.base import pipeline
from hardy.parts.aggregators.memories import client_momentum, delayed_momentum
from hardy.parts.aggregators.robust import coordinate_median, trimmed_mean
from hardy.parts.aggregators.spectral import divide_and_conquer
from hardy.parts.aggregators.stages import clipping, nearest_neighbour_mixing


def updates(rows, clients, variances=None) -> Updates:
    count = len(rows)
    each = torch.ones(count, dtype=torch.float64)
    variances = [[1.0]] * count if variances is None else variances
    return Updates(
        slots=[Slot(client) for client in clients],
        shared={"w": torch.tensor(rows).double(), "var": torch.tensor(variances).double(), "n": torch.arange(count)},
        reported={},
        weights=each * 5,
        steps=each.long() * 3,
        loss=each,
    )


def context(sent=(0.0, 0.0), variance=1.0, clients=6, **changes) -> RoundContext:
    shared = {"w": torch.tensor([sent]).double(), "var": torch.tensor([[variance]]).double(), "n": torch.tensor([0])}
    roles = {"w": Role.WEIGHT, "var": Role.NORM_VAR, "n": Role.COUNTER}
    return RoundContext(shared=shared, roles=roles, bases=1, clients=clients, **changes)


@pytest.mark.parametrize("module", [odds, spectral])
def test_examples_in_docstrings(module):
    failed, tried = doctest.testmod(module)
    assert tried and not failed


@pytest.mark.parametrize("f, hostile, cohort, population", [(1, 3, 4, 9), (0, 2, 3, 8), (2, 5, 5, 9), (3, 3, 5, 9)])
def test_the_chance_is_a_count_of_cohorts(f, hostile, cohort, population):
    drawn = list(itertools.combinations(range(population), cohort))
    share = sum(sum(client < hostile for client in one) > f for one in drawn) / len(drawn)
    assert odds.chance_of_more(f, hostile, cohort, population) == pytest.approx(share, abs=1e-12)


def test_odds_of_a_rule():
    found = odds.cohort_odds(trimmed_mean(f=2), 10, 5, 50)
    assert found.named and found.chance == pytest.approx(0.0483, abs=1e-4) and found.majority == found.chance
    assumed = odds.cohort_odds(trimmed_mean(f=2), 0, 5, 50)
    assert not assumed.named and assumed.hostile == 20 and "If as large a share" in assumed.warning
    assert odds.cohort_odds(trimmed_mean(f=2), 0, 50, 50) is None
    assert odds.cohort_odds(coordinate_median(), 10, 5, 50) is None
    remembering = pipeline(pre=(delayed_momentum(),), rule=trimmed_mean(f=10))
    assert odds.cohort_odds(remembering, 10, 5, 50).chance == 0
    assert odds.cohort_odds(remembering, 11, 5, 50).chance == 1


def test_poisson_cohorts_have_a_binomial_chance():
    """Three of nine clients lie, each asked with a chance of 4/9: two or three are, 3 (4/9)² 5/9 + (4/9)³."""
    found = odds.cohort_odds(trimmed_mean(f=1), 3, 4, 9, "poisson")
    assert found.chance == pytest.approx(3 * (4 / 9) ** 2 * 5 / 9 + (4 / 9) ** 3, abs=1e-12)
    assert found.chance > odds.cohort_odds(trimmed_mean(f=1), 3, 4, 9).chance
    method = papers.fedavg().replace(aggregator=trimmed_mean(f=1))
    options = {"cohort": Cohort(clients=4, sampling="poisson"), "faults": Faults(hostile=3, byzantine=sign_flipping())}
    run = fit(method, data=federation(sizes=(6,) * 9), rounds=1, **options)
    assert run.summary()["cohort_odds"]["chance"] == found.chance
    many = odds.cohort_odds(trimmed_mean(f=400), 4000, 1000, 10_000, "poisson")
    assert 0.1 < many.chance < 0.6


def test_momentum_by_hand():
    stage = client_momentum(momentum=0.75)
    first, memory = stage.apply(updates([[1.0, 4.0]], [2], [[3.0]]), context(), stage.memory(context()))
    assert first.shared["w"].tolist() == [[1.0, 4.0]] and first.shared["var"].tolist() == [[3.0]]
    # x is now (10, 10): client 2 moved by (1, -4), client 4 by (2, 2); variances are values, not moves
    again = updates([[11.0, 6.0], [12.0, 12.0]], [2, 4], [[1.0], [0.5]])
    left, memory = stage.apply(again, context((10.0, 10.0), 0.1), memory)
    assert left.shared["w"].tolist() == [[10 + 0.75 * 1 + 0.25 * 1, 10 + 0.75 * 4 - 0.25 * 4], [12.0, 12.0]]
    assert left.shared["var"].tolist() == [[0.75 * 3 + 0.25 * 1], [0.5]]
    assert left.shared["n"].tolist() == [0, 1]
    assert [slot.client for slot in left.slots] == [2, 4]


def test_clients_that_were_not_asked_are_remembered():
    stage = delayed_momentum(momentum=0.5)
    _, memory = stage.apply(
        updates([[1.0, 0.0], [2.0, 0.0]], [3, 1], [[4.0], [9.0]]), context(), stage.memory(context())
    )
    left, memory = stage.apply(updates([[5.0, 8.0]], [0], [[2.0]]), context((5.0, 5.0), 0.1), memory)
    assert [slot.client for slot in left.slots] == [0, 1, 3]
    assert left.shared["w"].tolist() == [[5.0, 8.0], [7.0, 5.0], [6.0, 5.0]]
    assert left.shared["var"].tolist() == [[2.0], [9.0], [4.0]]  # not 0.1 − 6: it could fall below 0
    assert left.weights.tolist() == [5.0] * 3 and left.steps.tolist() == [3] * 3


def test_a_majority_of_a_cohort_is_none_of_all():
    """Two liars of six; both are in the second cohort of three."""
    rule = pipeline(pre=(delayed_momentum(),), rule=trimmed_mean(f=2))
    start = context()
    few, memory = rule.finish([updates([[1.0, 1.0]] * 3, [0, 1, 2])], start, rule.memory(start))
    assert torch.equal(few["w"], start.shared["w"]), "three of all have answered, five are needed"
    lying = updates([[1e6, 1e6], [1e6, 1e6], [1.0, 1.0]], [4, 5, 3])
    alone, _ = pipeline(rule=trimmed_mean(f=1)).finish([lying], start, {})
    assert alone["w"].max() > 1e5
    held, _ = rule.finish([lying], start, memory)
    torch.testing.assert_close(held["w"], torch.ones(1, 2).double())


def test_too_few_clients_to_remember_are_refused():
    method = papers.fedavg().replace(aggregator=pipeline(pre=(delayed_momentum(),), rule=trimmed_mean(f=2)))
    with pytest.raises(HardyError, match="sees all clients, and needs 5 or more, but there are 4"):
        fit(method, rounds=1)
    with pytest.raises(HardyError, match=r"momentum \(β\).*in \[0, 1\)"):
        client_momentum(momentum=1.0)


def test_clipping_around_the_last_move():
    stage = clipping(radius=2.0, around="last_move")
    first, memory = stage.apply(updates([[-7.0, 0.0]], [0], [[1.5]]), context(), stage.memory(context()))
    torch.testing.assert_close(first.shared["w"], torch.tensor([[-2.0, 0.0]]).double(), atol=0.01, rtol=0)
    moved = context((3.0, 0.0), 1.0)  # x went from 0 to (3, 0), so the centre is (6, 0); of the variance it is 1
    left, _ = stage.apply(updates([[-4.0, 0.0], [7.0, 0.0]], [0, 1], [[1.0], [1.0]]), moved, memory)
    torch.testing.assert_close(left.shared["w"], torch.tensor([[4.0, 0.0], [7.0, 0.0]]).double())


def naive_dnc(matrix, left_out):
    rows = matrix - matrix.mean(0)
    score = (rows @ np.linalg.svd(rows)[2][0]) ** 2
    return matrix[np.argsort(score)[: len(matrix) - left_out]].mean(0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("removed", [1.0, 1.5])
def test_divide_and_conquer_is_its_definition(seed, removed):
    matrix = np.random.default_rng(seed).normal(size=(9, 2))
    matrix[:2] += 4
    rule = divide_and_conquer(f=2, removed=removed)
    given = updates(matrix.tolist(), range(9))
    result, _ = rule.finish(
        [given.only(["w"])], dataclasses.replace(context(), shared={"w": context().shared["w"]}), {}
    )
    np.testing.assert_allclose(result["w"][0].numpy(), naive_dnc(matrix, int(np.ceil(removed * 2))), rtol=1e-6)


def test_divide_and_conquer_draws_coordinates_by_seed_and_round():
    rows = np.random.default_rng(0).normal(size=(9, 2)).tolist()
    rule = divide_and_conquer(f=1, coordinates=1, iterations=3)
    seen = {
        tuple(rule.finish([updates(rows, range(9))], context(round=number), {})[0]["w"].flatten().tolist())
        for number in range(8)
    }
    again = rule.finish([updates(rows, range(9))], context(round=3), {})[0]["w"]
    assert len(seen) > 1 and tuple(again.flatten().tolist()) in seen
    assert rule.min_updates == 4 and divide_and_conquer(f=3).min_updates == 7
    with pytest.raises(HardyError, match="coordinates and iterations must be 1 or more"):
        divide_and_conquer(f=1, iterations=0)


SIZES = (6, 7, 8, 5, 6, 7)


def test_a_run_tells_its_odds_and_its_hostile_clients(caplog):
    method = papers.fedavg().replace(aggregator=trimmed_mean(f=1))
    faults = Faults(hostile=3, byzantine=sign_flipping())
    run = fit(method, data=federation(sizes=SIZES), rounds=4, cohort=Cohort(clients=3), faults=faults)
    assert "50.0% of the rounds hold more" in caplog.text
    assert run.summary()["cohort_odds"]["chance"] == 0.5
    counted = [row["hostile_in_cohort"] for row in run.history]
    hostile = faults.hostile_clients(0, 6)
    assert counted == [len(hostile & set(Cohort(clients=3).sample(0, at, 6))) for at in range(4)]
    honest = fit(papers.fedavg(), rounds=1)
    assert "cohort_odds" not in honest.summary() and "hostile_in_cohort" not in honest.history[0]


@pytest.mark.parametrize(
    "stages", [(delayed_momentum(),), (client_momentum(), clipping(radius=0.5, around="last_move"))]
)
def test_what_is_remembered_is_resumed_bit_for_bit(tmp_path, stages):
    rule = pipeline(pre=(*stages, nearest_neighbour_mixing(f=1)), rule=trimmed_mean(f=1))
    method, data = papers.fedavg().replace(aggregator=rule), federation(sizes=SIZES)
    options = {"data": data, "cohort": Cohort(clients=4)}
    whole = fit(method, rounds=4, **options)
    fit(method, rounds=2, out=tmp_path, **options)
    settings = tmp_path / "config.toml"
    settings.write_text(settings.read_text().replace("rounds = 2", "rounds = 4"))
    resumed = hardy.resume(tmp_path, method=with_momentum(method), model=net, data=data, quiet=True)
    for name, tensor in everything(whole).items():
        assert torch.equal(tensor, everything(resumed)[name]), name


def test_the_report_shows_the_odds_and_the_rounds(tmp_path):
    method = papers.fedavg().replace(aggregator=trimmed_mean(f=1))
    options = {"data": federation(sizes=SIZES), "cohort": Cohort(clients=3), "rounds": 4}
    faults = Faults(hostile=3, byzantine=sign_flipping())
    run = fit(method, faults=faults, out=tmp_path / "hostile", **options)
    beyond = sum(row["hostile_in_cohort"] > 1 for row in run.history)
    page = (tmp_path / "hostile" / "report.html").read_text()
    assert "Hostile clients asked" in page and f"of the rounds; here in {beyond} of 4." in page
    fit(method, out=tmp_path / "honest", **options)
    page = (tmp_path / "honest" / "report.html").read_text()
    assert "if 2 of them hostile" in page and "Hostile clients asked" not in page
