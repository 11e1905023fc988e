"""Contact sheets as PNG, with nothing but zlib."""

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_NOTE = b"Description\0\0\0\0\0"  # an uncompressed iTXt text without language
_GAP = 2


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def displayable(x: NDArray[Any]) -> NDArray[np.uint8]:
    """Images [n, C, H, W], bytes or numbers in [0, 1], as bytes [n, H, W, 1 or 3]: of many channels the first three, of
    two the first."""
    channels = {2: 1}.get(x.shape[1], min(x.shape[1], 3))
    shown = x[:, :channels].transpose(0, 2, 3, 1)
    return shown if shown.dtype == np.uint8 else np.rint(shown.clip(0, 1) * 255).astype(np.uint8)


def image_grid_png(rows: Sequence[NDArray[np.uint8]], labels: Sequence[str]) -> bytes:
    """Rows of images [n, H, W, 1 or 3], doubled in size. The labels are not drawn: see `row_labels`."""
    height, width = (2 * side + _GAP for side in rows[0].shape[1:3])
    columns = max(len(row) for row in rows)
    sheet = np.zeros((len(rows) * height - _GAP, columns * width - _GAP, 4), np.uint8)  # the gaps are transparent
    for top, row in enumerate(rows):
        for left, image in enumerate(row.repeat(2, axis=1).repeat(2, axis=2)):
            y, x = top * height, left * width
            sheet[y : y + height - _GAP, x : x + width - _GAP, :3] = image
            sheet[y : y + height - _GAP, x : x + width - _GAP, 3] = 255
    return _png(sheet, "\n".join(labels))


def _png(sheet: NDArray[np.uint8], note: str) -> bytes:
    """Pixels [H, W, 4] with a text beside them."""
    lines = np.pad(sheet.reshape(len(sheet), -1), ((0, 0), (1, 0)))  # PNG: each line starts with its filter, none
    header = struct.pack(">IIBBBBB", sheet.shape[1], sheet.shape[0], 8, 6, 0, 0, 0)
    return (
        _SIGNATURE
        + _chunk(b"IHDR", header)
        + _chunk(b"iTXt", _NOTE + note.encode())
        + _chunk(b"IDAT", zlib.compress(lines.tobytes(), 6))  # 9 takes nine times as long for 7 % less
        + _chunk(b"IEND", b"")
    )


def row_labels(png: bytes) -> list[str]:
    """The labels that image_grid_png stored; none for any other picture."""
    _, found, rest = png.partition(b"iTXt" + _NOTE)
    size = int.from_bytes(png[len(png) - len(rest) - len(_NOTE) - 8 :][:4]) - len(_NOTE) if found else 0
    return rest[:size].decode().splitlines()


def picture_rows(png: bytes) -> list[tuple[bytes, int]]:
    """Each row of a sheet that image_grid_png made as a PNG of its own, and the width of a column in pixels."""
    labels = row_labels(png)
    if not labels or not whole_png(png):
        return []
    wide, tall = struct.unpack(">II", png[16:24])
    start = png.index(b"IDAT") + 4
    lines = zlib.decompress(png[start : start + int.from_bytes(png[start - 8 : start - 4])])
    sheet = np.frombuffer(lines, np.uint8).reshape(tall, 1 + 4 * wide)[:, 1:].reshape(tall, wide, 4)
    pitch = (tall + _GAP) // len(labels)
    inner = sheet[: pitch - _GAP]  # a transparent column is a gap
    gaps = np.flatnonzero((inner[..., 3] == 0).all(0))
    column = int(gaps[0]) + _GAP if len(gaps) else wide + _GAP
    return [(_png(sheet[top : top + pitch - _GAP], ""), column) for top in range(0, tall, pitch)]


def whole_png(png: bytes) -> bool:
    """Whether every chunk of a PNG is there and fits its checksum."""
    at, kind = len(_SIGNATURE), b""
    if not png.startswith(_SIGNATURE):
        return False
    while at < len(png) and kind != b"IEND":
        size, kind = int.from_bytes(png[at : at + 4]), png[at + 4 : at + 8]
        if png[at + 8 + size : at + 12 + size] != struct.pack(">I", zlib.crc32(png[at + 4 : at + 8 + size])):
            return False
        at += 12 + size
    return kind == b"IEND" and at == len(png)
