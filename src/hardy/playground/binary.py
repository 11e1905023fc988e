"""The bytes of a page: images, ONNX files and their weights, one after the other, each of them once."""

from pathlib import Path
from typing import Any

_LEAST = 256
"""bytes of a tensor that is worth a place of its own"""
Place = list[int]
"""where it starts, and its length"""


class Binary:
    """Collects pieces of bytes; equal pieces share a place."""

    def __init__(self) -> None:
        self._pieces: dict[bytes, int] = {}
        self._size = 0

    def add(self, piece: bytes) -> Place:
        if piece not in self._pieces:
            self._pieces[piece] = self._size
            self._size += len(piece)
        return [self._pieces[piece], len(piece)]

    def add_onnx(self, path: Path) -> dict[str, Any]:
        """An ONNX file with its weights apart, so that a network and its gradient share them. Each is ONNX's external
        data under its number: the file `0` is the first of `weights`."""
        import onnx

        model = onnx.load(str(path))
        weights: list[Place] = []
        for tensor in model.graph.initializer:
            plain = onnx.numpy_helper.to_array(tensor).tobytes()
            if len(plain) < _LEAST:
                continue
            tensor.ClearField("raw_data")
            tensor.ClearField("float_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in {"location": str(len(weights)), "offset": "0", "length": str(len(plain))}.items():
                tensor.external_data.add(key=key, value=value)
            weights.append(self.add(plain))
        return {"model": self.add(model.SerializeToString()), "weights": weights}

    def bytes(self) -> bytes:
        return b"".join(self._pieces)
