"""The playground's page: what it carries, and that gradients and rules in it are Hardy's."""

import base64
import gzip
import json
import re
import shutil
import subprocess
from importlib import resources
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from onnx_sessions import session_of
from python_rules import rule_in_python, rules

from hardy.cli import main
from hardy.cli.playground_command import _with_arms
from hardy.playground.bundled import bundled_content
from hardy.playground.content import _names


@pytest.fixture(scope="module")
def contents(page):
    """The run, the text of its page, and what the page carries."""
    run, path = page
    text = path.read_text()
    packed = [base64.b64decode(re.search(rf'id="{name}">([^<]*)<', text)[1]) for name in ("content", "binary")]
    content, binary = map(gzip.decompress, packed)
    return run, text, json.loads(content), binary


def test_one_file_that_asks_for_nothing(contents):
    _, text, content, _ = contents
    assert len(text) < 8e6
    assert "default-src 'none'" in text and "connect-src" not in text
    assert not re.search(r'(src|href)="(?!data:)[^"]', text)  # links are made by the script, on a click
    assert "<script>x" not in text and "&lt;script&gt;x" in text
    assert content["networks"][0]["widths"] == [0.5, 1.0] and len(content["networks"][0]["bases"]) == 2
    assert {image["domain"] for image in content["images"]} == {"pen", "mail"}
    assert "zero_gradients" in {flag["name"] for flag in content["masked"]["flags"]}


def test_gradients_and_logits_are_those_of_torch(contents):
    run, _, content, binary = contents
    x, cotangent = torch.rand(10, 3, 28, 28), torch.randn(10, 10)
    base, level = run.customise(width=0.5, robustness=0.3), np.array(0.3, np.float32)
    inside = x.clone().requires_grad_()
    logits = base(inside)
    (expected,) = torch.autograd.grad((logits * cotangent).sum(), inside)
    files = content["networks"][0]["bases"][0]
    forward, both = (session_of(files[kind], binary) for kind in ("forward", "gradient"))
    assert set(map(tuple, files["forward"]["weights"])) <= set(map(tuple, files["gradient"]["weights"]))  # kept once
    given = {"images": x.numpy(), "robustness": level}
    np.testing.assert_allclose(forward.run(None, given)[0], logits.detach(), atol=1e-5)
    again, gradient = both.run(None, {**given, "cotangent": cotangent.numpy()})
    np.testing.assert_allclose(again, logits.detach(), atol=1e-5)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_rules_are_those_of_python():
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: it runs the page's script without a browser")
    rng = np.random.default_rng(0)
    rounds = [rng.normal(1, 0.5, (count, 2)).tolist() for count in (7, 9, 12)]
    script = (resources.files("hardy") / "playground" / "assets" / "rules.js").read_text("utf-8")
    ask = f"console.log(JSON.stringify({json.dumps(rounds)}.map((p) => RULES.map((r) => r.apply(p, 2)))))"
    done = subprocess.run([node, "-e", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    for points, answers in zip(rounds, json.loads(done.stdout), strict=True):
        for rule, answer in zip(rules(2), answers, strict=True):
            np.testing.assert_allclose(answer, rule_in_python(rule, points), atol=1e-6)


def test_a_folder_without_a_run_is_one_line(tmp_path, capsys):
    assert main(["playground", str(tmp_path), "--no-open"]) == 2
    assert capsys.readouterr().err.startswith("hardy: ")


def test_without_a_run_the_page_shows_networks_of_hardys_own(tmp_path):
    out = tmp_path / "p.html"
    assert main(["playground", "--out", str(out), "--no-open"]) == 0
    content, binary = bundled_content()
    assert out.stat().st_size < 8e6 and len(gzip.compress(binary)) < 2e6
    robust = next(n for n in content["networks"] if n["robustness"] is not None and len(n["bases"]) == 4)
    best = next(row for row in robust["settings"] if row["width"] == row["robustness"] == 1)
    assert best["standard"]["mean"] >= 0.75 and best["robust"]["pgd-10"]["mean"] >= 0.4
    assert best["standard"]["images"] == 1000 and best["standard"]["standard_error"] > 0
    assert f"{100 * best['standard']['mean']:.1f} ±" in out.read_text()  # for readers without script


def test_arms_that_are_finished_come_with_their_experiment(tmp_path):
    arms = tmp_path / "arms"
    for name in ("done", "begun"):
        (arms / name).mkdir(parents=True)
    (arms / "done" / "summary.json").write_text("{}")
    (tmp_path / "arms.json").write_text('{"look": "", "seeds": 1, "arms": ["done", "begun"]}')
    assert _with_arms([tmp_path, arms / "done"]) == [tmp_path, arms / "done", arms / "done"]
    runs = [SimpleNamespace(experiment=SimpleNamespace(name=name)) for name in ("demo", "demo", "other")]
    assert _names([tmp_path, arms / "done", tmp_path], runs) == [tmp_path.name, "done", "other"]


def test_live_wants_a_run_and_nothing_else(tmp_path, capsys):
    for arguments in (["--live", str(tmp_path)], ["--live", str(tmp_path), "--out", "x.html"]):
        assert main(["playground", *arguments, "--no-open"]) == 2
        assert capsys.readouterr().err.startswith("hardy: ")


@pytest.mark.parametrize("damage", ["config.toml", "checkpoint"])
def test_a_damaged_run_is_one_line(page, tmp_path, capsys, damage):
    shutil.copytree(page[0].folder, tmp_path / "run")
    broken = tmp_path / "run" / damage
    for path in [broken] if broken.is_file() else [p for p in broken.rglob("*") if p.is_file()]:
        path.write_bytes(b"\0damaged")
    assert main(["playground", str(tmp_path / "run"), "--out", str(tmp_path / "p.html"), "--no-open"]) == 2
    assert capsys.readouterr().err.startswith("hardy: ") and not (tmp_path / "p.html").exists()
