"""The network that is served, exported or handed out has the accuracy that the summary prints, of every method."""

import numpy as np
import pytest
import torch

import hardy
from conftest import fit
from hardy.deploy import OnnxPredictor
from hardy.errors import HardyError


def rows(run, client):
    data = run.engine.data
    index = data.clients[client].test
    return torch.from_numpy(data.x_test[index]) / 255, torch.from_numpy(data.y_test[index])


def accuracy(network, run, client):
    x, y = rows(run, client)
    logits = network(x.numpy()) if isinstance(network, OnnxPredictor) else network(x.double()).detach()
    return float((np.asarray(logits).argmax(1) == y.numpy()).mean())


def test_what_is_served_has_the_accuracy_of_the_summary(method):
    run = fit(method, rounds=1)
    expected = run.summary()["standard_accuracy"]["by_client"]
    evaluated = hardy.evaluate(run, quiet=True)["standard_accuracy"]
    assert evaluated["by_client"] == expected and 0 <= evaluated["standard_error"] < 0.2
    serving = run.engine.plan.method.norm.serving_branch
    for client in (0, 3):
        predictor = run.customise(client=client)
        assert predictor.branch == serving
        assert accuracy(predictor, run, client) == expected[client]
        if method.name == "oat" or len(predictor.bases) > 1:
            with pytest.raises(HardyError, match=r"Conditioned is more than|networks, which is no module"):
                run.module(client=client)
        else:
            found = hardy.evaluate(run.module(client=client), rows(run, client), channels="first")
            assert found["standard_accuracy"]["mean"] == pytest.approx(expected[client])


def exported(method, folder):
    pytest.importorskip("onnxscript", reason="onnxscript is an extra (export)")
    pytest.importorskip("onnxruntime", reason="onnxruntime is an extra (export)")
    run = fit(method, rounds=1)
    served = OnnxPredictor(run.export(folder / "net.onnx", client=1))
    norm = run.engine.plan.method.norm
    assert served.manifest["branch"] == norm.serving_branch
    if "adversarial" in (norm.branches or ()):
        assert served.manifest["robustness"] == float(norm.serving_branch == "adversarial")
    expected = run.summary()["standard_accuracy"]["by_client"][1]
    assert accuracy(served, run, 1) == expected
    found = hardy.evaluate(folder / "net.onnx", rows(run, 1), channels="first")
    assert found["standard_accuracy"]["mean"] == pytest.approx(expected)


@pytest.mark.parametrize("method", ["fedrbn"], indirect=True)
def test_what_is_exported_has_the_accuracy_of_the_summary(method, tmp_path):
    exported(method, tmp_path)


@pytest.mark.slow
def test_what_any_method_exports_has_the_accuracy_of_the_summary(method, tmp_path):
    exported(method, tmp_path)
