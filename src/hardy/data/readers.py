"""Readers of the formats data sets are published in: arrays, or a HardyError that names the file."""

import bz2
import gzip
import importlib
import io
import json
import pickle
import pickletools
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardy.errors import HardyError

Array = NDArray[Any]  # as found in a file: not checked yet
Splits = tuple[Array, Array, Array, Array]
SPLITS = ("x_train", "y_train", "x_test", "y_test")


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Turns whatever a parser raises into an error that names the file."""
    try:
        yield
    except HardyError:
        raise
    except Exception as error:  # damaged bytes make a parser raise anything
        why = str(error) or type(error).__name__
        raise HardyError(f"{path} cannot be read as {kind} ({why}). Fetch the file again.") from error


def extra_module(module: str, what: object, extra: str = "images") -> Any:
    """A module of an extra, or the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise HardyError(f"{what} needs {package}, which is missing: pip install 'hardy-fl[{extra}]'.") from None


_FREE, _RATIO, _PIECE = 2**26, 100, 2**20
"""bytes that any file may unpack to, and times its own size beyond; a few bytes can unpack to all memory there is"""
_MOST_PIXELS = 50_000_000
"""of one picture"""
_MOST_MEMO = 10**6
"""the highest slot a pickle may name; the unpickler makes room for all below it"""


def refuse_bomb(unpacked: int, packed: int) -> None:
    """An error for a file of few bytes that would take a lot of memory."""
    most = max(_FREE, _RATIO * packed)
    if unpacked > most:
        raise ValueError(f"its {packed:,} bytes unpack to more than {most:,}, which no data set needs: do not trust it")


def _content(path: Path) -> bytes:
    """The bytes of a file, unpacked where its name says that it is packed."""
    if path.suffix not in (".gz", ".bz2"):
        return path.read_bytes()
    pieces, size = [], 0
    with gzip.open(path) if path.suffix == ".gz" else bz2.open(path) as file:
        while piece := file.read(_PIECE):
            pieces.append(piece)
            size += len(piece)
            refuse_bomb(size, path.stat().st_size)
    return b"".join(pieces)


def npz(path: Path, endings: tuple[str, ...]) -> dict[str, Array]:
    """The arrays whose names end so, in the order of the file; the others are not touched."""
    with reading(path, "an .npz archive"):
        if not zipfile.is_zipfile(path):  # numpy would take it for a pickle, and say so
            raise ValueError("no zip archive, or one cut short")
        with zipfile.ZipFile(path) as packed:
            sizes = {entry.filename.removesuffix(".npy"): entry.file_size for entry in packed.infolist()}
            refuse_bomb(sum(sizes[name] for name in sizes if name.endswith(endings)), path.stat().st_size)
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if name.endswith(endings)}
        if not arrays:
            raise ValueError(f"no array is named {' or '.join(endings)}")
        return arrays


def four(where: Path, arrays: Mapping[str, Array], prefix: str = "") -> Splits:
    """The two splits out of arrays by name."""
    missing = [prefix + split for split in SPLITS if prefix + split not in arrays]
    if missing:
        raise HardyError(f"{where} has no array {', '.join(missing)}. Each split needs images x and labels y.")
    x_train, y_train, x_test, y_test = (arrays[prefix + split] for split in SPLITS)
    return x_train, y_train, x_test, y_test


def npz_splits(path: Path) -> Splits:
    return four(path, npz(path, SPLITS))


def grey_splits(path: Path) -> Splits:
    """Grey images that repeat their value in three channels, with one."""
    x_train, y_train, x_test, y_test = npz_splits(path)
    for x in (x_train, x_test):
        if x.ndim == 4 and (x != x[..., :1]).any():
            raise HardyError(f"{path} holds colours, and grey images are wanted. Fetch the file again.")
    return x_train[..., :1], y_train, x_test[..., :1], y_test


def batches(read: Callable[..., tuple[Array, Array]], **options: object) -> Callable[..., Splits]:
    """A reader of files that hold images and labels each, of which the last is the test split."""

    def splits(*paths: Path) -> Splits:
        *train, (x_test, y_test) = (read(path, **options) for path in paths)
        xs, ys = zip(*train, strict=True)
        return np.concatenate(xs), np.concatenate(ys), x_test, y_test

    return splits


def idx_splits(*paths: Path) -> Splits:
    x_train, y_train, x_test, y_test = map(idx, paths)
    return x_train, y_train, x_test, y_test


def idx(path: Path) -> Array:
    """The array of an IDX file of unsigned bytes (MNIST)."""
    with reading(path, "an IDX file"):
        content = _content(path)
        if content[:3] != b"\0\0\x08":
            raise ValueError("no IDX header of unsigned bytes")
        start = 4 + 4 * content[3]
        return np.frombuffer(content, np.uint8, offset=start).reshape(np.frombuffer(content[4:start], ">u4"))


class _Array:
    """Stands in for numpy's array: a pickle names numpy's functions, but runs none of them."""

    value: Array

    def __setstate__(self, state: tuple[int, tuple[int, ...], "_Byte", bool, bytes]) -> None:
        _, shape, _, fortran, content = state
        self.value = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Byte:
    """Stands in for numpy's dtype: only uint8 is known."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise ValueError(f"pixels of type {code!r}, not uint8")

    def __setstate__(self, state: object) -> None: ...


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _encode(text: str, *_: object) -> bytes:
    return text.encode("latin1")  # how Python 3 writes bytes in a protocol 2 pickle


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Byte,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    """Unpickles what the CIFAR batches hold, and refuses to call anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise ValueError(f"it asks to run {module}.{name}, which no CIFAR batch needs: do not trust it")
        return _KNOWN[module, name]


def _planes(rows: Array) -> Array:
    """CIFAR keeps an image as three planes of 32 x 32."""
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def cifar_python(path: Path, labels: bytes) -> tuple[Array, Array]:
    """A batch of the python version; `labels` is b"labels" (CIFAR-10) or b"fine_labels" (CIFAR-100)."""
    with reading(path, "a CIFAR python batch"):
        content = path.read_bytes()
        for opcode, slot, _ in pickletools.genops(content):
            if opcode.name == "LONG_BINPUT" and int(slot or 0) > _MOST_MEMO:
                raise ValueError(f"it asks for {slot:,} slots of memory: do not trust it")
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        return _planes(batch[b"data"].value), np.array(batch[labels])


def cifar_binary(path: Path, labels: int) -> tuple[Array, Array]:
    """A file of the binary version: `labels` bytes, of which the last counts, before each image."""
    with reading(path, "a CIFAR binary batch"):
        rows = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, labels + 3072)
        return _planes(rows[:, labels:]), rows[:, labels - 1]


def svhn_matlab(path: Path) -> tuple[Array, Array]:
    """SVHN's cropped digits, where the label of the digit 0 is 10."""
    with reading(path, "a MATLAB file of SVHN"):
        refuse_bomb(_matlab_size(path.read_bytes()), path.stat().st_size)
        content = extra_module("scipy.io", path).loadmat(path, variable_names=("X", "y"))
        labels = content["y"].ravel()
        return np.ascontiguousarray(content["X"].transpose(3, 0, 1, 2)), np.where(labels == 10, 0, labels)


def _matlab_size(content: bytes) -> int:
    """Bytes that the packed variables of a MATLAB 5 file unpack to."""
    at, size = 128, 0
    while at + 8 <= len(content):
        kind, length = (int.from_bytes(content[at + 4 * word : at + 4 * word + 4], "little") for word in (0, 1))
        if kind == _MATLAB_PACKED:
            unpack, rest = zlib.decompressobj(), content[at + 8 : at + 8 + length]
            while rest and size <= _RATIO * len(content) + _FREE:
                size += len(unpack.decompress(rest, _PIECE))
                rest = unpack.unconsumed_tail
        at += 8 + length
    return size


_MATLAB_PACKED = 15
_POSITIONS = [str(position) for position in range(1, 257)]


def usps_libsvm(path: Path) -> tuple[Array, Array]:
    """USPS as libsvm text: label 1 is the digit 0; the 16 x 16 features run from -1 (black) to 1."""
    with reading(path, "libsvm text of USPS"):
        rows = [line.replace(":", " ").split() for line in _content(path).decode("ascii").splitlines()]
        if any(row[1::2] != _POSITIONS for row in rows):
            raise ValueError("a line without exactly the features 1 to 256")
        features = np.array([row[2::2] for row in rows], np.float64)
        if not (np.abs(features) <= 1).all():
            raise ValueError("features outside [-1, 1]")
        pixels = np.rint((features + 1) * 127.5).astype(np.uint8)
        return pixels.reshape(-1, 16, 16), np.array([int(row[0]) - 1 for row in rows])


def leaf(path: Path) -> list[tuple[str, str, int]]:
    """(user, picture, label) of each sample in a JSON file of LEAF."""
    with reading(path, "LEAF JSON"):
        content = json.loads(path.read_bytes())
        samples = []
        for user, count in zip(content["users"], content["num_samples"], strict=True):
            own = content["user_data"][user]
            if len(own["x"]) != count:
                raise ValueError(f"user {user} has {len(own['x'])} samples, announced were {count}")
            samples += [(user, x, int(y)) for x, y in zip(own["x"], own["y"], strict=True)]
        return samples


def picture_pixels(picture: Any, size: int | None) -> Array:
    """A Pillow picture as RGB bytes, or as 16-bit grey if it is that; resized to size x size (bilinear)."""
    if picture.width * picture.height > _MOST_PIXELS:
        raise ValueError(f"{picture.width} x {picture.height} pixels, at most {_MOST_PIXELS:,} are read")
    deep = picture.mode.startswith("I")
    picture = picture.convert("F" if deep else "RGB")
    if size:
        picture = picture.resize((size, size), extra_module("PIL.Image", "a picture").Resampling.BILINEAR)
    pixels = np.asarray(picture)
    return np.rint(pixels).clip(0, 65535).astype(np.uint16)[..., None] if deep else pixels


def images(paths: Sequence[Path], size: int | None) -> Array:
    """Pixels of pictures, RGB or 16-bit grey; without a size they must agree in theirs."""
    pillow = extra_module("PIL.Image", paths[0])

    def pixels(path: Path) -> Array:
        with reading(path, "an image"), pillow.open(path) as picture:
            return picture_pixels(picture, size)

    first = pixels(paths[0])
    result = np.empty((len(paths), *first.shape), first.dtype)

    def fill(row: int) -> None:
        image = pixels(paths[row])
        if image.dtype != result.dtype:
            raise HardyError(f"{paths[row]} has {image.dtype} pixels, but {paths[0]} {result.dtype}. Bring all to one.")
        if image.shape != result.shape[1:]:
            (height, width, _), (first_height, first_width, _) = image.shape, result.shape[1:]
            raise HardyError(
                f"{paths[row]} is {width} x {height}, but {paths[0]} is {first_width} x {first_height}. "
                "Images of several sizes need the option size."
            )
        result[row] = image

    with ThreadPoolExecutor() as pool:  # Pillow decodes outside the interpreter lock
        for _ in pool.map(fill, range(len(paths))):
            pass
    return result


def picture_list(path: Path) -> list[str]:
    """The pictures named by a list of DomainNet, whose lines are "picture label"."""
    with reading(path, "a list of pictures and labels"):
        pairs = [line.rsplit(maxsplit=1) for line in path.read_text("utf-8").splitlines() if line.strip()]
        return [picture for picture, label in pairs if int(label) >= 0]
