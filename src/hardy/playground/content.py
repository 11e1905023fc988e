"""What the playground shows of some runs: networks with their gradients, images, clients, and a masked network."""

import base64
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardy.attacks.gradient import pgd
from hardy.core import random
from hardy.deploy.export import require_onnx, write_base
from hardy.deploy.gradient_export import write_gradient
from hardy.deploy.predictor import Predictor
from hardy.errors import HardyError
from hardy.evaluation.checks import check
from hardy.papers.fedrbn import Propagated
from hardy.report.stored_run import read_run
from hardy.runs.api import load
from hardy.runs.evaluate import known_settings
from hardy.runs.run import Run

_SHOWN = 20
"""images of a domain"""
_MOST = 100
"""images in all"""
_OF_A_CLIENT = 3
_CHECKED = 64
"""images that red flags are looked for on"""
_FACTOR = 10_000.0
"""what the logits of the masked network are multiplied by"""


def content_of(folders: Sequence[Path], *, data_folder: Path | None = None) -> dict[str, Any]:
    """The content of the page for some run folders. All runs must have the same classes and images."""
    require_onnx()
    runs = [load(folder, data_folder=data_folder) for folder in folders]
    for run in runs:
        run.needs_local("the playground")
    first = runs[0].engine.data
    for folder, run in zip(folders, runs, strict=True):
        other = run.engine.data
        if (other.shape, other.classes) != (first.shape, first.classes):
            raise HardyError(
                f"{folder} has images {other.shape} of {len(other.classes)} classes, {folders[0]} {first.shape} of "
                f"{len(first.classes)}. Show them on pages of their own."
            )
    if len(first.shape) != 3 or first.shape[0] not in (1, 3):
        raise HardyError(f"{folders[0]} has inputs {first.shape}; the page shows images of one or three channels.")
    pixels = _Pixels()
    images = _images(runs[0], pixels)
    networks = [_network(run) for run in runs]
    return {
        "title": " and ".join(run.experiment.name for run in runs),
        "about": "Federated networks, trained with Hardy, at work in this page. Nothing you do here leaves it.",
        "shape": list(first.shape),
        "classes": list(first.classes),
        "images": images,
        "networks": networks,
        "runs": [_clients(run, folder, pixels) for run, folder in zip(runs, folders, strict=True)],
        "masked": _masked(runs[0]),
        "pixels": pixels.base64(),
    }


class _Pixels:
    """Images as bytes, one after the other."""

    def __init__(self) -> None:
        self._images: list[np.ndarray[Any, Any]] = []

    def add(self, image: Tensor) -> int:
        """Where it is kept; an image in [0, 1]."""
        self._images.append((image.clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy())
        return len(self._images) - 1

    def base64(self) -> str:
        return base64.b64encode(np.stack(self._images).tobytes()).decode()


def _test_rows(run: Run, client: int, most: int) -> tuple[Tensor, Tensor]:
    """The first test images of a client, and their labels."""
    engine = run.needs_local("the playground")
    rows = torch.from_numpy(engine.data.clients[client].test[:most]).to(engine.device)
    return engine.device_data.images("test", rows), engine.device_data.y["test"][rows]


def _images(run: Run, pixels: _Pixels) -> list[dict[str, Any]]:
    """Test images of every domain, classes in turn."""
    clients = list(enumerate(run.engine.data.clients))
    domains = groupby(sorted(clients, key=lambda pair: pair[1].domain), key=lambda pair: pair[1].domain)
    found: list[dict[str, Any]] = []
    for domain, members in domains:
        rows = [_test_rows(run, number, 4 * _SHOWN) for number, _ in members]
        x, y = torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows])
        turn = [int((y[:at] == label).sum()) for at, label in enumerate(y)]
        order = sorted(range(len(y)), key=lambda at: (turn[at], int(y[at])))[: min(_SHOWN, _MOST)]
        found += [{"at": pixels.add(x[at]), "label": int(y[at]), "domain": domain} for at in order]
    return found[:_MOST] if len(found) <= _MOST else found[:: -(-len(found) // _MOST)]


def _predictor(run: Run) -> Predictor:
    """The network shown: client 0's where clients have their own."""
    own = bool(run.own) or run.engine.plan.method.norm.inference_statistics == "recomputed"
    return run.customise(client=0 if own else None)


def _network(run: Run) -> dict[str, Any]:
    predictor = _predictor(run)
    plan = predictor.plan
    mixes = "adversarial" in (plan.method.norm.branches or ())
    level = predictor.robustness if predictor.robustness is not None else float(predictor.branch == "adversarial")
    classes = len(run.engine.data.classes)
    bases = []
    with TemporaryDirectory() as folder:
        forward, gradient = Path(folder) / "forward.onnx", Path(folder) / "gradient.onnx"
        for base in predictor.bases:
            write_base(base, forward, predictor.shape, branch=predictor.branch, mixes=mixes)
            write_gradient(base, gradient, shape=predictor.shape, classes=classes, branch=predictor.branch, mixes=mixes)
            bases.append({"forward": _encoded(forward), "gradient": _encoded(gradient)})
    several = plan.method.budget.bases > 1
    whose = "" if predictor.client is None else f", client {predictor.client}"
    return {
        "name": f"{run.experiment.name} ({plan.method.name}{whose})",
        "bases": bases,
        "widths": list(plan.method.budget.widths) if several else [1.0],
        "robustness": level if mixes else None,
        "settings": [_setting(row) for row in known_settings(run)],
    }


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _setting(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "width": row["width"],
        "robustness": row["robustness"],
        "macs": row["macs"],
        "standard": row["standard_accuracy"]["mean"],
        "robust": {threat: found["mean"] for threat, found in row["robust_accuracy"].items()},
    }


def _clients(run: Run, folder: Path, pixels: _Pixels) -> dict[str, Any]:
    stored, clients = read_run(folder), run.engine.data.clients
    summary = stored.summary

    def by_client(figures: dict[str, Any] | None) -> list[float | None]:
        return (figures or {}).get("by_client") or [None] * len(clients)

    standard = by_client(summary.get("standard_accuracy"))
    robust = {threat: by_client(found) for threat, found in summary.get("robust_accuracy", {}).items()}
    return {
        "name": run.experiment.name,
        "alpha": _alpha(run),
        "clients": [
            {
                "number": number,
                "domain": client.domain,
                "kind": client.kind,
                "train": len(client.train),
                "labels": np.bincount(
                    run.engine.data.y_train[client.train], minlength=len(run.engine.data.classes)
                ).tolist(),
                "standard": standard[number],
                "robust": {threat: values[number] for threat, values in robust.items()},
                "pictures": _pictures(run, number, pixels),
            }
            for number, client in enumerate(clients)
        ],
    }


def _pictures(run: Run, client: int, pixels: _Pixels) -> list[dict[str, Any]]:
    """Some images of a client beside what PGD-10 makes of them on the client's own network."""
    x, y = _test_rows(run, client, _OF_A_CLIENT)
    if not len(x):
        return []
    network = run.customise(client=client if client < len(run.engine.data.clients) else None)
    attacked = pgd(steps=10).perturb(
        network, x, y, random.fold(torch.tensor(run.experiment.seed), "playground", client)
    )
    with torch.no_grad():
        read, fooled = network(x).argmax(1).tolist(), network(attacked).argmax(1).tolist()
    return [
        {
            "at": pixels.add(x[at]),
            "attacked_at": pixels.add(attacked[at]),
            "label": int(y[at]),
            "read": read[at],
            "fooled": fooled[at],
        }
        for at in range(len(x))
    ]


def _alpha(run: Run) -> list[list[float]] | None:
    """FedRBN's α: what each client takes of each other one's adversarial statistics, by the last round's."""
    norm, plan = run.engine.plan.method.norm, run.engine.plan
    propagated = getattr(norm, "adversarial", None)
    if not isinstance(propagated, Propagated):
        return None
    takes, alpha = propagated.who_takes_what(run.state.reported, plan.tags, run.engine.data.clients)
    return [
        [round(float(share), 4) for share in row] if taking else []
        for taking, row in zip(takes[:, 0], alpha[..., 0], strict=True)
    ]


def _masked(run: Run) -> dict[str, Any]:
    """The first network with logits so large that its gradients vanish, and the red flags it raises."""
    predictor = _predictor(run)
    count = len(run.engine.data.clients)
    rows = [_test_rows(run, client, -(-_CHECKED // count)) for client in range(count)]
    x, y = torch.cat([x for x, _ in rows])[:_CHECKED], torch.cat([y for _, y in rows])[:_CHECKED]
    flags = check(
        lambda images: predictor(images) * _FACTOR, x, y, random.fold(torch.tensor(run.experiment.seed), "masked")
    )
    return {
        "network": 0,
        "factor": _FACTOR,
        "flags": [{"name": flag.name, "message": flag.message, "advice": flag.advice} for flag in flags],
    }
