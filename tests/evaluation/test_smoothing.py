"""Certificates by randomised smoothing: bounds, votes, figures, and where they are shown."""

import json
import math
from dataclasses import replace
from statistics import NormalDist

import pytest
import torch

import hardy
from conftest import everything, federation, fit, shortened
from hardy import papers
from hardy.cli import main
from hardy.core import random
from hardy.core.engine import Branches
from hardy.errors import HardyError
from hardy.evaluation.measure import ServedClients
from hardy.evaluation.smoothing import (
    Smoothing,
    certified_figures,
    chance_bound,
    count_votes,
    incomplete_beta,
    parse_smoothing,
    row_radius,
)
from hardy.papers.fedbn import local
from hardy.report.compare import compare
from hardy.runs import evaluate as evaluating


@pytest.mark.parametrize(
    ("hits", "draws", "alpha", "wanted"),
    [
        (99, 100, 0.025, 0.945541),  # tables of Clopper and Pearson, two-sided 95 %
        (5, 10, 0.025, 0.187086),
        (1000, 1000, 0.001, 0.001 ** (1 / 1000)),  # all agree: α^(1/n)
        (1, 20, 0.05, 1 - 0.95 ** (1 / 20)),  # one hit: 1 − (1 − α)^(1/n)
        (0, 20, 0.05, 0.0),
    ],
)
def test_the_bound_is_that_of_clopper_and_pearson(hits, draws, alpha, wanted):
    assert chance_bound(hits, draws, alpha) == pytest.approx(wanted, abs=2e-6)


def test_the_incomplete_beta_is_a_binomial_tail():
    for draws, p in ((12, 0.3), (40, 0.9)):
        for hits in (1, draws // 2, draws):
            tail = sum(math.comb(draws, k) * p**k * (1 - p) ** (draws - k) for k in range(hits, draws + 1))
            assert incomplete_beta(hits, draws - hits + 1, p) == pytest.approx(tail, rel=1e-12)


def test_bounds_are_those_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    for draws in (20, 1000, 100_000):
        for hits in (1, draws // 2, round(0.9 * draws), draws):
            for alpha in (0.001, 0.05):
                wanted = stats.beta.ppf(alpha, hits, draws - hits + 1)
                assert chance_bound(hits, draws, alpha) == pytest.approx(wanted, abs=1e-9)


def test_a_linear_network_is_certified_to_its_true_radius(monkeypatch):
    """Of a linear classifier the smoothed network is the network itself: the distance to its boundary is the radius,
    and no certificate is larger but with chance α."""
    run = fit(papers.fedavg(), rounds=1)
    served = ServedClients(run.engine, run.state, "test", Branches())
    direction = torch.randn(8 * 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    direction /= direction.norm()

    def linear(net):
        def forward(x):
            away = x.flatten(1) @ direction - 0.5 * direction.sum()
            return torch.stack([away, -away, torch.full_like(away, -9.0)], 1)

        return forward

    monkeypatch.setattr(served, "predicting", linear)
    monkeypatch.setattr(served.engine, "data", replace(served.engine.data, bounded=False))
    smoothing, key = Smoothing(sigma=0.5, n=400), torch.tensor(3)
    first, votes = (count_votes(served, smoothing, *ends, key) for ends in ((0, 100), (100, 500)))
    assert all((own.sum(1) == 400).all() for own in votes)
    rows = torch.from_numpy(served.rows[0])
    x = served.engine.device_data.images("test", rows).flatten(1).double()
    true = (x @ direction - 0.5 * direction.sum()).abs()
    top = first[0].argmax(1)
    found = torch.tensor([row_radius(smoothing, int(row[c])) for row, c in zip(votes[0], top, strict=True)])
    assert (found <= true + 1e-9).all()
    near = (true > 0.2) & (true < 0.9)  # no radius of 400 copies goes beyond 1.06
    assert near.any() and (found[near] > 0.5 * true[near] - 0.1).all()


def test_figures_of_votes_by_hand():
    run = fit(papers.fedavg(), rounds=1)
    served = ServedClients(run.engine, run.state, "test", Branches(), limit=4)
    smoothing = Smoothing(sigma=0.5, n=100, alpha=0.01, radii=(0.0, 0.5))
    sure, split = torch.tensor([100, 0, 0]), torch.tensor([50, 50, 0])
    votes = []
    for labels in served.labels:
        rows = [torch.roll(sure, int(labels[0])), torch.roll(sure, int(labels[1]) + 1), split, split]
        votes.append(torch.stack(rows))  # right, wrong, and two that abstain
    found = certified_figures(served, smoothing, votes, votes, 7)
    assert found["abstained"] == 0.5 and found["round"] == 7
    assert found["largest_radius"] == pytest.approx(0.5 * NormalDist().inv_cdf(0.01 ** (1 / 100)))
    assert found["radii"]["0"]["mean"] == found["radii"]["0.5"]["mean"] == 0.25
    assert found["radii"]["0"]["images"] == 16 and found["curve"][-1][1] == 0.25
    assert found["average_radius"] == pytest.approx(found["largest_radius"] / 4)


METHODS = {
    "personal": papers.fedbn(),
    "dual": papers.fedrbn(),
    "ensemble": papers.split_mix(width=0.25),
    "recomputed": papers.fedavg(norm=local(inference_statistics="recomputed")),
}


@pytest.mark.parametrize("name", METHODS)
def test_personal_dual_and_ensemble_networks_are_certified(name):
    run = fit(shortened(METHODS[name]), rounds=1)
    found = hardy.evaluate(run, certify="sigma=0.1,n0=5,n=30,radii=0:0.1", checks=False, quiet=True)
    (one,) = found["certified_accuracy"].values()
    assert one["radii"]["0"]["mean"] >= one["radii"]["0.1"]["mean"]
    assert len(one["radii"]["0"]["by_client"]) == 4 and one["radii"]["0"]["by_domain"].keys() == {"even", "odd"}


def test_votes_are_those_of_the_network_on_copies_drawn_one_by_one():
    run = fit(papers.fedbn(), rounds=1)
    served = ServedClients(run.engine, run.state, "test", Branches(), limit=3)
    (counts,) = count_votes(served, Smoothing(sigma=0.3), 0, 6, torch.tensor(1))[:1]
    net = served.predicting(served.served.network(0))
    rows = torch.from_numpy(served.rows[0])
    x, wanted = served.engine.device_data.images("test", rows), torch.zeros(3, 3)
    key = random.fold(random.fold(torch.tensor(1), torch.tensor(0)), 0)
    for copy in range(6):
        noisy = x + 0.3 * random.normal(random.fold(key, copy), x.shape).to(x.dtype)
        wanted[torch.arange(3), net(noisy.clamp(0, 1)).argmax(1)] += 1
    assert torch.equal(counts.float(), wanted)


def test_a_stopped_certification_goes_on_and_ends_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluating, "BLOCK", 10)
    run = fit(papers.fedbn(), rounds=1, out=tmp_path / "run")
    options = {"certify": "sigma=0.1,n0=10,n=30", "checks": False, "quiet": True}
    before = everything(run)
    counted, calls = evaluating.count_votes, []

    def stops(served, smoothing, first, *rest):
        calls.append(first)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return counted(served, smoothing, first, *rest)

    monkeypatch.setattr(evaluating, "count_votes", stops)
    with pytest.raises(KeyboardInterrupt):
        hardy.evaluate(run, **options)
    found = hardy.evaluate(run, **options)["certified_accuracy"]
    assert calls == [0, 10, 20, 20, 30]
    monkeypatch.setattr(evaluating, "count_votes", counted)
    fresh = hardy.evaluate(fit(papers.fedbn(), rounds=1), **options)["certified_accuracy"]
    assert found == fresh
    stored = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert stored["certified_accuracy"] == found and not stored["unfinished"]
    assert all(torch.equal(t, before[n]) for n, t in everything(run).items())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (one,) = summary["certified_accuracy"].values()
    assert "curve" not in one and one["radii"].keys() == {"0", "0.1", "0.2"}
    assert "Certified accuracy" in (tmp_path / "run" / "report.html").read_text()
    assert "certified at L2 0.1, sigma=0.1" in str(compare([tmp_path / "run"]))


def test_the_command_certifies_and_noise_in_training_helps(tmp_path, capsys):
    folder = tmp_path / "run"
    short = ["demo", "rounds=2", "data.limit=40", "model={name='tiny_cnn',width=0.25}", "engine.device=cpu"]
    noise = "data.augmentation={name='pixel_noise',sigma=0.25}"
    assert main(["run", *short, noise, "--out", str(folder), "--quiet"]) == 0
    assert main(["evaluate", str(folder), "--certify", "sigma=0.25,n0=5,n=20", "--limit", "5", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "certified by smoothing, sigma=0.25,n0=5,n=20 (confidence 0.999 a row" in printed
    assert "L2 radius 0.25" in printed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n=100", "has no sigma"),
        ("sigma=0", "must be above 0"),
        ("sigma=0.1,steps=3", "unknown option"),
        ("sigma=0.1,n=many", "must be a number"),
        ("sigma=0.1,n=9", "Take n of 11 or more"),
        ("sigma=0.1,alpha=0.7", "alpha in"),
        ("sigma=0.1,radii=-1", "0 or more"),
    ],
)
def test_mistakes_are_named(text, words):
    with pytest.raises(HardyError, match=words):
        parse_smoothing(text)


def test_a_network_that_needs_its_batch_is_refused():
    run = fit(papers.fedavg(norm=local(inference_statistics="batch")), rounds=1)
    with pytest.raises(HardyError, match="cannot be certified"):
        hardy.evaluate(run, certify="sigma=0.1", checks=False, quiet=True)
    assert len(federation().clients) == 4
