"""Metrics of a run: per client, by domain, the worst; clean and under threats; in every file that shows figures."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

import hardy
from conftest import federation, fit, net
from hardy import papers
from hardy.config import EvaluationChoice
from hardy.core.engine import Branches
from hardy.core.json_files import write_sealed
from hardy.evaluation.measure import ServedClients
from hardy.parts.metrics import ece

ASKED = ("auroc", ece(bins=5), "loss", "accuracy")


def choice(**more):
    return EvaluationChoice(metrics=ASKED, threats=("pgd-3@32/255",), **more)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fit(papers.fedbn(), rounds=2, evaluation=choice(), out=tmp_path_factory.mktemp("metrics") / "run")


def read(run, name):
    return json.loads((run.folder / name).read_text())


def test_each_client_has_its_own_figure(run):
    """Computed anew by scikit-learn from each client's own network."""
    summary, data = read(run, "summary.json"), run.engine.data
    served = ServedClients(run.engine, run.state, "test", Branches()).served
    areas, losses = [], []
    for number, client in enumerate(data.clients):
        logits = served.network(number)(torch.from_numpy(data.x_test[client.test]).double() / 255)
        p, y = logits.softmax(1).numpy(), data.y_test[client.test]
        areas.append(np.mean([sk.roc_auc_score(y == c, p[:, c]) for c in np.unique(y)]))
        losses.append(sk.log_loss(y, p, labels=[0, 1, 2]))
    found = summary["metrics"]
    assert found["auroc"]["by_client"] == pytest.approx(areas)
    assert found["auroc"]["mean"] == pytest.approx(np.mean(areas))
    assert found["auroc"]["worst_client"] == pytest.approx(min(areas))
    assert found["loss"]["worst_client"] == pytest.approx(max(losses))
    assert found["auroc"]["by_domain"]["odd"] == pytest.approx((areas[1] + areas[3]) / 2)
    assert found["auroc"]["round"] == 2 and found["auroc"]["images"] == sum(len(c.test) for c in data.clients)
    assert found["auroc"]["missing"] == []


def test_the_accuracy_among_the_metrics_is_the_accuracy(run):
    """Clean and under attack: rows that were wrong before an attack keep their answers."""
    summary = read(run, "summary.json")
    threat = "pgd-3@32/255"
    robust = summary["robust_metrics"][threat]
    assert summary["metrics"]["accuracy"]["by_client"] == summary["standard_accuracy"]["by_client"]
    assert robust["accuracy"]["by_client"] == summary["robust_accuracy"][threat]["by_client"]
    assert summary["robust_accuracy"][threat]["mean"] < summary["standard_accuracy"]["mean"]
    assert robust["auroc"]["mean"] < summary["metrics"]["auroc"]["mean"]
    assert robust["loss"]["mean"] > summary["metrics"]["loss"]["mean"]


def test_every_round_has_its_line(run):
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert set(line["metrics"]) == set(line["validation_metrics"]) == {"auroc", "ece", "loss", "accuracy"}
    assert lines[-1]["metrics"] == read(run, "summary.json")["metrics"]


def test_a_client_of_one_class_has_no_auroc():
    """It is left out of the mean and the count of images, and named."""
    data = federation()
    client = data.clients[1]
    same = replace(client, test=client.test[data.y_test[client.test] == data.y_test[client.test[0]]])
    data = replace(data, clients=(data.clients[0], same, *data.clients[2:]))
    found = fit(papers.fedavg(), data=data, rounds=1, evaluation=EvaluationChoice(metrics=("auroc",))).summary()
    auroc = found["metrics"]["auroc"]
    assert auroc["by_client"][1] is None and auroc["missing"] == [1]
    assert auroc["mean"] == pytest.approx(np.mean([v for v in auroc["by_client"] if v is not None]))
    assert auroc["images"] == sum(len(c.test) for c in data.clients) - len(same.test)


def test_engines_agree_on_metrics():
    from hardy.engines import EngineChoice

    many = EngineChoice(name="vectorised", device="cpu", precision="float64", lane=3)
    one, two = (fit(papers.fedbn(), rounds=1, evaluation=choice(), **e).summary() for e in ({}, {"engine": many}))
    for name in ("auroc", "ece", "loss"):
        assert one["metrics"][name]["by_client"] == pytest.approx(two["metrics"][name]["by_client"], rel=1e-6)


def test_evaluating_again_with_other_metrics(run):
    """New metrics of a threat that is known are measured; what is known of others stays in the summary."""

    def top_two(logits, labels):
        return (logits.topk(2).indices == labels[:, None]).any(1).double().mean()

    before = read(run, "summary.json")
    loaded = hardy.load(run.folder, method=run.engine.plan.method, model=net, data=run.engine.data)
    found = hardy.evaluate(loaded, "pgd-3@32/255", metrics=["brier", top_two], checks=False, quiet=True)
    assert set(found["metrics"]) == set(found["robust_metrics"]["pgd-3@32/255"]) == {"brier", "top_two"}
    assert 0.3 < found["metrics"]["top_two"]["mean"] <= 1
    after = read(run, "summary.json")
    assert after["metrics"].keys() == before["metrics"].keys() | {"brier", "top_two"}
    for threat, metrics in before["robust_metrics"].items():
        for name, figures in metrics.items():
            assert after["robust_metrics"][threat][name] == figures
    assert read(run, "evaluation.json")["robust_metrics"]["pgd-3@32/255"]["brier"]["metric"] == {"name": "brier"}


def test_the_best_round_by_a_metric():
    """The one with the least loss on validation rows, which is not the one with the highest accuracy."""
    chosen = EvaluationChoice(metrics=("loss",), select_metric="loss")
    seen = []
    for rounds in (1, 2, 3, 4):
        seen.append(fit(papers.fedavg(), rounds=rounds, evaluation=chosen))
    losses = [one.last_line["validation_metrics"]["loss"]["mean"] for one in seen]
    best = seen[-1].figures.best
    assert best["round"] == int(np.argmin(losses)) + 1 and best["score"] == min(losses) and best["metric"] == "loss"


def test_reports_and_comparisons_show_metrics(run, tmp_path):
    from hardy.report.compare import compare, seeds_summary

    page = (run.folder / "report.html").read_text()
    assert "auroc over rounds" in page and "auroc, pgd-3@32/255" in page
    summary, other = read(run, "summary.json"), tmp_path / "other"
    other.mkdir()
    for metrics in (summary["metrics"], *summary["robust_metrics"].values()):
        for figures in metrics.values():
            figures["mean"] += 0.1
    del summary["sha256"], summary["files_sha256"]
    write_sealed(other / "summary.json", summary)
    compared = compare([run.folder, other])
    better = {column.title: column.better for column in compared.columns}
    assert (better["auroc"], better["ece"], better["loss, pgd-3@32/255"]) == (1, -1, -1)
    there = dict(zip(compared.head(), compared.cells()[1], strict=True))
    assert there["auroc"].startswith(f"{summary['metrics']['auroc']['mean']:.3f}")
    over = seeds_summary([run.folder, other])
    assert over["metrics"]["auroc"]["mean_std"] == pytest.approx(0.1 / 2**0.5)


def test_the_command_line_shows_metrics(tmp_path, capsys):
    from hardy.cli import main

    asked = ["rounds=1", "data.limit=40", "engine.device=cpu", 'evaluation.metrics=["auroc"]']
    assert main(["run", "demo", "--alone", *asked, "--quiet", "--out", str(tmp_path / "run")]) == 0
    assert "auroc   0." in capsys.readouterr().out
    words = ["evaluate", str(tmp_path / "run"), "--metrics", "ece,macro_f1", "--threats", "fgsm", "--no-checks"]
    assert main([*words, "--quiet", "--limit", "5"]) == 0
    said = capsys.readouterr().out
    assert "macro_f1 fgsm" in said and "ece " in said and "worst client" in said
    assert main(["evaluate", str(tmp_path / "run"), "--metrics", "acuracy"]) == 2
    assert "unknown metric 'acuracy'" in capsys.readouterr().err
