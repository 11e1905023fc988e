"""Any classifier measured: a torch module, a function of images, or an ONNX file, trained with Hardy or not."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hardy.attacks.autoattack import apgd, fab
from hardy.attacks.base import Attack, Forward, refuse_inputs
from hardy.attacks.threats import Threat, parse_threat, parse_threats
from hardy.core import random
from hardy.core.box import inputs
from hardy.core.federation import Federation
from hardy.core.metric import Metric
from hardy.data import sources
from hardy.data.dataset import Dataset
from hardy.data.given import OwnData, as_data
from hardy.data.own_data import Channels, ValueRange
from hardy.data.own_files import looks_like_path, read_own
from hardy.deploy.onnx_file import open_onnx
from hardy.errors import HardyError
from hardy.evaluation.checks import check
from hardy.evaluation.measure import measured, standard_error
from hardy.parts.metrics import to_metrics

Classifier = nn.Module | Callable[[Any], Any] | Path | str
"""a module, a function of images in [0, 1] that gives logits, or the path of an ONNX file"""
_IMAGES = 256
"""in one call"""


class LabelledInputs(NamedTuple):
    """What a classifier is measured on."""

    x: Tensor
    y: Tensor
    bounded: bool


def evaluate_classifier(
    model: Classifier,
    data: OwnData | str | Path,
    threats: str | Sequence[str | Threat] = (),
    *,
    metrics: str | Sequence[Any] = (),
    limit: int | None = None,
    seed: int = 0,
    checks: bool = True,
    value_range: ValueRange = None,
    channels: Channels | None = None,
) -> dict[str, Any]:
    """Accuracy of a classifier, clean and under threats, each with its standard error, and the red flags; `metrics`
    such as "auroc,ece" besides (None: undefined on these rows).

    `data` is (x, y), a torch Dataset, a path (.npz, .csv, a folder of pictures) or a data set by name; of a data set
    with test rows, those count. Modules are measured in evaluation mode. A function or file that gives no gradient can
    meet only attacks that need none, such as square.
    """
    if limit is not None and limit < 1:
        raise HardyError(f"limit is {limit}; it must be 1 or more rows.")
    given = parse_threats(threats) if isinstance(threats, str) and threats.strip() else threats or ()
    chosen = {t.name: t for t in (parse_threat(t) if isinstance(t, str) else t for t in given)}
    figures = to_metrics(metrics)
    with _evaluating(model) as forward:
        with _silent():  # about labels, which are numbered anew until the number of classes is known
            shown = _rows(data, None, limit, value_range, channels)
        classes = _classes(forward, shown.x)
        rows = _rows(data, classes, limit, value_range, channels)
        gradients = _has_gradient(forward, rows.x)
        for threat in chosen.values():
            refuse_inputs(threat.attack, rows.x.shape[1:], bounded=rows.bounded)
            _refuse_gradients(threat, gradients=gradients)
        with inputs(bounded=rows.bounded):
            return _measured(
                forward, rows, list(chosen.values()), figures, classes, seed, checks=checks, gradients=gradients
            )


def _measured(
    forward: Forward,
    rows: LabelledInputs,
    threats: Sequence[Threat],
    metrics: Sequence[Metric],
    classes: int,
    seed: int,
    *,
    checks: bool,
    gradients: bool,
) -> dict[str, Any]:
    clean = _answers(forward, rows.x)
    found: dict[str, Any] = {"classes": classes, "standard_accuracy": _figures(clean, rows.y), "robust_accuracy": {}}
    if metrics:
        found |= {"metrics": _metrics(metrics, clean, rows.y), "robust_metrics": {}}
    key = random.fold(torch.tensor(seed, device=rows.x.device), "evaluate")
    if checks and threats and rows.x.dim() == 4 and rows.bounded:
        flags = check(forward, rows.x, rows.y, random.fold(key, "checks"), gradients=gradients)
        found["flags"] = [dataclasses.asdict(flag) for flag in flags]
    done: dict[Attack, tuple[Tensor, dict[str, Any]]] = {}  # an attack under two names runs once
    for threat in threats:
        if threat.attack not in done:
            logits, stages = clean, {}
            for stage, attack in threat.attack.stages():
                at = random.fold(key, threat.name, stage)
                logits = _attacked(forward, attack, rows, logits, at, ensemble=bool(stage))
                stages[stage] = _figures(logits, rows.y)["mean"]
            words = {"stages": stages, "notes": _notes(threat.attack, classes)}
            done[threat.attack] = logits, {**_figures(logits, rows.y), **words}
        logits, found["robust_accuracy"][threat.name] = done[threat.attack]
        if metrics:
            found["robust_metrics"][threat.name] = _metrics(metrics, logits, rows.y)
    return found


def _figures(logits: Tensor, y: Tensor) -> dict[str, Any]:
    mean = float((logits.argmax(1) == y).double().mean())
    return {"mean": mean, "standard_error": standard_error([mean], [len(y)]), "images": len(y)}


def _metrics(metrics: Sequence[Metric], logits: Tensor, y: Tensor) -> dict[str, float | None]:
    return {metric.name: measured(metric, logits.cpu(), y.cpu()) for metric in metrics}


@torch.no_grad()
def _answers(forward: Forward, x: Tensor) -> Tensor:
    return torch.cat([forward(x[at : at + _IMAGES]) for at in range(0, len(x), _IMAGES)])


def _attacked(
    forward: Forward, attack: Attack, rows: LabelledInputs, before: Tensor, key: Tensor, *, ensemble: bool
) -> Tensor:
    """The logits after an attack on the rows that were still classified rightly; the others keep theirs. An attack on
    all images together is judged on all, unless it is a stage of an ensemble."""
    standing = before.argmax(1) == rows.y
    if attack.joint:
        answers = _answers(forward, attack.perturb(forward, rows.x, rows.y, key))
        return torch.where(standing[:, None], answers, before) if ensemble else answers
    upright, size = standing.nonzero()[:, 0], max(1, _IMAGES // attack.points)
    after = before.clone()
    for start in range(0, len(upright), size):
        index = upright[start : start + size]
        x, y = rows.x[index], rows.y[index]
        after[index] = _answers(forward, attack.perturb(forward, x, y, random.fold(key, start)))
    return after


def _notes(attack: Attack, classes: int) -> list[str]:
    """What few classes change about an attack."""
    stages, notes = [stage for _, stage in attack.stages()], []
    aims = [stage.targeted for stage in stages if isinstance(stage, apgd)]
    aims += [stage.targets for stage in stages if isinstance(stage, fab)]
    if max(aims, default=0) > classes - 1:
        notes.append(f"{classes} classes: {classes - 1} target(s) instead of {max(aims)}.")
    if any(isinstance(s, apgd) and s.loss == "dlr" and classes < (4 if s.targeted else 3) for s in stages):
        notes.append(f"{classes} classes: the difference of the logits takes the place of the DLR loss.")
    return notes


# The classifier


@contextmanager
def _evaluating(model: Classifier) -> Iterator[Forward]:
    """images -> logits; a module is in evaluation mode meanwhile, and as it was afterwards."""
    if isinstance(model, str | Path):
        yield _from_numpy(open_onnx(model))
        return
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise HardyError(
                f"{type(model).__name__} is no classifier; give a torch module, a function of images, or a path of an "
                "ONNX file. A run is measured by hardy.evaluate(run, threats)."
            )
        yield _called(model)
        return
    modes = {layer: layer.training for layer in model.modules()}
    held = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    model.eval()
    try:
        yield lambda x: model(x.to(held.device, held.dtype))
    finally:
        for layer, training in modes.items():
            layer.training = training


def _called(model: Callable[[Any], Any]) -> Forward:
    """A function of tensors, or of numpy arrays."""

    def forward(x: Tensor) -> Tensor:
        out = model(x)
        return out if isinstance(out, Tensor) else torch.as_tensor(np.asarray(out))

    return forward


def _from_numpy(model: Callable[[Any], Any]) -> Forward:
    return lambda x: torch.as_tensor(model(x.detach().cpu().numpy().astype(np.float32)))


def _classes(forward: Forward, x: Tensor) -> int:
    """The number of classes, by what the classifier answers to two images."""
    try:
        with torch.no_grad():
            logits = forward(x[:2])
    except HardyError:
        raise
    except Exception as error:
        said = str(error).strip().partition("\n")[0].rstrip(".")
        raise HardyError(
            f"the classifier cannot run on inputs of shape {list(x.shape[1:])}: {said}. Images are [N, channel, "
            "height, width]; say where their channels are: channels='first' or 'last'."
        ) from error
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[1] < 2:
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise HardyError(
            f"the classifier answers {len(x[:2])} images with {shape}; it must be [N, classes], a logit for each of 2 "
            "or more classes. One logit z of two classes is torch.cat([-z, z], 1) / 2."
        )
    return logits.shape[1]


def _has_gradient(forward: Forward, x: Tensor) -> bool:
    """Whether a gradient of the logits reaches the images."""
    try:
        with torch.enable_grad():
            return forward(x[:1].clone().requires_grad_()).requires_grad
    except RuntimeError:  # a function of numpy arrays
        return False


def _refuse_gradients(threat: Threat, *, gradients: bool) -> None:
    climbing = [name or threat.name for name, stage in threat.attack.stages() if stage.needs_gradient]
    if climbing and not gradients:
        raise HardyError(
            f"threat {threat.name!r} needs gradients ({climbing[0]}), and this classifier gives none: it is an ONNX "
            "file or a function without them. Take square or lsa, or hand over the torch module (run.module())."
        )


# The data


@contextmanager
def _silent() -> Iterator[None]:
    log = logging.getLogger("hardy")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _rows(
    data: OwnData | str | Path,
    classes: int | None,
    limit: int | None,
    value_range: ValueRange,
    channels: Channels | None,
) -> LabelledInputs:
    """The test rows of the data, or all of them where none are named."""
    options = {"holdout": 0.0, **({"channels": channels} if channels else {})}
    given: Federation | Dataset
    if isinstance(data, str | Path):
        own = isinstance(data, Path) or looks_like_path(data)
        read = read_own if own else sources.load_dataset
        options |= {"classes": classes} if classes and own else {}
        given = read(str(data), sources.data_root(None), value_range=value_range, **(options if own else {}))
    else:
        known = {} if isinstance(data, Federation | Dataset) else {**options, "classes": classes}
        given = as_data(data, value_range=value_range, **known)  # type: ignore[arg-type]
    if isinstance(given, Federation):
        x, y = given.x_test, given.y_test
    else:
        tested = any(len(domain.y_test) for domain in given.domains)
        x = np.concatenate([domain.x_test if tested else domain.x_train for domain in given.domains])
        y = np.concatenate([domain.y_test if tested else domain.y_train for domain in given.domains])
        x = x.transpose(0, 3, 1, 2) if x.ndim == 4 else x
    x, y = x[:limit], y[:limit]
    if not len(y):
        raise HardyError("the data hold no rows to measure on; give at least one.")
    if classes is not None and y.max() >= classes:
        raise HardyError(f"the data have the label {y.max()}, but the classifier has {classes} classes, from 0 on.")
    pixels = torch.from_numpy(np.ascontiguousarray(x))
    pixels = pixels.float() / 255 if pixels.dtype is torch.uint8 else pixels.float()
    return LabelledInputs(pixels, torch.from_numpy(np.ascontiguousarray(y)), given.bounded)
