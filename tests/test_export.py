"""Networks customised in place, and exported to ONNX: the same answers."""

import json
import os
import time

import numpy as np
import pytest
import torch

import hardy
from conftest import fit, net
from hardy import papers
from hardy.attacks.gradient import pgd
from hardy.cli import main
from hardy.deploy import onnx_runtime as deploy
from hardy.deploy import predictor
from hardy.deploy.export import export
from hardy.errors import HardyError
from hardy.models.count import macs
from hardy.parts.norms import batch

os.environ["ORT_DISABLE_TELEMETRY"] = "1"


@pytest.fixture(scope="module")
def run():
    return fit(papers.split_mix_dat(width=0.25, attack=pgd(steps=1)), rounds=1)


def test_width_and_robustness_change_in_place_in_under_a_millisecond(run):
    served = run.customise(width=0.25, robustness=0.0)
    x = torch.rand(4, 1, 8, 8, dtype=torch.float64)
    first = served.loaded[0]
    seconds = []
    for width, robustness in ((1.0, 0.3), (0.5, 0.3), (0.75, 1.0), (0.25, 0.0)) * 5:
        began = time.perf_counter()
        served.customise(width=width, robustness=robustness)
        seconds.append(time.perf_counter() - began)
        assert len(served.loaded) == round(width / 0.25) and served.loaded[0] is first
        torch.testing.assert_close(served(x), run.customise(width=width, robustness=robustness)(x))
    assert sorted(seconds)[len(seconds) // 2] < 1e-3


@pytest.fixture
def apart(monkeypatch):
    """A device that shares no memory with the host: what a GPU is, played by a second place in this memory."""
    monkeypatch.setattr(predictor, "_room", lambda host, device: torch.empty_like(host))


@pytest.mark.parametrize(
    "method",
    [
        papers.split_mix_dat(width=0.25, attack=pgd(steps=1)),
        papers.split_mix(width=0.25, norm=batch(serving="post")),
        papers.sheterofl(widths=(0.25, 0.5, 1.0)),
        papers.heterofl(widths=(0.25, 0.5, 1.0), norm=batch(serving="post")),
    ],
    ids=["split_mix", "split_mix, post", "sheterofl", "heterofl, post"],
)
def test_bases_come_back_as_they_were_and_hold_nothing_while_they_are_away(method, apart, monkeypatch):
    run, x = fit(method, rounds=1), torch.rand(4, 1, 8, 8, dtype=torch.float64)
    served = run.customise(client=0)
    wide, every = served(x), {id(base): base for bases in served._bases.values() for base in bases}.values()
    for width in (0.25, 1.0, 0.5, 0.25, 1.0):
        served.customise(width=width)
        held = [base.there.untyped_storage().nbytes() for base in every]
        assert sum(held) == served.costs()["bytes"] and held.count(0) == len(every) - len(served.loaded)
        answer = served(x)
    assert torch.equal(answer, wide)
    monkeypatch.undo()
    for width in (1.0, 0.25):
        assert torch.equal(served.customise(width=width)(x), run.customise(width=width, client=0)(x))


def test_costs_of_a_setting(run):
    one, all_four = (run.customise(width=width).costs() for width in (0.25, 1.0))
    assert one["bases"] == 1 and one["macs"] == macs(run.engine.plan.model, (1, 8, 8))
    assert all_four["macs"] == 4 * one["macs"] and all_four["parameters"] == 4 * one["parameters"]
    assert all_four["bytes"] == 4 * one["bytes"] > 8 * all_four["parameters"]
    assert 0 < run.customise().latency(repeats=3) < 1


@pytest.fixture(scope="module")
def manifest(run, tmp_path_factory):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    return export(run, tmp_path_factory.mktemp("export") / "model.onnx", width=0.75, robustness=0.3)


def test_the_export_answers_as_the_network_does(run, manifest):
    images = np.random.default_rng(0).random((5, 1, 8, 8))
    served = deploy.load(manifest)
    assert len(served.sessions) == 3 and served.robustness == 0.3 and served.classes == ["0", "1", "2"]
    for width, robustness in ((0.75, 0.3), (0.25, 0.0), (0.5, 1.0)):
        mine = run.customise(width=width, robustness=robustness)(torch.from_numpy(images)).numpy()
        np.testing.assert_allclose(served.customise(width=width, robustness=robustness)(images), mine, atol=1e-4)
        assert len(served.sessions) == round(width / 0.25)
    np.testing.assert_allclose(served(images[:1]), mine[:1], atol=1e-4)
    held = json.loads(manifest.read_text())
    assert held["input"] == [1, 8, 8] and [row["width"] for row in held["settings"]] == [0.25, 0.5]
    assert all(0 <= row["standard_accuracy"]["mean"] <= 1 for row in held["settings"])


def test_a_missing_or_altered_base_and_a_setting_out_of_range_are_refused(manifest):
    served = deploy.load(manifest, width=0.25)
    for wrong, message in (
        (lambda: served.customise(width=1.0), r"width 1\.0 was not exported; .* \[0\.25, 0\.75\]"),
        (lambda: served.customise(robustness=-0.1), r"robustness is -0\.1"),
        (lambda: served(np.zeros((2, 3, 8, 8))), r"\[2, 3, 8, 8\]; they must be \[N, 1, 8, 8\]"),
        (lambda: deploy.load(manifest.with_name("other.onnx")), "no manifest"),
    ):
        with pytest.raises(HardyError, match=message):
            wrong()
    second = manifest.with_name("model.base2.onnx")
    content = second.read_bytes()
    second.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(HardyError, match="altered"):
        served.customise(width=0.5)
    second.unlink()
    with pytest.raises(HardyError, match="missing"):
        deploy.load(manifest, width=0.5)
    assert deploy.load(manifest, width=0.25).sessions
    second.write_bytes(content)


def test_from_the_command_line(tmp_path, capsys):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    folder = tmp_path / "run"
    words = ["method={name='split_mix',width=0.5}", "model={name='tiny_cnn',width=0.5}", "data.capacity=exponential"]
    quick = ["rounds=1", "training.steps=1", "data.limit=40", "data.capacity={name='groups',widths=[0.5,1]}"]
    assert main(["run", "demo", *words[:2], *quick, "--out", str(folder), "--device", "cpu", "--quiet"]) == 0
    assert main(["export", str(folder), "--out", str(tmp_path / "m.onnx")]) == 0
    run = hardy.load(folder)
    x = torch.rand(3, *run.engine.data.shape)
    np.testing.assert_allclose(deploy.load(tmp_path / "m.onnx")(x.numpy()), run.customise()(x).numpy(), atol=1e-4)
    assert main(["export", str(folder), "--width", "0.2", "--out", str(tmp_path / "m.onnx")]) == 2
    assert "width 0.2 is outside the trained range" in capsys.readouterr().err


def test_a_corner_is_exported_as_one_narrow_file(tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    run = fit(papers.heterofl(widths=(0.5, 1.0)), rounds=1, model=net)
    x = np.random.default_rng(0).random((3, 1, 8, 8))
    served = deploy.load(export(run, tmp_path / "corner.onnx", width=0.5))
    np.testing.assert_allclose(served(x), run.customise(width=0.5)(torch.from_numpy(x)).numpy(), atol=1e-4)
