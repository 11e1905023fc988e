"""The playground's page: what it carries, and that gradients and rules in it are Hardy's."""

import base64
import gzip
import json
import re
import shutil
import subprocess
from importlib import resources

import numpy as np
import pytest
import torch

import hardy
from hardy.cli import main
from hardy.core.messages import Slot, Updates
from hardy.core.partition import Role
from hardy.core.protocols import RoundContext
from hardy.parts.aggregators.base import mean, pipeline
from hardy.parts.aggregators.robust import coordinate_median, geometric_median, krum, trimmed_mean
from hardy.parts.aggregators.stages import nearest_neighbour_mixing

onnxruntime = pytest.importorskip("onnxruntime", reason="the export extra is not installed")
METHOD = {"name": "split_mix_dat", "width": 0.5, "attack": {"name": "pgd", "steps": 1}}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A run with markup in its name, its page, and the content that the page carries."""
    folder = tmp_path_factory.mktemp("playground")
    source = {"name": "mini_digits", "domains": ["pen", "mail"]}
    chosen = {"name": "<script>x", "data.source": source, "data.clients": 1, "data.limit": 30, "method": METHOD}
    run = hardy.fit("demo", chosen, rounds=1, out=folder / "run", quiet=True)
    assert main(["playground", str(folder / "run"), "--out", str(folder / "p.html"), "--no-open"]) == 0
    text = (folder / "p.html").read_text()
    packed = re.search(r'id="content">([^<]*)<', text)
    return run, text, json.loads(gzip.decompress(base64.b64decode(packed[1])))


def test_one_file_that_asks_for_nothing(page):
    _, text, content = page
    assert len(text) < 8e6
    assert "default-src 'none'" in text and "connect-src" not in text
    assert not re.search(r'(src|href)="(?!data:)[^"]', text)  # links are made by the script, on a click
    assert "<script>x" not in text and "&lt;script&gt;x" in text
    assert content["networks"][0]["widths"] == [0.5, 1.0] and len(content["networks"][0]["bases"]) == 2
    assert {image["domain"] for image in content["images"]} == {"pen", "mail"}
    assert "zero_gradients" in {flag["name"] for flag in content["masked"]["flags"]}


def test_gradients_and_logits_are_those_of_torch(page):
    run, _, content = page
    x, cotangent = torch.rand(10, 3, 28, 28), torch.randn(10, 10)
    base, level = run.customise(width=0.5, robustness=0.3), np.array(0.3, np.float32)
    inside = x.clone().requires_grad_()
    logits = base(inside)
    (expected,) = torch.autograd.grad((logits * cotangent).sum(), inside)
    files = {k: base64.b64decode(v) for k, v in content["networks"][0]["bases"][0].items()}
    forward, both = (onnxruntime.InferenceSession(files[kind]) for kind in ("forward", "gradient"))
    given = {"images": x.numpy(), "robustness": level}
    np.testing.assert_allclose(forward.run(None, given)[0], logits.detach(), atol=1e-5)
    again, gradient = both.run(None, {**given, "cotangent": cotangent.numpy()})
    np.testing.assert_allclose(again, logits.detach(), atol=1e-5)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


def rule_in_python(rule, points):
    matrix = torch.tensor(points, dtype=torch.float64)
    replies = Updates(
        slots=[Slot(at) for at in range(len(points))],
        shared={"w": matrix},
        reported={},
        weights=torch.ones(len(points), dtype=torch.float64),
        steps=torch.ones(len(points), dtype=torch.int64),
        loss=torch.ones(len(points), dtype=torch.float64),
    )
    context = RoundContext(
        shared={"w": torch.zeros(1, 2, dtype=torch.float64)}, roles={"w": Role.WEIGHT}, bases=1, clients=len(points)
    )
    return rule.finish(rule.fold(None, replies, context), context, rule.memory(context))[0]["w"][0].numpy()


def test_rules_are_those_of_python():
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: it runs the page's script without a browser")
    rng = np.random.default_rng(0)
    rounds = [rng.normal(1, 0.5, (count, 2)).tolist() for count in (7, 9, 12)]
    script = (resources.files("hardy") / "playground" / "assets" / "rules.js").read_text("utf-8")
    ask = f"console.log(JSON.stringify({json.dumps(rounds)}.map((p) => RULES.map((r) => r.apply(p, 2)))))"
    done = subprocess.run([node, "-e", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    rules = [
        mean(),
        coordinate_median(),
        trimmed_mean(f=2),
        krum(f=2),
        geometric_median(),
        pipeline(pre=(nearest_neighbour_mixing(f=2),), rule=coordinate_median()),
    ]
    for points, answers in zip(rounds, json.loads(done.stdout), strict=True):
        for rule, answer in zip(rules, answers, strict=True):
            np.testing.assert_allclose(answer, rule_in_python(rule, points), atol=1e-6)


def test_a_folder_without_a_run_is_one_line(tmp_path, capsys):
    assert main(["playground", str(tmp_path), "--no-open"]) == 2
    assert capsys.readouterr().err.startswith("hardy: ")
