"""What must hold for every optimiser, server update and diagnosis of the registry, whoever writes it."""

import inspect

import pytest

import hardy
from conftest import assert_close, everything, federation, fit, net, with_momentum
from hardy import papers
from hardy.config import EvaluationChoice
from hardy.engines import EngineChoice
from hardy.parts.aggregators.base import pipeline
from hardy.parts.optimisers import Chain, chain, clip, sgd
from hardy.registry import PARTS

VECTORISED = EngineChoice(name="vectorised", device="cpu", precision="float64", lane=3)


def example(factory):
    usual = {"norm": 1.0, "deviation": 0.01}
    if factory is Chain:
        return chain(clip(norm=1.0), sgd(momentum=0.5))
    return factory(**{name: value for name, value in usual.items() if name in inspect.signature(factory).parameters})


def with_optimiser(name):
    if name == "control":  # it comes with a rule for its variates
        return papers.scaffold()
    made = example(PARTS["optimiser"][name])
    return papers.fedbn(optimiser=made if made.makes_step else chain(made, sgd()))


METHODS = {f"optimiser {name}": with_optimiser(name) for name in PARTS["optimiser"]} | {
    f"server update {name}": papers.fedavg().replace(aggregator=pipeline(post=(example(update),)))
    for name, update in PARTS["server_update"].items()
}


@pytest.mark.parametrize("name", METHODS)
def test_engines_agree_and_resuming_is_exact(name, tmp_path):
    method, data = with_momentum(METHODS[name]), federation()
    one, many = fit(method, data=data, rounds=3), fit(method, data=data, rounds=3, engine=VECTORISED)
    assert_close(everything(one), everything(many), 1e-7)  # Adam divides by moments that are nearly 0
    fit(method, data=data, rounds=2, out=tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 3"))
    resumed = hardy.resume(tmp_path / "run", method=method, model=net, data=data, quiet=True)
    assert_close(everything(one), everything(resumed), 0)


@pytest.mark.parametrize("name", PARTS["diagnosis"])
def test_diagnoses_agree_on_all_engines(name):
    choice = EvaluationChoice(diagnosis=(PARTS["diagnosis"][name](),))
    one, many = (
        fit(papers.fedrobust(), rounds=1, evaluation=choice, **engine) for engine in ({}, {"engine": VECTORISED})
    )
    new = one.last_line.keys() - fit(papers.fedrobust(), rounds=1).last_line.keys()
    assert new
    for key in (key for key in new if isinstance(one.last_line[key], float)):
        assert one.last_line[key] == pytest.approx(many.last_line[key], rel=1e-6)
