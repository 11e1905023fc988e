"""Attacks on privacy find what is there to be found, and less of it under noise."""

import dataclasses
import json
from math import inf

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from conftest import SHAPE, federation, fit
from hardy import papers
from hardy.cli import main
from hardy.core.admission import Admission
from hardy.core.training import Training
from hardy.errors import HardyError
from hardy.evaluation.membership_inference import calibrated_scores, confidences, loss_scores, told_apart
from hardy.models import mlp
from hardy.parts.aggregators.base import mean, pipeline
from hardy.parts.aggregators.client_privacy import client_level_dp
from hardy.parts.example_privacy import dp_sgd
from hardy.parts.norms import group
from hardy.runs.audits import audit_run


def forgetful():
    """Clients of 12 training and 12 test rows whose labels are drawn by lot: all there is to learn are the rows."""
    data = federation(sizes=(22,) * 4)
    labels = np.random.default_rng(1).integers(0, 3, len(data.y_train))
    parts = [np.concatenate([client.train, client.validation]) for client in data.clients]
    clients = [
        dataclasses.replace(client, train=rows[:12], validation=rows[12:12], test=rows[12:])
        for client, rows in zip(data.clients, parts, strict=True)
    ]
    return dataclasses.replace(data, clients=tuple(clients), y_train=labels, y_test=labels)


def dense(norm):
    return mlp(norm=norm, shape=SHAPE, classes=3)


def trained(method, **changes):
    training = Training(rate=0.2, batch=4, epochs=changes.pop("epochs", 6))
    return fit(method, data=forgetful(), model=dense, training=training, **changes)


def test_scores_by_hand():
    logits, labels = torch.tensor([[2.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), torch.tensor([0, 2])
    torch.testing.assert_close(
        torch.from_numpy(loss_scores(logits, labels)), -F.cross_entropy(logits, labels, reduction="none").double()
    )
    p = logits.double().softmax(1)[[0, 1], labels]
    np.testing.assert_allclose(confidences(logits, labels), (p / (1 - p)).log())
    said = [np.array([1.0, np.nan, 0.0]), np.array([3.0, 5.0, 0.0])]
    found = calibrated_scores(np.array([4.0, 5.0, 1.0]), said)
    scatter = np.std([-1.0, 1.0, 0.0, 0.0, 0.0])  # of what they say around each row's own mean
    np.testing.assert_allclose(found, [2.0 / scatter, 0.0, 1.0 / scatter])
    nobody = calibrated_scores(np.array([1.0, 2.0]), [np.array([np.nan, 0.5]), np.array([np.nan, 0.7])])
    assert np.isnan(nobody[0]) and np.isfinite(nobody[1])


def test_telling_apart_by_hand():
    draw = np.random.default_rng(0)
    clear = told_apart(draw.random(50) + 2, draw.random(70))
    assert (clear["auc"], clear["advantage"], clear["members"], clear["others"]) == (1.0, 1.0, 50, 70)
    alike = [told_apart(draw.normal(size=100), draw.normal(size=100)) for _ in range(60)]
    for name, usual in (("auc", 0.5), ("advantage", 0.0)):
        away = np.array([(one[name] - usual) / one[f"{name}_error"] for one in alike])
        assert abs(away.mean()) < 0.5 and 0.6 < away.std() < 1.6, name  # unbiased, and errors as large as they say
    assert told_apart(np.zeros(10), np.zeros(10))["auc"] == 0.5


def test_membership_shows_where_a_network_has_learnt_its_rows_by_heart(tmp_path, capsys):
    run = trained(papers.fedavg(norm=group()), out=tmp_path / "run")
    found = audit_run(run, "membership", references=2)
    for score in ("loss", "calibrated"):
        one = found["membership"][score]
        assert one["auc"] - 0.5 > 2 * one["auc_error"] and one["others"] == 48
    assert found["membership"]["loss"]["members"] == 48
    kept = json.loads((tmp_path / "run" / "audit.json").read_text())
    assert kept["membership"] == found["membership"] and kept["round"] == 4
    assert audit_run(run, ["membership"], references=2)["membership"] == found["membership"]  # it repeats
    private = papers.fedavg(norm=group(), objective=dp_sgd(clip=0.5, noise=4.0, delta=0.01))
    quiet = audit_run(trained(private), "membership")["membership"]["loss"]
    assert quiet["auc"] < found["membership"]["loss"]["auc"] - 2 * quiet["auc_error"]


def test_inversion_finds_images_and_noise_hides_them():
    def errors(method, **changes):
        run = trained(method, rounds=1, epochs=1, **changes)
        return audit_run(run, "inversion", images=3, iterations=120)["inversion"]

    plain = errors(papers.fedavg(norm=group()))
    assert plain["sent"]["error"] + 2 * plain["sent"]["error_error"] < 0.7
    assert plain["published"] == plain["sent"]  # the mean of one
    hidden = errors(papers.fedavg(norm=group(), objective=dp_sgd(clip=0.5, noise=1.0, delta=0.01)))["sent"]
    assert hidden["error"] > 2 * plain["sent"]["error"]
    stage = client_level_dp(clip=0.5, noise=1.0, delta=0.01)
    outside = papers.fedavg(norm=group()).replace(aggregator=pipeline(pre=(stage,), rule=mean()))
    central = errors(outside, admission=Admission(largest_ratio=inf))
    assert central["sent"] == plain["sent"]  # the server itself is not kept out
    assert central["published"]["error"] > 2 * plain["sent"]["error"]


@pytest.mark.parametrize(
    ("audits", "options", "why"),
    [
        ("leakage", {}, "audit 'leakage' is unknown. Known: membership, inversion"),
        ("inversion", {"references": 2}, "references have no effect"),
        ("inversion", {"images": 1}, "2 images or more"),
    ],
)
def test_what_an_audit_refuses(audits, options, why):
    run = fit(papers.fedavg(norm=group()), rounds=1)
    with pytest.raises(HardyError, match=why):
        audit_run(run, audits, **options)


def test_the_command(tmp_path, capsys):
    run = ["run", "demo", "rounds=1", "data.limit=20", "data.clients=1", "method.norm=group", "model=mlp", "--quiet"]
    folder = str(tmp_path / "run")
    assert main([*run, "training.steps=1", "engine.device=cpu", "--out", folder]) == 0
    assert main(["evaluate", folder, "--audit", "membership", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "membership by loss: advantage" in said and "audit.json" in said
    assert main(["evaluate", folder, "--references", "2", "--quiet"]) == 2
    assert "--references has no effect" in capsys.readouterr().err
