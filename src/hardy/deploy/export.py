"""Export: a trained network as ONNX, one file a base, with robustness as an input at run time.

Beside the files lies a manifest (JSON): input size, classes, files with their checksums, and what each setting of width
and robustness costs and scores. `hardy.deploy` runs it without torch.
"""

import hashlib
import json
import warnings
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hardy.core.layers import calling
from hardy.core.net import Net
from hardy.core.state import disk, versions, write_atomic
from hardy.deploy.onnx_runtime import FORMAT
from hardy.errors import HardyError

if TYPE_CHECKING:
    from hardy.runs.run import Run

_OPSET = 18


def export(
    run: "Run", out: Path | str, *, width: float = 1.0, robustness: float | None = None, client: int | None = None
) -> Path:
    """Writes the bases that a width needs as NAME.base1.onnx, ... and the manifest NAME.json, for `out` = NAME.onnx;
    robustness (λ) becomes the manifest's default. Where clients have networks of their own, it is one client's."""
    _require_onnx()
    plan, data, out = run.engine.plan, run.engine.data, Path(out)
    if plan.method.norm.inference_statistics == "batch":
        raise HardyError(
            "norm serving is 'batch': such a network needs its neighbours; export one with running or post."
        )
    mixes = "adversarial" in (plan.method.norm.branches or ())
    branch = run.experiment.evaluation.predict_branch
    predictor = run.customise(width=width, robustness=robustness, client=client)
    files = []
    with disk(f"the export {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
    for number, net in enumerate(predictor.mixture.nets, 1):
        path = out.with_name(f"{out.stem}.base{number}.onnx")
        _write(_Deployable(net, branch), path, data.shape, mixes=mixes)
        files.append({"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    manifest = {
        "format": FORMAT,
        "name": run.experiment.name,
        "method": plan.method.name,
        "round": run.state.round,
        "input": list(data.shape),
        "classes": list(data.classes),
        "bases": files,
        "widths": plan.method.budget.widths[: len(files)] if plan.method.budget.bases > 1 else [width],
        "widest": width,
        "robustness": (0.0 if robustness is None else robustness) if mixes else None,
        "client": client,
        "settings": _settings(run, width, len(files)),
        "versions": versions(),
    }
    path = out.with_suffix(".json")
    write_atomic(path, json.dumps(manifest, indent=1).encode())
    return path


def _settings(run: "Run", width: float, bases: int) -> list[dict[str, Any]]:
    """What is known of the settings that the files can serve."""
    from hardy.runs.evaluate import settings

    known: list[dict[str, Any]] = []
    if run.folder is not None and (run.folder / "settings.json").exists():
        found = json.loads((run.folder / "settings.json").read_text("utf-8"))
        known = found["settings"] if found["round"] == run.state.round else []
    known = known or settings(run)
    return [row for row in known if row["width"] == width or (bases > 1 and row["width"] <= width)]


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise HardyError("export needs onnx and onnxscript: pip install 'hardy-fl[export]'.") from error


class _Deployable(nn.Module):
    """A base as a plain module: (images, robustness) -> logits."""

    def __init__(self, net: Net, branch: str) -> None:
        super().__init__()
        self.model, self.branch = deepcopy(net.model).cpu(), branch
        for name, value in {**net.trained, **net.buffers}.items():
            path, _, own = name.rpartition(".")
            getattr(self.model.get_submodule(path), own).data = value.detach().cpu().clone()
        self.float()

    def forward(self, images: Tensor, robustness: Tensor | None = None) -> Tensor:
        with calling(branch=self.branch, statistics="running", key=None, robustness=robustness):
            logits: Tensor = self.model(images)
        return logits


def _write(module: nn.Module, path: Path, shape: tuple[int, int, int], *, mixes: bool) -> None:
    images = torch.rand(2, *shape)
    given = (images, torch.tensor(0.5)) if mixes else (images,)
    several = {0: torch.export.Dim("images", min=1, max=65536)}
    with warnings.catch_warnings(), torch.no_grad(), disk(str(path)):
        warnings.simplefilter("ignore")  # the exporter's own, about itself
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
