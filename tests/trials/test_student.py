"""A doctoral student: a method in one file of his own, three seeds, a power cut, a baseline, AutoAttack, an export."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import hardy
from hardy import user_code
from hardy.cli import main
from hardy.deploy import OnnxPredictor
from hardy.engines.sequential import Sequential

MINE = '''"""My method: FedAvg with a leash of my own."""

from dataclasses import dataclass

from torch.nn import functional as F

import hardy
from hardy.core.protocols import Objective


@dataclass(frozen=True, kw_only=True)
class Leash(Objective):
    """Cross-entropy, and a pull towards the weights received."""

    strength: float = 0.1

    def loss(self, net, private, batch, key):
        return F.cross_entropy(net(batch.x, statistics="batch", key=key), batch.y)

    def gradient(self, outer, net, private, batch, key, received):
        found = super().gradient(outer, net, private, batch, key, received)
        pull = {name: self.strength * (net.trained[name] - received[name]) for name in found.gradient}
        return found._replace(gradient={name: g + pull[name] for name, g in found.gradient.items()})


def mine(*, strength: float = 0.05) -> hardy.Method:
    """FedAvg on a leash."""
    return hardy.Method(name="mine", objective=Leash(strength=strength))
'''

STUDY = """name = "study"
rounds = 10
method = "mine.py:mine"

[data]
source = { name = "mini_digits", domains = ["pen", "mail"] }
clients = 2
limit = 80
validation = 0.1

[model]
name = "tiny_cnn"
width = 0.5

[training]
rate = 0.05
batch = 16

[engine]
name = "sequential"
device = "cpu"

[checkpoint]
every = 1
"""
PATIENCE = 900
"""seconds that a command may take on a busy machine"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A folder with the student's two files, on a machine where Hardy has never run."""
    monkeypatch.setenv("HARDY_HOME", str(tmp_path / "home"))
    another_process(monkeypatch)
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE)
    (folder / "x.toml").write_text(STUDY)
    monkeypatch.chdir(folder)
    return folder


def another_process(monkeypatch):
    """As if nothing had been imported yet; what is remembered at home stays."""
    for name in ("_permitted", "_refused", "_loaded", "_recorded"):
        monkeypatch.setattr(user_code, name, {})
    monkeypatch.setattr(user_code, "_listed", [])
    monkeypatch.setattr(user_code, "_named", set())
    monkeypatch.setattr(sys, "path", list(sys.path))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Those of the last checkpoint."""
    return load_file(sorted((folder / "checkpoint").glob("round-*"))[-1] / "tensors.safetensors")


def assert_same_run(first: Path, second: Path) -> None:
    """The same bits in the checkpoint, the same figures in the summary."""
    ours, theirs = tensors(first), tensors(second)
    assert ours.keys() == theirs.keys() and ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (first, second)]
    timed = {"seconds": 0, "files_sha256": 0, "sha256": 0}  # the checksums are of files with seconds in them
    assert {**summaries[0], **timed} == {**summaries[1], **timed}


def accuracy_of_onnx(model: Path, run: Path) -> list[float]:
    """What the exported file scores on the test rows of each client, computed here."""
    data, served = hardy.load(run).engine.data, OnnxPredictor(model)
    return [
        float((served(data.x_test[rows].astype(np.float32) / 255).argmax(1) == data.y_test[rows]).mean())
        for rows in (client.test for client in data.clients)
    ]


def hardy_command(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "hardy", *words], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def kill_in_second_seed(*words: str, folder: Path) -> None:
    """Starts the command and kills it once the second seed has two rounds behind it and more to come."""
    process = subprocess.Popen([sys.executable, "-m", "hardy", *words], start_new_session=True)
    lines = folder / "seed-1" / "metrics.jsonl"
    try:
        for _ in range(PATIENCE * 100):
            if lines.exists() and lines.read_text().count("\n") >= 2:
                break
            assert process.poll() is None, "it ended before the second seed had begun"
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.timeout(3600)
@pytest.mark.slow  # eight processes, each of which imports torch
def test_a_student_with_three_seeds_and_a_power_cut(study):
    mine, base = study / "runs" / "mine", study / "runs" / "base"
    kill_in_second_seed("run", "x.toml", "--seeds", "3", "--out", "runs/mine", "--quiet", folder=mine)
    assert (mine / "seed-0" / "summary.json").exists()
    assert not (mine / "seed-1" / "summary.json").exists() and not (mine / "seed-2").exists()

    said = hardy_command("resume", "runs/mine", "--quiet")
    assert [line[:7] for line in said.splitlines()[:3]] == ["seed 0:", "seed 1:", "seed 2:"]
    hardy_command("run", "x.toml", "seed=1", "--out", "runs/whole", "--quiet")
    assert_same_run(mine / "seed-1", study / "runs" / "whole")

    hardy_command("run", "x.toml", "method=fedavg", "--seeds", "3", "--out", "runs/base", "--quiet")
    said = hardy_command("compare", "runs/mine", "runs/base")
    assert "mine (3 seeds)" in said and "base (3 seeds)" in said and "fedavg" in said
    assert (study / "comparison.html").exists()
    ours, theirs = (
        [json.loads((folder / f"seed-{seed}" / "summary.json").read_text()) for seed in range(3)]
        for folder in (mine, base)
    )
    assert all(one["standard_accuracy"]["mean"] > 0.3 for one in (*ours, *theirs))  # chance is 0.1
    assert ours[0]["standard_accuracy"] != theirs[0]["standard_accuracy"]  # the leash does something

    threat = "autoattack@32/255"
    said = hardy_command("evaluate", "runs/mine", "--threats", threat, "--limit", "2", "--no-checks", "--quiet")
    over = json.loads((mine / "evaluation.json").read_text())
    each = [json.loads((mine / f"seed-{seed}" / "evaluation.json").read_text()) for seed in range(3)]
    means = [one["robust_accuracy"][threat]["mean"] for one in each]
    assert over["robust_accuracy"][threat]["mean"] == pytest.approx(sum(means) / 3)
    assert all(mean <= one["standard_accuracy"]["mean"] for mean, one in zip(means, each, strict=True))
    assert f"{threat}  " in said

    hardy_command("export", "runs/mine", "--seed", "0", "--out", "m.onnx")
    found = accuracy_of_onnx(study / "m.json", mine / "seed-0")
    assert found == ours[0]["standard_accuracy"]["by_client"]


def test_a_student_with_two_seeds_stopped_in_the_second(study, monkeypatch, capsys):
    short = ["rounds=4", "data.limit=40"]
    words = ["run", "x.toml", *short, "--quiet"]
    mine, train = study / "runs" / "mine", Sequential.train

    def cut(self, work):
        if work.round == 3 and self.seed == 1:
            raise KeyboardInterrupt
        yield from train(self, work)

    with monkeypatch.context() as patched:
        patched.setattr(Sequential, "train", cut)
        assert main([*words, "--seeds", "2", "--out", "runs/mine"]) == 130
    assert not (mine / "seed-1" / "summary.json").exists()
    another_process(monkeypatch)
    monkeypatch.chdir("/")  # the file is found again from anywhere
    assert main(["resume", str(mine), "--quiet"]) == 0
    monkeypatch.chdir(study)
    assert main([*words, "seed=1", "--out", "runs/whole"]) == 0
    assert_same_run(mine / "seed-1", study / "runs" / "whole")

    assert main([*words, "method=fedavg", "--seeds", "2", "--out", "runs/base"]) == 0
    capsys.readouterr()
    assert main(["compare", "runs/mine", "runs/base"]) == 0
    said = capsys.readouterr().out
    assert "mine (2 seeds)" in said and "base (2 seeds)" in said
    assert main(["export", "runs/mine", "--seed", "0", "--out", "m.onnx"]) == 0
    told = json.loads((mine / "seed-0" / "summary.json").read_text())
    assert accuracy_of_onnx(study / "m.json", mine / "seed-0") == told["standard_accuracy"]["by_client"]
    assert hardy.load(mine / "seed-0").engine.plan.method.objective.strength == 0.05


def test_a_power_cut_before_the_second_seed_begins(study, monkeypatch):
    """Nothing of a seed is there yet but its number; the student's file is found all the same."""
    assert main(["run", "x.toml", "rounds=1", "data.limit=20", "--seeds", "2", "--out", "runs/mine", "--quiet"]) == 0
    shutil.rmtree("runs/mine/seed-1")
    another_process(monkeypatch)
    assert main(["resume", "runs/mine", "--quiet"]) == 0
    assert (study / "runs" / "mine" / "seed-1" / "summary.json").exists()
