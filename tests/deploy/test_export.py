"""Networks customised in place, and exported to ONNX: the same answers."""

import hashlib
import json
import time

import numpy as np
import pytest
import torch

import hardy
from conftest import fit, net
from hardy import papers
from hardy.attacks.gradient import pgd
from hardy.cli import main
from hardy.deploy import OnnxPredictor
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.models.count import macs
from hardy.parts.norms import batch


@pytest.fixture(scope="module")
def run():
    return fit(papers.split_mix_dat(width=0.25, attack=pgd(steps=1)), rounds=1)


def test_width_and_robustness_change_in_place_in_under_a_millisecond(run):
    served = run.customise(width=0.25, robustness=0.0)
    x = torch.rand(4, 1, 8, 8, dtype=torch.float64)
    first = served.bases[0]
    seconds = []
    for width, robustness in ((1.0, 0.3), (0.5, 0.3), (0.75, 1.0), (0.25, 0.0)) * 5:
        began = time.perf_counter()
        served.customise(width=width, robustness=robustness)
        seconds.append(time.perf_counter() - began)
        assert len(served.bases) == round(width / 0.25) and served.bases[0] is first
        torch.testing.assert_close(served(x), run.customise(width=width, robustness=robustness)(x))
    assert sorted(seconds)[len(seconds) // 2] < 1e-3


@pytest.mark.parametrize(
    "method",
    [
        papers.split_mix_dat(width=0.25, attack=pgd(steps=1)),
        papers.split_mix(width=0.25, norm=batch(inference_statistics="recomputed")),
        papers.sheterofl(widths=(0.25, 0.5, 1.0)),
        papers.heterofl(widths=(0.25, 0.5, 1.0), norm=batch(inference_statistics="recomputed")),
    ],
    ids=["split_mix", "split_mix, post", "sheterofl", "heterofl, post"],
)
def test_bases_come_back_as_they_were_trained_on(method):
    """A width that leaves and comes back has the same bases, with what was changed in them meanwhile."""
    run, x = fit(method, rounds=1), torch.rand(4, 1, 8, 8, dtype=torch.float64)
    served = run.customise(client=0)
    wide = served(x)
    for width in (0.25, 1.0, 0.5, 0.25, 1.0):
        answer = served.customise(width=width)(x)
        assert torch.equal(answer, run.customise(width=width, client=0)(x))
        kept = sum(t.numel() * t.element_size() for n, t in served.state_dict().items() if "scale." not in n)
        assert served.costs()["bytes"] == kept
    assert torch.equal(answer, wide)
    with torch.no_grad():
        next(served.bases[0].parameters()).mul_(2)
    changed = served(x)
    assert not torch.equal(changed, wide)
    assert torch.equal(served.customise(width=0.25).customise(width=1.0)(x), changed)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: on a CPU bases have nowhere to go")
def test_released_bases_leave_the_device():
    run = fit(papers.split_mix(width=0.25), rounds=1, engine=EngineChoice(name="sequential", device="cuda"))
    served = run.customise()
    every = list(served.bases)
    for width, count in ((0.25, 1), (0.75, 3), (1.0, 4)):
        served.customise(width=width).release()
        assert [base.fc.weight.is_cuda for base in every] == [True] * count + [False] * (4 - count)


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
    return run.export(tmp_path_factory.mktemp("export") / "model.onnx", width=0.75, robustness=0.3)


def test_the_export_answers_as_the_network_does(run, manifest):
    images = np.random.default_rng(0).random((5, 1, 8, 8))
    served = OnnxPredictor(manifest)
    assert len(served.sessions) == 3 and served.robustness == 0.3 and served.classes == ["0", "1", "2"]
    for width, robustness in ((0.75, 0.3), (0.25, 0.0), (0.5, 1.0)):
        mine = run.customise(width=width, robustness=robustness)(torch.from_numpy(images)).detach().numpy()
        np.testing.assert_allclose(served.customise(width=width, robustness=robustness)(images), mine, atol=1e-4)
        assert len(served.sessions) == round(width / 0.25)
    np.testing.assert_allclose(served(images[:1]), mine[:1], atol=1e-4)
    held = json.loads(manifest.read_text())
    assert held["input"] == [1, 8, 8] and [row["width"] for row in held["settings"]] == [0.25, 0.5]
    assert all(0 <= row["standard_accuracy"]["mean"] <= 1 for row in held["settings"])


def test_clients_with_networks_of_their_own_are_named():
    message = r"norm 'Local' gives every client a network of its own; choose one of the \d+ \(client=0, or --client 0\)"
    with pytest.raises(HardyError, match=message):
        fit(papers.fedbn(), rounds=1).customise()


def test_one_network_is_one_file_under_the_name_given(tmp_path):
    """Of feature vectors here; `hardy evaluate` takes the name too."""
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    x = rng.normal(size=(60, 4)) + 2 * y[:, None]
    run = hardy.fit(
        rounds=1, method="fedavg", model="mlp", data=(x, y), quiet=True, engine={"device": "cpu"}, training={"steps": 4}
    )
    manifest = run.export(tmp_path / "net.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"net.onnx", "net.json"} and manifest.name == "net.json"
    logits = OnnxPredictor(tmp_path / "net.onnx")(x)
    wanted = run.module()(torch.from_numpy(x).float()).detach().numpy()
    np.testing.assert_allclose(logits, wanted, atol=1e-4)
    found = hardy.evaluate(tmp_path / "net.onnx", (x, y), metrics="auroc")
    assert found["standard_accuracy"]["mean"] == (wanted.argmax(1) == y).mean()
    with pytest.raises(HardyError, match=r"inputs are \[2, 5\]; they must be \[N, 4\]"):
        OnnxPredictor(manifest)(x[:2, [0, 1, 2, 3, 3]])


def test_a_missing_or_altered_base_and_a_setting_out_of_range_are_refused(manifest):
    served = OnnxPredictor(manifest, width=0.25)
    for wrong, message in (
        (lambda: served.customise(width=1.0), r"width 1\.0 was not exported; .* \[0\.25, 0\.75\]"),
        (lambda: served.customise(robustness=-0.1), r"robustness is -0\.1"),
        (lambda: served(np.zeros((2, 3, 8, 8))), r"\[2, 3, 8, 8\]; they must be \[N, 1, 8, 8\]"),
        (lambda: OnnxPredictor(manifest.with_name("other.onnx")), "no manifest"),
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
        OnnxPredictor(manifest, width=0.5)
    assert OnnxPredictor(manifest, width=0.25).sessions
    second.write_bytes(content)


def test_from_the_command_line(tmp_path, capsys):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    folder = tmp_path / "run"
    words = ["method={name='split_mix',width=0.5}", "model={name='tiny_cnn',width=0.5}", "data.capacity=exponential"]
    quick = ["rounds=1", "training.steps=1", "data.limit=40", "data.capacity={name='groups',widths=[0.5,1]}"]
    assert main(["run", "demo", "--alone", *words[:2], *quick, "--out", str(folder), "--device", "cpu", "--quiet"]) == 0
    assert main(["export", str(folder), "--out", str(tmp_path / "m.onnx")]) == 0
    run = hardy.load(folder)
    x = torch.rand(3, *run.engine.data.shape)
    np.testing.assert_allclose(
        OnnxPredictor(tmp_path / "m.onnx")(x.numpy()), run.customise()(x).detach().numpy(), atol=1e-4
    )
    assert main(["export", str(folder), "--width", "0.2", "--out", str(tmp_path / "m.onnx")]) == 2
    assert "width 0.2 is outside the trained range" in capsys.readouterr().err


def test_a_corner_is_exported_as_one_narrow_file(tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    run = fit(papers.heterofl(widths=(0.5, 1.0)), rounds=1, model=net)
    x = np.random.default_rng(0).random((3, 1, 8, 8))
    served = OnnxPredictor(run.export(tmp_path / "corner.onnx", width=0.5))
    np.testing.assert_allclose(served(x), run.customise(width=0.5)(torch.from_numpy(x)).detach().numpy(), atol=1e-4)


def test_the_gradient_to_the_images_is_exported_beside(tmp_path):
    """(images, cotangent, robustness) -> (logits, gradient), as torch has them; the manifest holds its checksum."""
    onnxruntime = pytest.importorskip("onnxruntime")
    run = fit(papers.split_mix_dat(width=0.5, attack=pgd(steps=1)), rounds=1)
    manifest = json.loads(run.export(tmp_path / "mine.onnx", gradient=True).read_text())
    entry = manifest["bases"][0]
    assert entry["gradient"] == "mine.base1.gradient.onnx"
    content = (tmp_path / entry["gradient"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == entry["gradient_sha256"]
    x, cotangent = torch.rand(3, 1, 8, 8), torch.randn(3, len(manifest["classes"]))
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    given = {"images": x.numpy(), "cotangent": cotangent.numpy(), "robustness": np.array(0.3, np.float32)}
    logits, gradient = session.run(None, given)
    served = run.customise(width=0.5, robustness=0.3)
    images = x.double().requires_grad_()
    answer = served(images)
    (wanted,) = torch.autograd.grad((answer * cotangent.double()).sum(), images)
    np.testing.assert_allclose(logits, answer.detach().numpy(), atol=1e-4)
    np.testing.assert_allclose(gradient, wanted.numpy(), atol=1e-5)
