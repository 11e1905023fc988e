"""What is printed of large objects fits on a screen, and says what one would ask."""

import pytest

from conftest import federation, fit
from hardy import papers
from hardy.registry import PARTS


def test_reprs_are_short_and_say_what_matters():
    run = fit(papers.fedbn(), rounds=1)
    expected = {
        "Run 'experiment': fedbn": run,
        "round 1 of 1": run,
        "accuracy": run,
        "rounds=1": run.experiment,
        "4 clients in 2 domains": run.engine.data,
        "norm       Local()": run.engine.plan.method,
        "private 8 tensors": run.engine.plan,
        "sequential engine on cpu, float64": run.engine,
        "after round 1: shared": run.state,
        "Predictor of client 1: width 1": run.customise(client=1),
    }
    for words, one in expected.items():
        assert words in repr(one), repr(one)
        assert len(repr(one)) < 500 and repr(one).count("\n") < 7


@pytest.mark.parametrize("name", sorted(PARTS["method"]))
def test_methods_are_short(name):
    assert len(repr(PARTS["method"][name]())) < 700


def test_many_clients_do_not_make_it_longer():
    assert len(repr(federation(sizes=(5,) * 200))) < 200
