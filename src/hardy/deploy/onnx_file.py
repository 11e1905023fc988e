"""Any ONNX classifier as a function of images: one of Hardy's exports, or a file from elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardy.deploy.onnx_runtime import OnnxPredictor, open_session
from hardy.errors import HardyError

ArrayClassifier = Callable[[NDArray[np.float32]], NDArray[Any]]
"""images in [0, 1] -> logits"""


def open_onnx(path: Path | str) -> ArrayClassifier:
    """A function of images in [0, 1]. Beside an export of Hardy lies its manifest, which says how it is served."""
    path = Path(path)
    if path.with_suffix(".json").is_file():
        return OnnxPredictor(path)
    if not path.is_file():
        raise HardyError(f"{path} is not there, nor is a manifest {path.with_suffix('.json').name} of `hardy export`.")
    content = path.read_bytes()
    session = open_session(
        content, str(path), ["CPUExecutionProvider"], remedy="Give a model that onnxruntime can run."
    )
    inputs = session.get_inputs()
    if len(inputs) != 1 or inputs[0].type != "tensor(float)":
        kinds = ", ".join(f"{one.name}: {one.type}" for one in inputs)
        raise HardyError(f"{path} takes {kinds}; it must take one input of images, tensor(float).")
    name, fixed = inputs[0].name, inputs[0].shape[0] if isinstance(inputs[0].shape[0], int) else None

    def logits(images: NDArray[np.float32]) -> NDArray[Any]:
        size, found = fixed or max(1, len(images)), []
        for start in range(0, len(images), size):
            some = images[start : start + size]
            short = size - len(some) if fixed else 0
            padded = np.concatenate([some, np.zeros((short, *some.shape[1:]), some.dtype)]) if short else some
            found.append(session.run(None, {name: padded})[0][: len(some)])
        answer: NDArray[Any] = np.concatenate(found)
        return answer

    return logits
