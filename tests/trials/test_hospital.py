"""A network of hospitals, from their files to a network each, by commands alone and with real processes.

16-bit one-channel scans as one .npz a site, a backbone of timm by name, FedBN over Flower with two sites, AUROC; each
site exports its own ONNX file and finds its accuracy again.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from hospital import CLASSES, write_sites

pytest.importorskip("flwr", reason="the flower extra is not installed")
pytest.importorskip("onnxruntime", reason="the export extra is not installed")
if not find_spec("timm"):
    pytest.skip("timm is not installed: pip install --no-deps timm", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BACKBONE = '''"""The hospitals' network. Each site has this file."""

from fake_torchvision import without_torchvision

without_torchvision()
import timm


def backbone(num_classes):
    return timm.create_model("test_resnet", num_classes=num_classes, in_chans=1)
'''
EXPERIMENT = """
name = "hospitals"
rounds = 4
method = "fedbn"
model = "{backbone}:backbone"
[training]
rate = 0.02
batch = 8
[evaluation]
every = 4
metrics = ["auroc"]
[network]
clients = 2
deadline = 300.0
patience = 240.0
"""


AROUND = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])),
}
"""the processes find the stand-in for torchvision"""


def command(*words):
    return [sys.executable, "-m", "hardy", *map(str, words)]


def must(*words, cwd):
    """A command in a process of its own that ends well; what it printed."""
    done = subprocess.run(command(*words), cwd=cwd, env=AROUND, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def started(tmp_path):
    """Starts commands that run until they are stopped."""
    running = []

    def start(name, *words):
        with (tmp_path / f"{name}.log").open("wb") as log:
            running.append(subprocess.Popen(command(*words), cwd=tmp_path, env=AROUND, stdout=log, stderr=log))

    yield start
    for process in reversed(running):
        process.send_signal(signal.SIGTERM)
    for process in running:
        process.wait(60)


def test_two_hospitals(tmp_path, started):
    sites = write_sites(tmp_path / "scans", {"north": 40, "south": 24}, side=32)
    (tmp_path / "backbone.py").write_text(BACKBONE)
    (tmp_path / "experiment.toml").write_text(EXPERIMENT.format(backbone=tmp_path / "backbone.py"))
    must("deploy", "certificates", "keys", "--hosts", "127.0.0.1", "--nodes", 2, cwd=tmp_path)
    control, port = free_port(), free_port()
    must("deploy", "app", "experiment.toml", "app", "--out", "run", "--control", control, cwd=tmp_path)
    started("server", "deploy", "server", "keys/server", "--address", f"127.0.0.1:{port}", "--control", control)
    wait_for(tmp_path / "server.log", "nodes connect to")
    for number, name in enumerate(("north", "south")):
        started(
            f"node-{number}",
            *("deploy", "node", f"keys/node-{number}", "--server", f"127.0.0.1:{port}"),
            *("--app", "app/hardy-app.fab", "--state", f"state-{number}"),
            *(f"data={sites / name}.npz", f"domain={name}", f"allow_import={tmp_path / 'backbone.py'}"),
        )
    table = must("deploy", "run", "app", "--quiet", cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "hospitals: fedbn, 4 rounds" in table and set(summary["standard_accuracy"]["by_domain"]) == {
        "north",
        "south",
    }
    assert 0.0 <= summary["metrics"]["auroc"]["mean"] <= 1.0

    from hardy.deploy import OnnxPredictor

    for number, name in enumerate(("north", "south")):
        must("site", "export", "--state", f"state-{number}", "--out", f"{name}.onnx", cwd=tmp_path)
        rows = np.load(sites / f"{name}.npz")
        images = rows["x_test"][:, None].astype(np.float32) / 65535
        logits = OnnxPredictor(tmp_path / f"{name}.onnx")(images)
        right = (np.array(CLASSES)[logits.argmax(1)] == rows["y_test"]).mean()
        assert right == pytest.approx(summary["standard_accuracy"]["by_client"][number])
        assert f"{right:6.1%}" in must("site", "evaluate", "--state", f"state-{number}", cwd=tmp_path)


def wait_for(path, words):
    for _ in range(600):
        if path.exists() and words in path.read_text():
            return
        time.sleep(0.5)
    raise AssertionError(path.read_text())
