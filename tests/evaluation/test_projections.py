"""Pictures of norms and representations: what is drawn, and that it is in the report."""

import dataclasses
import json

import pytest
import torch

import hardy
from conftest import federation, fit
from hardy import papers
from hardy.attacks.gradient import pgd
from hardy.evaluation.projections import norms, penultimate, plane, write_projections
from hardy.report.plots import Cloud, scatter_plot
from hardy.runs.api import evaluate

SHORT = pgd(steps=1)


def found_norms(run):
    return norms(run.engine.plan, run.own, range(len(run.engine.data.clients)))


def kinds(*given):
    data = federation()
    clients = (dataclasses.replace(c, kind=k) for c, k in zip(data.clients, given, strict=True))
    return dataclasses.replace(data, clients=tuple(clients))


def test_a_plane_keeps_distances_of_what_lies_in_one():
    flat = torch.randn(7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q[:2]
    torch.testing.assert_close(torch.cdist(plane(flat @ turned + 3), plane(flat @ turned + 3)), torch.cdist(flat, flat))
    assert plane(torch.ones(1, 4)).tolist() == [[0.0, 0.0]] and plane(torch.ones(2, 1)).shape == (2, 2)
    assert plane(torch.full((3, 4), 3e38).diagonal_scatter(torch.zeros(3))).isfinite().all()


def test_norms_that_nobody_trained_or_nobody_keeps_are_not_drawn():
    run = fit(papers.fedrbn(attack=SHORT), data=kinds("AT", "ST", "AT", "ST"), rounds=1)
    first, last = found_norms(run)
    assert (first["layer"], last["layer"]) == ("norm1", "norm2")
    everyone = [(client, branch) for branch in ("clean", "adversarial") for client in range(4)]
    assert [tuple(point[2:]) for point in first["points"]] == everyone
    nobody_attacks = fit(papers.fedrbn(), data=kinds("ST", "ST", "ST", "ST"), rounds=1)
    assert {point[3] for found in found_norms(nobody_attacks) for point in found["points"]} == {"clean"}
    assert found_norms(fit(papers.fedavg(), rounds=1)) == []


def test_pictures_reach_the_report(tmp_path):
    data = kinds("AT", "ST", "AT", "ST")
    branches = hardy.config.EvaluationChoice(attack_branch="adversarial", predict_branch="adversarial")
    run = fit(papers.fedrbn(attack=SHORT), data=data, rounds=1, out=tmp_path / "run", evaluation=branches)
    report = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert "BatchNorm statistics, norm1" in report and "even, adversarial" in report and "Representations" not in report
    evaluate(run, "fgsm", quiet=True, checks=False)
    told = json.loads((tmp_path / "run" / "projections.json").read_text())
    assert [found["client"] for found in told["domains"]] == [2, 3] and told["threat"] == "fgsm"
    for found in told["domains"]:
        rows = data.clients[found["client"]].test
        assert len(found["points"]) == 2 * len(rows) and {point[3] for point in found["points"]} == {
            "clean",
            "attacked",
        }
    report = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert "Representations, odd (client 3)" in report and "BatchNorm statistics, norm1" in report
    assert "Left out" not in report


def test_a_client_that_diverged_is_left_out_and_named(tmp_path):
    """Its affine may be finite and its answers not; a run that has finished must still be written down."""
    run = fit(papers.fedrbn(attack=SHORT), data=kinds("AT", "ST", "AT", "ST"), rounds=1, out=tmp_path / "run")
    run.state.reported["norm1.adversarial.var"][1] = torch.inf
    run.engine.store["norm2.weight"][3] = 1e308
    run.engine.store["norm2.bias"][3] = 1e308
    write_projections(run.folder, run.state.round, norms=found_norms(run))
    evaluate(run, "fgsm", quiet=True, checks=False)
    told = json.loads((run.folder / "projections.json").read_text(), parse_constant=pytest.fail)
    assert told["norms"][0]["left_out"] == [[1, "adversarial"]] and len(told["norms"][0]["points"]) == 7
    assert [bool(found["left_out"]) for found in told["domains"]] == [False, True]
    report = (run.folder / "report.html").read_text("utf-8")
    assert "not finite (training diverged): BatchNorm statistics, norm1: clients 1; Representations, odd" in report


def test_representations_are_what_the_last_layer_sees():
    run = fit(papers.fedavg(), rounds=1)
    made = run.network_for_new_client("average")
    x = torch.rand(5, *run.engine.data.shape, dtype=torch.float64)
    seen = penultimate(made, x, "clean")
    last = made.nets[0].trained
    torch.testing.assert_close(seen @ last["fc.weight"].T + last["fc.bias"], made(x))


def test_clouds_are_drawn_inside_and_named_once():
    drawing = scatter_plot(
        [
            Cloud(label="a<b", points=[(0.0, -1.0, "one"), (5.0, 3.0, "two")], style="c1"),
            Cloud(label="a<b", points=[(2.5, 1.0, "three")], style="c1", cross=True),
            Cloud(label="none", points=[]),
        ],
        title="here",
    )
    assert drawing.count("<circle") == 2 and drawing.count("×") == 1 and drawing.count("a&lt;b") == 1
    assert 'cx="0.00%" cy="100.00%"' in drawing and 'cx="100.00%" cy="0.00%"' in drawing
    assert "none" not in drawing and scatter_plot([], title="nothing") == ""
