"""Every source reads its genuine format, and says what is wrong with a bad copy."""

import bz2
import gzip
import json
import os
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from hardy.data import array_sources, given, picture_sources, readers, sources
from hardy.data.readers import SPLITS, Array, Splits
from hardy.errors import HardyError

Write = Callable[[Path, Splits], None]


REAL = os.environ.get("HARDY_DATA")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARDY_DATA", raising=False)


def _random(shape: tuple[int, ...], classes: int = 10) -> Splits:
    rng = np.random.default_rng(0)
    (x, y), (xt, yt) = (
        (
            rng.integers(0, 256, (n, *shape), np.uint8),
            np.concatenate([[0, classes - 1], rng.integers(0, classes, n - 2)]),
        )
        for n in (10, 4)
    )
    return x, y, xt, yt


def _save(path: Path, splits: Splits, **changes: Array) -> None:
    arrays: dict[str, Any] = dict(zip(SPLITS, splits, strict=True))
    np.savez(path, **arrays | changes)


def _npz(name: str) -> Write:
    return lambda root, splits: _save(root / name, splits)


def _batches(root: Path, splits: Splits, names: list[str], content: Callable[[Array, Array], bytes]) -> None:
    """Training rows spread over all files but the last."""
    x, y, xt, yt = splits
    parts = [*zip(np.array_split(x, len(names) - 1), np.array_split(y, len(names) - 1), strict=True), (xt, yt)]
    for name, part in zip(names, parts, strict=True):
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_bytes(content(*part))


def _planes(x: Array) -> Array:
    return x.transpose(0, 3, 1, 2).reshape(len(x), 3072)


CIFAR10 = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


def _cifar10_python(root: Path, splits: Splits) -> None:
    def content(x: Array, y: Array) -> bytes:
        return pickle.dumps({b"batch_label": b"one", b"labels": y.tolist(), b"data": _planes(x)}, protocol=2)

    _batches(root, splits, [f"cifar-10-batches-py/{name}" for name in CIFAR10], content)


def _cifar10_binary(root: Path, splits: Splits) -> None:
    def content(x: Array, y: Array) -> bytes:
        return np.column_stack([y.astype(np.uint8), _planes(x)]).tobytes()

    _batches(root, splits, [f"cifar-10-batches-bin/{name}.bin" for name in CIFAR10], content)


def _cifar100_python(root: Path, splits: Splits) -> None:
    def content(x: Array, y: Array) -> bytes:
        labels = {b"coarse_labels": [3] * len(y), b"fine_labels": y.tolist()}
        return pickle.dumps(labels | {b"data": np.asfortranarray(_planes(x))}, protocol=2)

    _batches(root, splits, ["cifar-100-python/train", "cifar-100-python/test"], content)


def _cifar100_binary(root: Path, splits: Splits) -> None:
    def content(x: Array, y: Array) -> bytes:
        return np.column_stack([np.full(len(y), 3, np.uint8), y.astype(np.uint8), _planes(x)]).tobytes()

    _batches(root, splits, ["cifar-100-binary/train.bin", "cifar-100-binary/test.bin"], content)


def _svhn_matlab(root: Path, splits: Splits) -> None:
    for split, x, y in (("train", *splits[:2]), ("test", *splits[2:])):
        y = np.where(y == 0, 10, y).astype(np.uint8)[:, None]
        savemat(root / f"{split}_32x32.mat", {"X": x.transpose(1, 2, 3, 0), "y": y}, do_compression=True)


def _idx(folder: str, pack: Callable[[bytes], bytes] = bytes, ending: str = "") -> Write:
    def write(root: Path, splits: Splits) -> None:
        (root / folder).mkdir(exist_ok=True)
        names = [f"{s}-{kind}-ubyte{ending}" for s in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
        for name, array in zip(names, splits, strict=True):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (root / folder / name).write_bytes(pack(header + array.astype(np.uint8).tobytes()))

    return write


def _libsvm(pack: Callable[[bytes], bytes] = bytes, ending: str = "") -> Write:
    def content(x: Array, y: Array) -> bytes:
        lines = (
            f"{label + 1} " + " ".join(f"{i}:{v:.6f}" for i, v in enumerate(image.ravel() / 127.5 - 1, 1)) + " \n"
            for image, label in zip(x, y, strict=True)
        )
        return pack("".join(lines).encode())

    return lambda root, splits: _batches(root, splits, [f"usps{ending}", f"usps.t{ending}"], content)


COLOUR, GREY = (32, 32, 3), (28, 28)
FORMATS = {
    "cifar10 npz": (_npz("cifar10.npz"), COLOUR),
    "cifar10 python": (_cifar10_python, COLOUR),
    "cifar10 binary": (_cifar10_binary, COLOUR),
    "cifar100 npz": (_npz("cifar100.npz"), COLOUR),
    "cifar100 python": (_cifar100_python, COLOUR),
    "cifar100 binary": (_cifar100_binary, COLOUR),
    "svhn npz": (_npz("svhn.npz"), COLOUR),
    "svhn matlab": (_svhn_matlab, COLOUR),
    "mnist npz": (_npz("mnist.npz"), GREY),
    "mnist idx": (_idx("mnist"), GREY),
    "fashion_mnist npz": (_npz("fashion_mnist.npz"), (28, 28, 1)),
    "fashion_mnist idx": (_idx("", gzip.compress, ".gz"), GREY),
    "usps npz": (_npz("digits_usps.npz"), (28, 28, 3)),
    "usps libsvm": (_libsvm(), (16, 16)),
    "usps libsvm bz2": (_libsvm(bz2.compress, ".bz2"), (16, 16)),
}


@pytest.mark.parametrize("case", FORMATS)
def test_reads_every_format_and_names_the_file_cut_short(case: str, tmp_path: Path) -> None:
    name, (write, shape) = case.partition(" ")[0], FORMATS[case]
    splits = _random(shape, 100 if name == "cifar100" else 10)
    write(tmp_path, splits)

    data = sources.load_dataset(name, tmp_path)
    (domain,) = data.domains
    for split, expected in zip(SPLITS, splits, strict=True):
        array = getattr(domain, split)
        assert array.dtype == (np.uint8 if split[0] == "x" else np.int64)
        np.testing.assert_array_equal(array, expected.reshape(array.shape))
    assert data.shape[1:] == shape[:2]
    assert len(data.classes) == domain.y_train.max() + 1

    for file in [path for path in tmp_path.rglob("*") if path.is_file()]:
        whole = file.read_bytes()
        file.write_bytes(whole[:-100])
        with pytest.raises(HardyError, match=rf"{file.name} cannot be read as .* Fetch the file again"):
            sources.load_dataset(name, tmp_path)
        file.write_bytes(whole)


def test_reads_pickles_written_by_python_2(tmp_path: Path) -> None:
    """The published batches hold byte strings and numpy's names of that time."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    pixels = np.arange(2 * 3072).astype(np.uint8).reshape(2, 3072)
    minus_one = b"J\xff\xff\xff\xff"
    array = b"".join(
        [
            b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + short(b"b") + b"tR",
            b"(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\n(" + short(b"u1") + b"K\x00K\x01tR",
            b"(K\x03" + short(b"|") + b"NNN" + 2 * minus_one + b"K\x00tb",
            b"\x89T" + struct.pack("<i", pixels.size) + pixels.tobytes() + b"tb",
        ]
    )
    file = tmp_path / "batch"
    file.write_bytes(b"\x80\x02}(" + short(b"data") + array + short(b"labels") + b"](K\x07K\x02eu.")
    x, y = readers.cifar_python(file, b"labels")
    np.testing.assert_array_equal(_planes(x), pixels)
    assert y.tolist() == [7, 2]


class _Hostile:
    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.call = call, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("call", [os.mkdir, eval])
def test_a_hostile_pickle_is_refused_and_does_not_run(call: Callable[..., object], tmp_path: Path) -> None:
    file, harm = tmp_path / "batch", tmp_path / "harm"
    argument = str(harm) if call is os.mkdir else f"__import__('os').mkdir({str(harm)!r})"
    for content in (_Hostile(call, argument), {b"labels": [0], b"data": _Hostile(call, argument)}):
        file.write_bytes(pickle.dumps(content, protocol=2))
        with pytest.raises(HardyError, match=rf"batch .*asks to run \w+\.{call.__name__}"):
            readers.cifar_python(file, b"labels")
    assert not harm.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": np.array([0, 1, 2, 10])}, "test labels run from 0 to 10; allowed are 0 to 9"),
        ({"y_train": np.arange(9)}, r"training labels are int64 \[9\]; make them one integer for each of the 10"),
        ({"y_train": np.zeros(10)}, "training labels are float64"),
        ({"x_train": np.zeros((10, 32, 32, 3))}, "training images are float64"),
        ({"x_train": np.zeros((10, 3, 32, 32), np.uint8)}, r"training images are uint8 \[10, 3, 32, 32\]"),
        ({"x_test": np.zeros((4, 28, 28, 3), np.uint8)}, r"several shapes \(\[28, 28, 3\] .*\[32, 32, 3\]"),
        ({"x_test": np.zeros((0, 32, 32, 3), np.uint8), "y_test": np.zeros(0, np.int64)}, "empty"),
        ({"y_test": np.array([0, 1, 2, {}], object)}, "cifar10.npz cannot be read as an .npz archive"),
    ],
)
def test_bad_arrays_are_refused(changes: dict[str, Array], message: str, tmp_path: Path) -> None:
    _save(tmp_path / "cifar10.npz", _random(COLOUR), **changes)
    with pytest.raises(HardyError, match=message) as caught:
        sources.load_dataset("cifar10", tmp_path)
    assert "cifar10" in str(caught.value)


def test_an_absent_array_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "svhn.npz", x_train=np.zeros((1, 32, 32, 3), np.uint8), y_train=np.zeros(1, np.int64))
    with pytest.raises(HardyError, match=r"svhn\.npz has no array x_test, y_test"):
        sources.load_dataset("svhn", tmp_path)


def test_missing_files_say_what_to_fetch_and_where_to_put_it(tmp_path: Path) -> None:
    for name in sources.SOURCES.keys() - {"mini_digits"}:
        for root in (None, tmp_path, tmp_path / "absent"):
            with pytest.raises(HardyError, match="HARDY_DATA or --data") as caught:
                sources.load_dataset(name, root)
            assert sources.SOURCES[name].fetch in str(caught.value)
    _cifar10_python(tmp_path, _random(COLOUR))
    (tmp_path / "cifar-10-batches-py/data_batch_3").unlink()
    with pytest.raises(HardyError, match=r"missing cifar-10-batches-py/data_batch_3\."):
        sources.load_dataset("cifar10", tmp_path)


def test_the_root_is_explicit_or_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sources.data_root(None) is None
    monkeypatch.setenv("HARDY_DATA", str(tmp_path))
    assert sources.data_root(None) == tmp_path
    assert sources.data_root(Path("here")) == Path("here")
    _save(tmp_path / "mnist.npz", _random(GREY))
    assert sources.load_dataset("mnist").shape == (1, 28, 28)


def test_digits_keeps_the_order_and_the_first_rows(tmp_path: Path) -> None:
    x, y, xt, yt = _random((28, 28, 3))
    for shift, name in enumerate(["mnist", "mnistm", "svhn", "synth", "usps"]):
        _save(tmp_path / f"digits_{name}.npz", (x + np.uint8(shift), y, xt, yt))
    data = sources.load_dataset("digits", tmp_path, limit=3)
    assert [domain.name for domain in data.domains] == ["mnist", "svhn", "usps", "synth", "mnistm"]
    np.testing.assert_array_equal(data.domains[1].x_train, x[:3] + np.uint8(2))
    assert len(data.domains[1].x_test) == 4
    two = sources.load_dataset("digits", tmp_path, domains=["usps", "mnist"])
    assert [domain.name for domain in two.domains] == ["mnist", "usps"]
    with pytest.raises(HardyError, match="unknown domain of digits 'cifar'"):
        sources.load_dataset("digits", tmp_path, domains=["cifar"])
    with pytest.raises(HardyError, match="limit is 0"):
        sources.load_dataset("digits", tmp_path, limit=0)
    with pytest.raises(HardyError, match=r"unknown option of digits 'limits'\. Did you mean 'limit'"):
        sources.load_dataset("digits", tmp_path, limits=3)
    with pytest.raises(HardyError, match=r"unknown data source \(no such file or folder either\) 'digit'"):
        sources.load_dataset("digit", tmp_path)
    _save(tmp_path / "digits_usps.npz", _random((16, 16)))
    with pytest.raises(HardyError, match=r"several shapes \(\[16, 16, 1\] in usps, \[28, 28, 3\] in mnist"):
        sources.load_dataset("digits", tmp_path)


def test_mnist_among_the_five_domains_is_grey(tmp_path: Path) -> None:
    x, y, xt, yt = _random((28, 28, 1))
    _save(tmp_path / "digits_mnist.npz", (x.repeat(3, -1), y, xt.repeat(3, -1), yt))
    (domain,) = sources.load_dataset("mnist", tmp_path).domains
    np.testing.assert_array_equal(domain.x_train, x)
    np.testing.assert_array_equal(domain.x_test, xt)
    _save(tmp_path / "digits_mnist.npz", _random((28, 28, 3)))
    with pytest.raises(HardyError, match="holds colours"):
        sources.load_dataset("mnist", tmp_path)


def _picture(path: Path, level: int, size: tuple[int, int] = (10, 12)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (level, 0, 255 - level)).save(path)


def _domainnet(root: Path) -> None:
    """Each picture shows its class in its red level; one class is not among the ten."""
    for domain in ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"):
        for label, name in enumerate(picture_sources._DOMAINNET_CLASSES.split()):
            for i in range(5):
                _picture(root / domain / name / f"{i}.png", 20 * label + i)
        _picture(root / domain / "aircraft_carrier" / "0.png", 255)


def test_domainnet_without_lists_holds_out_a_fifth_of_each_class(tmp_path: Path) -> None:
    _domainnet(tmp_path / "domainnet")
    data, again = (sources.load_dataset("domainnet", tmp_path, size=8) for _ in range(2))
    assert data.shape == (3, 8, 8)
    assert len(data.domains) == 6
    for domain, same in zip(data.domains, again.domains, strict=True):
        assert np.bincount(domain.y_train).tolist() == [4] * 10
        assert np.bincount(domain.y_test).tolist() == [1] * 10
        shown = [x[:, 0, 0, 0].tolist() for x in (domain.x_train, domain.x_test)]
        assert sorted(shown[0] + shown[1]) == [20 * label + i for label in range(10) for i in range(5)]
        np.testing.assert_array_equal(domain.x_train[:, 0, 0, 0] // 20, domain.y_train)
        np.testing.assert_array_equal(domain.x_train, same.x_train)
    assert len(set(data.domains[0].y_train[:10].tolist())) > 3, "rows are shuffled"


def test_domainnet_follows_the_official_lists(tmp_path: Path) -> None:
    _domainnet(tmp_path)
    for domain in ("clipart", "sketch"):
        (tmp_path / f"{domain}_train.txt").write_text(
            f"{domain}/aircraft_carrier/0.png 0\n{domain}/zebra/1.png 344\n{domain}/bird/4.png 20\n"
        )
        (tmp_path / f"{domain}_test.txt").write_text(f"{domain}/bird/0.png 20\n")
    clipart, *_ = sources.load_dataset("domainnet", tmp_path, size=8).domains
    assert sorted(clipart.y_train.tolist()) == [0, 9]
    assert sorted(clipart.x_train[:, 0, 0, 0].tolist()) == [4, 181]
    assert clipart.y_test.tolist() == [0]

    (tmp_path / "sketch/zebra/1.png").unlink()
    with pytest.raises(HardyError, match=r"sketch_train\.txt names 1 pictures .*1\.png"):
        sources.load_dataset("domainnet", tmp_path, size=8)
    (tmp_path / "clipart_test.txt").unlink()
    with pytest.raises(HardyError, match=r"clipart_test\.txt cannot be read"):
        sources.load_dataset("domainnet", tmp_path, size=8)


def _leaf(file: Path, users: dict[str, list[tuple[str, int]]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(samples) for samples in users.values()],
        "user_data": {u: {"x": [x for x, _ in own], "y": [y for _, y in own]} for u, own in users.items()},
    }
    file.write_text(json.dumps(content))


def test_celeba_reads_leaf_with_owners(tmp_path: Path) -> None:
    data = tmp_path / "celeba/data"
    for i in range(6):
        _picture(data / f"raw/img_align_celeba/{i:06}.jpg", 40 * i)
    _leaf(data / "train/a.json", {"70": [("000000.jpg", 1), ("000001.jpg", 0)], "9": [("000002.jpg", 1)]})
    _leaf(data / "train/b.json", {"31": [("000003.jpg", 0)]})
    _leaf(data / "test/a.json", {"31": [("000004.jpg", 1)], "5": [("000005.jpg", 0)]})
    dataset = sources.load_dataset("celeba", tmp_path)
    (domain,) = dataset.domains
    assert dataset.shape == (3, 84, 84)
    assert dataset.classes == ("not smiling", "smiling")
    assert domain.y_train.tolist() == [1, 0, 1, 0]
    assert domain.owners_train is not None
    assert domain.owners_test is not None
    assert domain.owners_train.tolist() == [0, 0, 1, 2]
    assert domain.owners_test.tolist() == [2, 3]
    np.testing.assert_allclose(domain.x_train[:, 40, 40, 0], [0, 40, 80, 120], atol=3)  # jpeg

    damaged = json.loads((data / "test/a.json").read_text()) | {"num_samples": [1, 2]}
    (data / "test/a.json").write_text(json.dumps(damaged))
    with pytest.raises(HardyError, match=r"a\.json .*user 5 has 1 samples, announced were 2"):
        sources.load_dataset("celeba", tmp_path)


def test_image_folder_splits_or_takes_the_given_split(tmp_path: Path) -> None:
    for i in range(5):
        for domain, name in (("sun", "cat"), ("sun", "dog"), ("rain", "dog")):
            _picture(tmp_path / f"open/{domain}/{name}/{i}.png", i)
            _picture(tmp_path / f"given/{'test' if i == 4 else 'train'}/{domain}/{name}/{i}.JPG", i)
    for folder in ("open", "given"):
        data = sources.load_dataset("image_folder", tmp_path / folder, size=8 if folder == "given" else None)
        rain, sun = data.domains
        assert (rain.name, sun.name, data.classes) == ("rain", "sun", ("cat", "dog"))
        assert data.shape == ((3, 8, 8) if folder == "given" else (3, 12, 10))
        assert (rain.y_train.tolist(), rain.y_test.tolist()) == ([1] * 4, [1])
        assert np.bincount(sun.y_train).tolist() == [4, 4]

    _picture(tmp_path / "open/sun/cat/9.png", 0, (7, 7))
    with pytest.raises(HardyError, match=r"is 7 x 7, .* 10 x 12.* need the option size|10 x 12, .* 7 x 7"):
        sources.load_dataset("image_folder", tmp_path / "open")
    (tmp_path / "open/sun/cat/9.png").write_bytes(b"no picture")
    with pytest.raises(HardyError, match=r"9\.png cannot be read as an image"):
        sources.load_dataset("image_folder", tmp_path / "open", size=8)
    for split in ("train", "test"):
        _picture(tmp_path / f"flat/{split}/cat/0.png", 0)
        _picture(tmp_path / f"flat/{split}/dog/0.png", 9)
    (flat,) = sources.load_dataset("image_folder", tmp_path / "flat").domains
    assert (sorted(flat.y_train.tolist()), sorted(flat.y_test.tolist())) == ([0, 1], [0, 1])


def test_a_missing_extra_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _svhn_matlab(tmp_path, _random(COLOUR))
    _picture(tmp_path / "sun/cat/0.png", 0)
    _picture(tmp_path / "sun/cat/1.png", 0)
    for module, name in (("scipy.io", "svhn"), ("PIL.Image", "image_folder")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(HardyError, match=r"pip install 'hardy-fl\[images\]'"):
            sources.load_dataset(name, tmp_path)


def test_arrays_takes_bytes_or_floats_and_domains() -> None:
    x, y, xt, yt = _random(GREY, 3)
    data = given.arrays(x / 255, y, xt[..., None], yt)
    np.testing.assert_allclose(data.domains[0].x_train[..., 0], x / 255, rtol=1e-6)
    assert (data.name, data.classes, data.shape) == ("arrays", ("0", "1", "2"), (1, 28, 28))
    both = given.arrays({"a": (x, y, xt, yt), "b": (xt, yt, x, y)}, classes=["i", "j", "k"], name="mine")
    assert [domain.name for domain in both.domains] == ["a", "b"]
    assert (both.name, both.classes) == ("mine", ("i", "j", "k"))

    with pytest.raises(HardyError, match=r"pixels run from 0.0 to 255.0; floats must be in \[0, 1\]"):
        given.arrays(x.astype(float), y, xt, yt)
    with pytest.raises(HardyError, match="labels run from 0 to 2; allowed are 0 to 1"):
        given.arrays(x, y, xt, yt, classes=["i", "j"])
    with pytest.raises(HardyError, match="labels run from -1 to 2"):
        given.arrays(x, np.where(y == 0, -1, y), xt, yt)
    with pytest.raises(HardyError, match="has no labels"):
        given.arrays(x)
    with pytest.raises(HardyError, match="arrays: a has 3 arrays"):
        given.arrays({"a": (x, y, xt)})
    with pytest.raises(HardyError, match="no domains"):
        given.arrays({})


def test_mini_digits_gets_colour_and_keeps_the_order_of_domains(tmp_path: Path) -> None:
    grey, colour = _random(GREY), _random((28, 28, 3))
    arrays: dict[str, Any] = {f"pen_{key}": array for key, array in zip(SPLITS, grey, strict=True)}
    arrays |= {f"a_b_{key}": array for key, array in zip(SPLITS, colour, strict=True)}
    np.savez(tmp_path / "mini.npz", **arrays)
    data = array_sources._domains_of(tmp_path / "mini.npz")
    assert [domain.name for domain in data.domains] == ["pen", "a_b"]
    for channel in range(3):
        np.testing.assert_array_equal(data.domains[0].x_train[..., channel], grey[0])
    np.testing.assert_array_equal(data.domains[1].x_test, colour[2])


def test_mini_digits_is_embedded() -> None:
    data = sources.load_dataset("mini_digits")
    assert data.shape == (3, 28, 28)
    assert all(set(domain.y_train.tolist()) == set(range(10)) for domain in data.domains)


def test_the_list_tells_what_is_there(tmp_path: Path) -> None:
    _save(tmp_path / "cifar10.npz", _random(COLOUR))
    (tmp_path / "svhn.npz").write_bytes(b"damaged")
    _idx("mnist")(tmp_path, _random(GREY))
    (tmp_path / "mnist/t10k-labels-idx1-ubyte").unlink()
    _libsvm()(tmp_path, _random((16, 16)))
    listed = {at.name: at for at in sources.available(tmp_path)}
    assert list(listed) == list(sources.SOURCES)
    assert (listed["cifar10"].present, listed["cifar10"].images) == (True, 14)
    assert listed["cifar10"].where == str(tmp_path / "cifar10.npz")
    assert (listed["usps"].present, listed["usps"].images) == (True, None)
    assert not listed["svhn"].present
    assert "svhn.npz cannot be read" in listed["svhn"].where
    assert (listed["mnist"].present, listed["mnist"].where) == (False, "missing t10k-labels-idx1-ubyte")
    assert not any(at.present for at in sources.available(None) if at.name != "mini_digits")

    text = sources.describe(tmp_path).splitlines()
    head, row = text[2], next(line for line in text if line.startswith("cifar10 "))
    assert row.index("Photographs") == head.index("what")
    assert row.index(str(tmp_path)) == head.index("where")
    assert row.split()[1:3] == ["yes", "14"]
    assert any(line.startswith("mnist ") and sources.SOURCES["mnist"].fetch in line for line in text)


@pytest.mark.skipif(not REAL, reason="HARDY_DATA names no folder of real data")
def test_real_data_that_is_there_loads() -> None:
    root = Path(REAL or "")
    for listing in sources.available(root):
        if listing.present and listing.images:
            data = sources.load_dataset(listing.name, root)
            assert sum(len(d.y_train) + len(d.y_test) for d in data.domains) == listing.images
