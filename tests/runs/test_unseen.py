"""Domains that are held out: nobody trains on them, and a new client's network is measured there."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import hardy
from conftest import experiment, federation, fit, net, shortened
from hardy import papers
from hardy.config import DataChoice
from hardy.core.engine import Branches
from hardy.errors import HardyError
from hardy.report.compare import compare, seeds_summary
from hardy.runs.unseen import held_out_accuracy

SHORT = ["rounds=2", "data.limit=40", "model={name='tiny_cnn',width=0.25}", "engine.device=cpu", "evaluation.every=1"]


def read(*words):
    return hardy.read("demo", [*SHORT, *words])


def test_nobody_trains_on_a_held_out_domain_and_all_figures_are_told(tmp_path):
    run = hardy.fit(
        read("data.held_out=['mail']", "evaluation.threats=['fgsm']", "evaluation.checks=false"),
        out=tmp_path / "run",
        quiet=True,
    )
    data = run.engine.data
    (away,) = data.held_out
    assert away.domain == "mail" and "mail" not in {client.domain for client in data.clients}
    dealt = np.concatenate([np.concatenate([c.train, c.validation]) for c in data.clients])
    assert not set(dealt) & set(away.train) and not set(np.concatenate([c.test for c in data.clients])) & set(away.test)
    whole = hardy.runs.prepare.prepare(read())
    own = next(i for i, c in enumerate(whole.engine.data.clients) if c.domain == "mail")
    assert np.array_equal(data.x_test[away.test][:5], whole.engine.data.x_test[whole.engine.data.clients[own].test][:5])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    clean, robust = summary["standard_accuracy"], summary["robust_accuracy"]["fgsm"]
    assert lines[-1]["standard_accuracy"]["held_out"] == clean["held_out"] and clean["held_out"].keys() == {"mail"}
    assert 0 <= robust["held_out"]["mail"] <= clean["held_out"]["mail"] and "mail" not in clean["by_domain"]
    share = clean["held_out"]["mail"]
    assert clean["held_out_error"]["mail"] == pytest.approx((share * (1 - share) / len(away.test)) ** 0.5)
    assert "mail (held out)" in (tmp_path / "run" / "report.html").read_text()
    assert "mail, held out %" in str(compare([tmp_path / "run"]))
    assert seeds_summary([tmp_path / "run"])["robust_accuracy"]["fgsm"]["held_out"] == robust["held_out"]
    again = hardy.evaluate(hardy.load(tmp_path / "run"), "fgsm", quiet=True)
    assert again["robust_accuracy"]["fgsm"]["held_out"] == robust["held_out"]


@pytest.mark.parametrize("test", ["false", "true"])
def test_devices_of_clients_leave_a_held_out_domain_as_it_is(test):
    """Shifted rows are laid out anew: the domain's own must be found there."""
    plain = hardy.runs.prepare.prepare(read("data.held_out=['mail']")).engine.data
    moved = read("data.held_out=['mail']", "data.shift=camera", f"data.shift_test={test}")
    moved = hardy.runs.prepare.prepare(moved).engine.data
    (before,), (after,) = plain.held_out, moved.held_out
    for part in ("train", "test"):
        first, second = getattr(before, part), getattr(after, part)
        for held in ("x", "y"):
            assert np.array_equal(getattr(plain, f"{held}_{part}")[first], getattr(moved, f"{held}_{part}")[second]), (
                part
            )


@pytest.mark.parametrize("statistics", ["average", "images"])
def test_the_network_is_that_of_a_new_client(statistics):
    run = hardy.fit(read("data.held_out=['mail']", f"data.held_out_statistics={statistics}"), quiet=True)
    (away,) = run.engine.data.held_out
    x = torch.from_numpy(run.engine.data.x_train[away.train]) if statistics == "images" else None
    served = run.network_for_new_client(statistics, images=x)
    x, y = run.engine.data.x_test[away.test], run.engine.data.y_test[away.test]
    answers = served(torch.from_numpy(x).float() / 255).argmax(1).numpy()
    assert run.figures.latest["held_out"]["mail"] == pytest.approx((answers == y).mean(), abs=0.004)


@pytest.mark.parametrize("method", [papers.fedrbn(), papers.split_mix(width=0.25), papers.fedavg(), papers.fedwon()])
def test_dual_norms_ensembles_and_networks_without_norms(method):
    data = federation()
    away = replace(data.clients[0], domain="away")
    run = fit(shortened(method), data=replace(data, clients=data.clients[1:], held_out=(away,)), rounds=1)
    found = held_out_accuracy(run.engine, run.state, Branches(), "average")
    threat = hardy.attacks.threats.parse_threat("pgd-2@64/255")
    under = held_out_accuracy(run.engine, run.state, Branches(), "average", threat)
    assert 0 <= under["held_out"]["away"] <= found["held_out"]["away"] <= 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.held_out=['svhn']"], "unknown domain in data.held_out 'svhn'"),
        (["data.held_out=['pen','mail','print','house','street']"], "nobody is left|unknown domain"),
        (["data.held_out_statistics=images"], "no effect without data.held_out"),
        (["data.held_out=['mail']", "method=local_only"], "shares no network"),
        (["data.held_out=['mail']", "data.held_out_statistics=images", "method=fedwon"], "has no statistics"),
    ],
)
def test_mistakes_are_named(words, said):
    with pytest.raises(HardyError, match=said):
        hardy.runs.prepare.prepare(read(*words))


def test_all_domains_held_out_leave_nobody():
    names = sorted({c.domain for c in hardy.runs.prepare.prepare(read()).engine.data.clients})
    with pytest.raises(HardyError, match="nobody is left to train"):
        hardy.runs.prepare.prepare(read(f"data.held_out={names}"))


def test_a_federation_that_is_given_has_its_own():
    with pytest.raises(HardyError, match="federation that is given"):
        hardy.runs.prepare.prepare(
            experiment(data=DataChoice(held_out=("even",))), method=papers.fedavg(), model=net, data=federation()
        )
