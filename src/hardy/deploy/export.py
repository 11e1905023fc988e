"""Export: a trained network as ONNX, a file for each base, with robustness as an input at run time.

Beside them lies a manifest (JSON): input size, classes, files with their checksums, and what each setting of width
and robustness costs and scores. `hardy.deploy.OnnxPredictor` runs it without torch.
"""

import hashlib
import json
import logging
import warnings
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hardy.core.files import disk, versions, write_atomic
from hardy.core.layers import calling
from hardy.deploy.gradient_export import write_gradient
from hardy.deploy.onnx_runtime import FORMAT
from hardy.deploy.predictor import Predictor
from hardy.errors import HardyError

_OPSET = 18


def export(
    predictor: Predictor,
    out: Path | str,
    *,
    name: str,
    round_number: int,
    classes: Sequence[str],
    settings: Sequence[dict[str, Any]] = (),
    gradient: bool = False,
) -> Path:
    """Writes a predictor as NAME.onnx, or its bases as NAME.base1.onnx, ..., and the manifest NAME.json, for `out` =
    NAME.onnx.

    Its width is the widest that the files serve. Its robustness (λ) is the manifest's default, and without one what its
    branch stands for: 0 for clean, 1 for adversarial. `settings` are what widths and robustness cost and score. With
    `gradient`, NAME.gradient.onnx (of each base) also gives the gradient to the images: see `gradient_export`.
    """
    require_onnx()
    plan, out, width = predictor.plan, Path(out), predictor.width
    if predictor.statistics == "images":
        raise HardyError(
            "norm inference_statistics is 'batch': such a network needs its neighbours. Export one with running or "
            "recomputed statistics."
        )
    mixes = "adversarial" in (plan.method.norm.branches or ())
    level = predictor.robustness if predictor.robustness is not None else float(predictor.branch == "adversarial")
    files = []
    with disk(f"the export {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
    for number, base in enumerate(predictor.bases, 1):
        path = out.with_name(f"{out.stem}.base{number}.onnx" if len(predictor.bases) > 1 else f"{out.stem}.onnx")
        write_base(base, path, predictor.shape, branch=predictor.branch, mixes=mixes)
        entry = {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        if gradient:
            beside = path.with_name(f"{path.stem}.gradient.onnx")
            write_gradient(
                base, beside, shape=predictor.shape, classes=len(classes), branch=predictor.branch, mixes=mixes
            )
            entry["gradient"] = beside.name
            entry["gradient_sha256"] = hashlib.sha256(beside.read_bytes()).hexdigest()
        files.append(entry)
    several = plan.method.budget.bases > 1
    manifest = {
        "format": FORMAT,
        "name": name,
        "method": plan.method.name,
        "round": round_number,
        "input": list(predictor.shape),
        "classes": list(classes),
        "bases": files,
        "widths": plan.method.budget.widths[: len(files)] if several else [width],
        "widest": width,
        "branch": predictor.branch,
        "robustness": level if mixes else None,
        "client": predictor.client,
        "settings": [row for row in settings if row["width"] == width or (several and row["width"] <= width)],
        "versions": versions(),
    }
    path = out.with_suffix(".json")
    write_atomic(path, json.dumps(manifest, indent=1).encode())
    return path


def require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise HardyError("export needs onnx and onnxscript: pip install 'hardy-fl[export]'.") from error


class _OneBase(nn.Module):
    """A base as ONNX has it: (images, robustness) -> logits."""

    def __init__(self, base: nn.Module, branch: str) -> None:
        super().__init__()
        self.base, self.branch = deepcopy(base).cpu().float(), branch

    def forward(self, images: Tensor, robustness: Tensor | None = None) -> Tensor:
        with calling(branch=self.branch, statistics="running", key=None, robustness=robustness):
            logits: Tensor = self.base(images)
        return logits


def write_base(base: nn.Module, path: Path, shape: tuple[int, ...], *, branch: str, mixes: bool) -> None:
    """A base as an ONNX file: (images, robustness) -> logits, or images -> logits where it mixes no branches."""
    module, images = _OneBase(base, branch), torch.rand(2, *shape)
    given = (images, torch.tensor(0.5)) if mixes else (images,)
    several = {0: torch.export.Dim("images", min=1, max=65536)}
    with warnings.catch_warnings(), torch.no_grad(), disk(str(path)):
        warnings.simplefilter("ignore")  # the exporter's own, about itself
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # such as that torchvision is not installed
        torch.onnx.export(
            module.eval(),
            given,
            str(path),
            input_names=["images", "robustness"][: len(given)],
            output_names=["logits"],
            dynamic_shapes=(several, {})[: len(given)],
            opset_version=_OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
