"""Runs an exported network: width and robustness are chosen, and changed, at inference.

It needs numpy and onnxruntime (`pip install 'hardy-fl[export]'`), and the files that `hardy export` wrote.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardy.errors import HardyError, printable

FORMAT = 1
_LARGEST_MANIFEST = 2**24


class OnnxPredictor:
    """predictor(images) gives the logits of images in [0, 1], [N, C, H, W], or of feature vectors, [N, F]; `customise`
    changes width and robustness.

    It reads a manifest, or the .onnx name it was exported under. Only the bases that the width needs are loaded.
    """

    def __init__(
        self,
        manifest: Path | str,
        *,
        width: float | None = None,
        robustness: float | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
    ) -> None:
        self.path, self.providers = Path(manifest).with_suffix(".json"), list(providers)
        try:
            if self.path.stat().st_size > _LARGEST_MANIFEST:
                raise ValueError(f"{self.path.stat().st_size:,} bytes")
            self.manifest: dict[str, Any] = json.loads(self.path.read_text("utf-8"))
            known = self.manifest["format"]
            if known != FORMAT:
                raise HardyError(f"{self.path} has format {known!r}; this version reads {FORMAT}. Export it again.")
            self.classes: list[str] = self.manifest["classes"]
            self.sessions: list[Any] = []
            self.robustness: float | None = self.manifest["robustness"]
            self.customise(width=self.manifest["widest"] if width is None else width, robustness=robustness)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise HardyError(
                f"{self.path} is no manifest of an export: {printable(error)}. Write one with `hardy export`."
            ) from error

    def customise(self, *, width: float | None = None, robustness: float | None = None) -> "OnnxPredictor":
        """Changes width, robustness (λ) or both; loads or frees only the bases it needs."""
        if width is not None:
            widths: list[float] = self.manifest["widths"]
            if not widths[0] - 1e-9 <= width <= self.manifest["widest"]:
                raise HardyError(
                    f"width {width} was not exported; it must be in [{widths[0]:g}, {self.manifest['widest']:g}]."
                )
            count = sum(known <= width + 1e-9 for known in widths)
            self.sessions = self.sessions[:count]
            while len(self.sessions) < count:
                self.sessions.append(self._open(self.manifest["bases"][len(self.sessions)]))
            self.width = width
        if robustness is not None:
            if self.manifest["robustness"] is None:
                raise HardyError(f"robustness {robustness} cannot be chosen: the network has no adversarial branch.")
            if not 0 <= robustness <= 1:
                raise HardyError(f"robustness is {robustness}; it must be in [0, 1].")
            self.robustness = robustness
        return self

    def __call__(self, images: NDArray[Any]) -> NDArray[np.float32]:
        x = np.asarray(images, dtype=np.float32)
        if x.ndim < 2 or list(x.shape[1:]) != self.manifest["input"]:
            raise HardyError(
                f"inputs are {list(x.shape)}; they must be [N, {', '.join(map(str, self.manifest['input']))}]."
            )
        given: dict[str, Any] = {"images": x}
        if self.robustness is not None:
            given["robustness"] = np.asarray(self.robustness, dtype=np.float32)
        answers = [session.run(None, given)[0] for session in self.sessions]
        mean: NDArray[np.float32] = np.mean(answers, axis=0, dtype=np.float32)
        return mean

    def _open(self, base: dict[str, str]) -> Any:
        path = self.path.with_name(base["file"])  # a name with a folder in it is a ValueError
        try:
            content = path.read_bytes()
        except OSError as error:
            raise HardyError(
                f"base file {path} is missing: {error.strerror}. Copy it beside {self.path.name}."
            ) from error
        if hashlib.sha256(content).hexdigest() != base["sha256"]:
            raise HardyError(f"base file {path} was altered: its checksum is not the manifest's. Export it again.")
        return open_session(content, f"base file {path}", self.providers, remedy="Export it again.")


def open_session(content: bytes, what: str, providers: Sequence[str], *, remedy: str) -> Any:
    """A session of onnxruntime for a model that may come from anybody; `what` and `remedy` begin and end an error."""
    try:
        outside = _names_other_files(content)
    except (IndexError, ValueError) as error:
        raise HardyError(f"{what} is no ONNX file: {error}. {remedy}") from error
    if outside:
        raise HardyError(
            f"{what} takes tensors from other files (external data), which could be any file of this machine. "
            "Export it again in one file."
        )
    try:
        import onnxruntime
    except ImportError as error:
        raise HardyError("running ONNX needs onnxruntime: pip install 'hardy-fl[export]'.") from error
    try:
        return onnxruntime.InferenceSession(content, providers=list(providers))
    except Exception as error:  # the runtime has a class of its own for each mistake
        raise HardyError(f"{what} cannot be run: {printable(error, 300)}. {remedy}") from error


_PARTS = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "tensor": {},
}
"""ONNX messages that may hold tensors: field number -> what it holds"""
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14


def _names_other_files(model: bytes) -> bool:
    """Whether a tensor of an ONNX model lies in another file. The fields of the protobuf are walked by hand: the
    runtime would open the files, and the onnx package may not be there."""
    to_do = [("model", 0, len(model))]
    while to_do:
        kind, at, end = to_do.pop()
        while at < end:
            tag, at = _number(model, at)
            field, wire = tag >> 3, tag & 7
            elsewhere = kind == "tensor" and field in (_EXTERNAL_DATA, _DATA_LOCATION)
            if elsewhere and (wire != 0 or _number(model, at)[0]):
                return True
            if wire == 0:
                _, at = _number(model, at)
            elif wire == 2:
                size, at = _number(model, at)
                if at + size > end:
                    raise ValueError("it is cut short")
                if field in _PARTS[kind]:
                    to_do.append((_PARTS[kind][field], at, at + size))
                at += size
            elif wire in (1, 5):
                at += 8 if wire == 1 else 4
            else:
                raise ValueError(f"field of type {wire}")
    return False


def _number(model: bytes, at: int) -> tuple[int, int]:
    """A varint, and where the next field begins."""
    value = shift = 0
    while True:
        byte = model[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
