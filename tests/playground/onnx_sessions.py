"""The networks of a page in ONNX Runtime, outside a browser."""

import pytest


def session_of(file, binary):
    """A runtime session of a network in a page."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="the export extra is not installed")
    model, *weights = (binary[at : at + length] for at, length in (file["model"], *file["weights"]))
    options = onnxruntime.SessionOptions()
    names = [str(at) for at in range(len(weights))]
    options.add_external_initializers_from_files_in_memory(names, weights, list(map(len, weights)))
    return onnxruntime.InferenceSession(model, options)
