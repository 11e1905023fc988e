"""What the playground shows of some runs: networks with their gradients, images, clients, and a masked network."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
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
from hardy.playground.binary import Binary
from hardy.runs.api import load
from hardy.runs.evaluate import known_settings
from hardy.runs.run import Run

_SHOWN = 20
"""images of a domain"""
_MOST = 100
"""images in all"""
_OF_A_CLIENT = 2
_CHECKED = 64
"""images that red flags are looked for on"""
_FACTOR = 10_000.0
"""what the logits of the masked network are multiplied by"""


def content_of(folders: Sequence[Path], *, data_folder: Path | None = None) -> tuple[dict[str, Any], bytes]:
    """The content of the page for some run folders: what is said, and the bytes of images and networks that it points
    into. All runs must have the same classes and images."""
    require_onnx()
    runs = [_loaded(folder, data_folder) for folder in folders]
    for run in runs:
        run.needs_local("the playground")
        run.needs_everyone("the playground")
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
    names = _names(folders, runs)
    binary = Binary()
    images = _images(runs[0])
    content = {
        "title": " and ".join(dict.fromkeys(run.experiment.name for run in runs)),
        "about": "Federated networks, trained with Hardy, at work in this page. Nothing you do here leaves it.",
        "shape": list(first.shape),
        "classes": list(first.classes),
        "images": [{**image, "x": binary.add(_pixels(image["x"][0]))} for image in images],
        "networks": [_network(run, name, binary) for run, name in zip(runs, names, strict=True)],
        "runs": [_clients(run, name, binary) for run, name in zip(runs, names, strict=True)],
        "masked": _masked(runs[0]),
        "first": _first(runs, images),
    }
    return content, binary.bytes()


def _first(runs: Sequence[Run], images: Sequence[dict[str, Any]]) -> int:
    """The image to begin with: PGD-10 fools the first network on it, while the one on the right holds."""
    networks = [_predictor(run) for run in runs]
    robust = next((at for at, run in enumerate(runs) if _mixes(run)), -1)
    if _mixes(runs[robust]):
        networks[robust].customise(robustness=1.0)
    key = random.fold(torch.tensor(runs[0].experiment.seed), "first")
    for at, image in enumerate(images):
        x, y = image["x"], torch.tensor([image["label"]], device=image["x"].device)
        reads = []
        for network in (networks[0], networks[robust]):
            with torch.no_grad():
                clean = int(network(x).argmax())
            attacked = pgd(steps=10).perturb(network, x, y, key)
            with torch.no_grad():
                reads.append((clean, int(network(attacked).argmax())))
        (before, fooled), (clean, held) = reads
        if before == clean == held == image["label"] != fooled:
            return at
    return 0


def _names(folders: Sequence[Path], runs: Sequence[Run]) -> list[str]:
    """Those of the experiments; of runs of one name, such as arms, those of their folders."""
    count = Counter(run.experiment.name for run in runs)
    return [
        run.experiment.name if count[run.experiment.name] == 1 else folder.resolve().name
        for folder, run in zip(folders, runs, strict=True)
    ]


def _loaded(folder: Path, data_folder: Path | None) -> Run:
    """A run; into the folder of one that still trains nothing is written."""
    run = load(folder, data_folder=data_folder)
    return run if (folder / "summary.json").exists() else dataclasses.replace(run, folder=None)


def _pixels(image: Tensor) -> bytes:
    """An image in [0, 1] as bytes."""
    return (image.clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy().tobytes()


def _test_rows(run: Run, client: int, most: int) -> tuple[Tensor, Tensor]:
    """The first test images of a client, and their labels."""
    engine = run.needs_local("the playground")
    rows = torch.from_numpy(engine.data.clients[client].test[:most]).to(engine.device)
    return engine.device_data.images("test", rows), engine.device_data.y["test"][rows]


def _images(run: Run) -> list[dict[str, Any]]:
    """Test images [1, C, H, W] of every domain, classes in turn."""
    members: dict[str, list[int]] = {}
    for number, client in enumerate(run.engine.data.clients):
        members.setdefault(client.domain, []).append(number)
    found: list[dict[str, Any]] = []
    for domain, numbers in members.items():
        rows = [_test_rows(run, number, 4 * _SHOWN) for number in numbers]
        x, y = torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows])
        turn = [int((y[:at] == label).sum()) for at, label in enumerate(y)]
        order = sorted(range(len(y)), key=lambda at: (turn[at], int(y[at])))[: min(_SHOWN, _MOST)]
        found += [{"x": x[at : at + 1], "label": int(y[at]), "domain": domain} for at in order]
    return found[:_MOST] if len(found) <= _MOST else found[:: -(-len(found) // _MOST)]


def _predictor(run: Run) -> Predictor:
    """The network shown: client 0's where clients have their own."""
    own = bool(run.own) or run.engine.plan.method.norm.inference_statistics == "recomputed"
    return run.customise(client=0 if own else None)


def _mixes(run: Run) -> bool:
    """Whether robustness λ is chosen when the network is used."""
    return "adversarial" in (run.engine.plan.method.norm.branches or ())


def _network(run: Run, name: str, binary: Binary) -> dict[str, Any]:
    predictor = _predictor(run)
    plan = predictor.plan
    mixes = _mixes(run)
    level = predictor.robustness if predictor.robustness is not None else float(predictor.branch == "adversarial")
    classes = len(run.engine.data.classes)
    bases = []
    with TemporaryDirectory() as folder:
        forward, gradient = Path(folder) / "forward.onnx", Path(folder) / "gradient.onnx"
        for base in predictor.bases:
            write_base(base, forward, predictor.shape, branch=predictor.branch, mixes=mixes)
            write_gradient(base, gradient, shape=predictor.shape, classes=classes, branch=predictor.branch, mixes=mixes)
            bases.append({"forward": binary.add_onnx(forward), "gradient": binary.add_onnx(gradient)})
    several = plan.method.budget.bases > 1
    return {
        "name": _name(run, name, predictor),
        "client": predictor.client,
        "bases": bases,
        "widths": list(plan.method.budget.widths) if several else [1.0],
        "robustness": level if mixes else None,
        "settings": _settings(run, level if mixes else None),
    }


def _name(run: Run, name: str, predictor: Predictor) -> str:
    """The run's name; its method, if the name does not say it; and whose network it is."""
    method = run.engine.plan.method.name
    plain = "".join(filter(str.isalnum, name.lower()))
    more = [] if plain == method.replace("_", "") else [method]
    more += [] if predictor.client is None else [f"client {predictor.client}"]
    return f"{name} ({', '.join(more)})" if more else name


def _settings(run: Run, level: float | None) -> list[dict[str, Any]]:
    """What each measured width and robustness costs and scores."""
    measured, summary = known_settings(run), run.summary()
    if not any(row["robust_accuracy"] for row in measured):  # the run itself knows the widest under its threats
        measured[-1] = {**measured[-1], "robust_accuracy": summary.get("robust_accuracy") or {}}
    return [
        {
            "width": row["width"],
            "robustness": level if row["robustness"] is None else row["robustness"],
            "macs": row["macs"],
            "standard": _figure(row["standard_accuracy"]),
            "robust": {threat: _figure(found) for threat, found in row["robust_accuracy"].items()},
        }
        for row in measured
    ]


def _figure(found: dict[str, Any]) -> dict[str, Any]:
    """An accuracy, its standard error, and the number of images it is measured on."""
    return {key: found.get(key) for key in ("mean", "standard_error", "images")}


def _clients(run: Run, name: str, binary: Binary) -> dict[str, Any]:
    summary, clients = run.summary(), run.engine.data.clients

    def by_client(figures: dict[str, Any] | None) -> list[float | None]:
        return (figures or {}).get("by_client") or [None] * len(clients)

    standard = by_client(summary.get("standard_accuracy"))
    robust = {threat: by_client(found) for threat, found in summary.get("robust_accuracy", {}).items()}
    return {
        "name": name,
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
                "pictures": _pictures(run, number, binary),
            }
            for number, client in enumerate(clients)
        ],
    }


def _pictures(run: Run, client: int, binary: Binary) -> list[dict[str, Any]]:
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
            "at": binary.add(_pixels(x[at])),
            "attacked_at": binary.add(_pixels(attacked[at])),
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
    takes, alpha = propagated.who_takes_what(dict(run.state.reported), plan.tags, run.engine.data.clients)
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
