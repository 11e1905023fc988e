"""Runs an exported network: width and robustness are chosen, and changed, at inference.

It needs numpy and onnxruntime (`pip install 'hardy-fl[export]'`), and the files that `hardy export` wrote.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardy.errors import HardyError

FORMAT = 1


class OnnxPredictor:
    """predictor(images) gives the logits of images in [0, 1], [N, C, H, W]; `customise` changes width and robustness.

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
            self.manifest: dict[str, Any] = json.loads(self.path.read_text("utf-8"))
            known = self.manifest["format"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HardyError(
                f"{self.path} is no manifest of an export: {error}. Write one with `hardy export`."
            ) from error
        if known != FORMAT:
            raise HardyError(f"{self.path} has format {known}; this version reads {FORMAT}. Export it again.")
        self.classes: list[str] = self.manifest["classes"]
        self.sessions: list[Any] = []
        self.robustness: float | None = self.manifest["robustness"]
        self.customise(width=self.manifest["widest"] if width is None else width, robustness=robustness)

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
        if x.ndim != 4 or list(x.shape[1:]) != self.manifest["input"]:
            raise HardyError(
                f"images are {list(x.shape)}; they must be [N, {', '.join(map(str, self.manifest['input']))}]."
            )
        given: dict[str, Any] = {"images": x}
        if self.robustness is not None:
            given["robustness"] = np.asarray(self.robustness, dtype=np.float32)
        answers = [session.run(None, given)[0] for session in self.sessions]
        mean: NDArray[np.float32] = np.mean(answers, axis=0, dtype=np.float32)
        return mean

    def _open(self, base: dict[str, str]) -> Any:
        path = self.path.with_name(base["file"])
        try:
            content = path.read_bytes()
        except OSError as error:
            raise HardyError(
                f"base file {path} is missing: {error.strerror}. Copy it beside {self.path.name}."
            ) from error
        if hashlib.sha256(content).hexdigest() != base["sha256"]:
            raise HardyError(f"base file {path} was altered: its checksum is not the manifest's. Export it again.")
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        try:
            import onnxruntime
        except ImportError as error:
            raise HardyError("running an export needs onnxruntime: pip install 'hardy-fl[export]'.") from error
        return onnxruntime.InferenceSession(content, providers=self.providers)
