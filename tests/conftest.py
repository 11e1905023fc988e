"""A federation small enough to train in milliseconds, and the methods every law is checked on."""

import dataclasses
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # without a GPU, kernels run on Triton's interpreter; said before its import

import torch

import hardy
from browser import browser  # noqa: F401  (a fixture)
from hardy.attacks.base import Attack
from hardy.cli import main as hardy_main
from hardy.config import Experiment
from hardy.core.federation import Client, Federation
from hardy.core.training import Training
from hardy.engines import EngineChoice
from hardy.models import tiny_cnn
from hardy.parts.optimisers import chain, sgd
from hardy.registry import PARTS

torch.set_num_threads(1)
os.environ["HARDY_HOME"] = tempfile.mkdtemp(prefix="hardy-home-")  # what tests import is not remembered at home
SHAPE = (1, 8, 8)


def federation(sizes=(10, 7, 12, 5), classes=3, seed=0) -> Federation:
    """Clients of unlike sizes and brightness in two domains; images with a pattern per class."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 120, (classes, *SHAPE))
    clients, x, y = [], [], []
    for number, size in enumerate(sizes):
        labels = rng.integers(0, classes, size + 2)
        noise = rng.integers(0, 100, (size + 2, *SHAPE)) + 10 * number
        x.append((patterns[labels] + noise).clip(0, 255))
        y.append(labels)
        first = sum(len(block) for block in y[:-1])
        rows = np.arange(first, first + size + 2)
        clients.append(Client(domain=("even", "odd")[number % 2], train=rows[:size], validation=rows[size:], test=rows))
    pixels, labels = np.concatenate(x).astype(np.uint8), np.concatenate(y).astype(np.int64)
    return Federation(
        name="tiny",
        classes=tuple(map(str, range(classes))),
        x_train=pixels,
        y_train=labels,
        x_test=pixels.copy(),
        y_test=labels.copy(),
        clients=tuple(clients),
    )


def net(norm, width=0.25):
    return tiny_cnn(norm=norm, shape=SHAPE, classes=3, width=width)


def experiment(**changes) -> Experiment:
    usual = {
        "rounds": 4,
        "training": Training(rate=0.1, batch=4, epochs=2),
        "engine": EngineChoice(name="sequential", device="cpu", precision="float64"),
    }
    return Experiment(**{**usual, **changes})


OPTIMISER = sgd(momentum=0.5, weight_decay=1e-3)


def with_momentum(method):
    """The method, its last link with momentum and weight decay where it is plain SGD."""
    *links, last = method.optimiser.links
    return method.replace(optimiser=chain(*links, OPTIMISER)) if last == sgd() else method


def without_momentum(method):
    """The same with weight decay alone: momentum that is born anew has no effect on one step."""
    *links, last = method.optimiser.links
    return method.replace(optimiser=chain(*links, sgd(weight_decay=1e-3))) if last == OPTIMISER else method


def fit(method, *, data=None, out=None, model=net, **changes) -> hardy.Run:
    """A run; with the usual training SGD has momentum and weight decay."""
    chosen, data = experiment(**changes), data or federation()
    steps = max(chosen.training.local_steps(len(client.train), 0) for client in data.clients)
    if "training" not in changes:
        method = with_momentum(method)
    elif steps == 1 and not method.pooled:
        method = without_momentum(method)
    return hardy.fit(chosen, method=method, model=model, data=data, out=out, quiet=True)


def everything(run, own=None) -> dict[str, torch.Tensor]:
    """All tensors of a run under one roof; the private ones of nodes are told."""
    parts = {
        "shared": run.state.shared,
        "reported": run.state.reported,
        "memory": run.state.memory,
        "own": run.engine.store if own is None else own,
    }
    return {f"{part}/{name}": tensor for part, held in parts.items() for name, tensor in held.items()}


def assert_close(first, second, tolerance) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(
            tensor, second[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def shortened(part):
    """The same part with attacks of two steps, wherever they sit in it."""
    if isinstance(part, Attack):
        return dataclasses.replace(part, steps=2) if hasattr(part, "steps") else part
    if isinstance(part, tuple):
        return tuple(map(shortened, part))
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part
    own = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    changed = {name: new for name, value in own.items() if (new := shortened(value)) is not value}
    return dataclasses.replace(part, **changed) if changed else part


@pytest.fixture(params=sorted(PARTS["method"]))
def method(request):
    """Every method of the registry, with its defaults; attacks are cut short, since no law hangs on their length, and
    SGD has momentum."""
    return with_momentum(shortened(PARTS["method"][request.param]()))


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    """A run with markup in its name, and the path of its playground."""
    pytest.importorskip("onnxruntime", reason="the export extra is not installed")
    pytest.importorskip("onnxscript", reason="the export extra is not installed")
    folder = tmp_path_factory.mktemp("playground")
    method = {"name": "split_mix_dat", "width": 0.5, "attack": {"name": "pgd", "steps": 1}}
    source = {"name": "mini_digits", "domains": ["pen", "mail"]}
    chosen = {"name": "<script>x", "data.source": source, "data.clients": 1, "data.limit": 30, "method": method}
    run = hardy.fit("demo", chosen, rounds=1, out=folder / "run", quiet=True)
    assert hardy_main(["playground", str(folder / "run"), "--out", str(folder / "p.html"), "--no-open"]) == 0
    return run, folder / "p.html"
