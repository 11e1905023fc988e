"""Named sources of labelled images: one embedded, the others read from the folder of HARDY_DATA or --data."""

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from hardy import random
from hardy.data import readers
from hardy.data.dataset import Dataset, Domain, Labels, Pixels
from hardy.data.readers import SPLITS, Array, Splits
from hardy.errors import HardyError, unknown

_Read = TypeVar("_Read", bound=Callable[..., Dataset])
_Layouts = dict[tuple[str, ...], Callable[..., Splits]]  # files, and what reads them
_Rows = list[tuple[Path, int]]  # picture and label

_DIGITS = "0 1 2 3 4 5 6 7 8 9"
_PICTURES = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True, kw_only=True)
class Source:
    """`read(root, **options)` needs every file of one of the layouts, in root/<name> or in root."""

    name: str
    about: str
    fetch: str  # what to fetch, as the object of that verb
    layouts: Collection[tuple[str, ...]]
    read: Callable[..., Dataset]


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Whether a source is there: `where`, or what is missing. `images` is None when not cheaply known."""

    name: str
    present: bool
    where: str
    images: int | None


SOURCES: dict[str, Source] = {}


def _source(fetch: str, layouts: Collection[tuple[str, ...]]) -> Callable[[_Read], _Read]:
    """Enters a function among the sources, described by the first line of its docstring."""

    def enter(read: _Read) -> _Read:
        name, about = read.__name__, (read.__doc__ or "").partition("\n")[0].removesuffix(".")
        SOURCES[name] = Source(name=name, about=about, fetch=fetch, layouts=layouts, read=read)
        return read

    return enter


def data_root(explicit: Path | None = None) -> Path | None:
    """The folder of real data: the explicit one, else that of HARDY_DATA, else none."""
    named = explicit or os.environ.get("HARDY_DATA")
    return Path(named).expanduser() if named else None


def load(name: str, root: Path | None = None, **options: object) -> Dataset:
    """The data of a source, checked. Without a root, HARDY_DATA names it."""
    if name not in SOURCES:
        raise unknown("data source", name, SOURCES)
    _, *allowed = inspect.signature(SOURCES[name].read).parameters
    for option in options:
        if option not in allowed:
            raise unknown(f"option of {name}", option, allowed)
    return SOURCES[name].read(root, **options)


def available(root: Path | None = None) -> list[Listing]:
    """Which sources can be loaded."""
    return [_listing(source, data_root(root)) for source in SOURCES.values()]


def describe(root: Path | None = None) -> str:
    """The sources as a text table, and what to fetch for those that are not there."""
    listings = available(root)
    table = [("source", "here", "images", "what", "where")]
    for at in listings:
        count = f"{at.images:,}" if at.images is not None else "?" if at.present else "-"
        table.append((at.name, "yes" if at.present else "no", count, SOURCES[at.name].about, at.where))
    a, b, c, d, _ = (max(map(len, column)) for column in zip(*table, strict=True))
    lines = [f"data folder: {data_root(root) or 'none (set HARDY_DATA or give --data)'}", ""]
    lines += [f"{name:<{a}}  {here:<{b}}  {n:>{c}}  {what:<{d}}  {where}" for name, here, n, what, where in table]
    fetch = [f"{at.name:<{a}}  {SOURCES[at.name].fetch}" for at in listings if not at.present]
    return "\n".join([*lines, "", "to fetch:", *fetch] if fetch else lines)


# Finding


@dataclass(frozen=True)
class _Found:
    base: Path
    layout: tuple[str, ...]
    files: tuple[Path, ...]
    missing: tuple[str, ...]

    def lack(self) -> str:
        more = f" and {len(self.missing) - 3} more" if len(self.missing) > 3 else ""
        return f"missing {', '.join(self.missing[:3])}{more}"


def _look(source: Source, root: Path) -> _Found:
    """The first complete layout, else the one with most of its files there."""
    tried = []
    for base in (root / source.name, root):
        for layout in source.layouts:
            first = {p: next((f for f in base.glob(p) if f.is_file()), None) for p in layout}
            files = tuple(f for f in first.values() if f)
            tried.append(_Found(base, layout, files, tuple(p for p, f in first.items() if not f)))
    return next((found for found in tried if not found.missing), max(tried, key=lambda found: len(found.files)))


def _require(name: str, root: Path | None) -> _Found:
    source, root = SOURCES[name], data_root(root)
    folder = f"the folder that HARDY_DATA or --data names, or into {name}/ there"
    remedy = f"Fetch {source.fetch}. Put it into {folder}."
    if root is None:
        raise HardyError(f"{name} needs real data and no data folder is named. {remedy}")
    if not root.is_dir():
        raise HardyError(f"the data folder {root} is not a folder. {remedy}")
    found = _look(source, root)
    if found.missing:
        raise HardyError(f"{name} is not in {root}: {found.lack()}. {remedy}")
    return found


def _listing(source: Source, root: Path | None) -> Listing:
    if not source.layouts:
        with resources.as_file(_MINI) as path:
            return _counted(source.name, "embedded", [path])
    found = _look(source, root) if root else None
    if not found or found.missing:
        where = found.lack() if found else "no data folder"
        return Listing(name=source.name, present=False, where=where, images=None)
    one = len(found.files) == 1
    return _counted(source.name, str(found.files[0] if one else found.base), found.files)


def _counted(name: str, where: str, files: Sequence[Path]) -> Listing:
    if any(file.suffix != ".npz" for file in files):
        return Listing(name=name, present=True, where=where, images=None)
    try:
        labels = [y for file in files for y in readers.npz(file, ("y_train", "y_test")).values()]
    except HardyError as error:
        return Listing(name=name, present=False, where=str(error), images=None)
    return Listing(name=name, present=True, where=where, images=sum(y.size for y in labels))


# Checking


def _checked(where: str, x: Array, y: Array, classes: int | None) -> tuple[Pixels, Labels]:
    if x.ndim == 3:
        x = x[..., None]
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[-1] not in (1, 3):
        wanted = "uint8 [image, height, width] or [image, height, width, 1 or 3]"
        raise HardyError(f"{where} images are {x.dtype} {list(x.shape)}; make them {wanted}.")
    if y.dtype.kind not in "iu" or y.shape != x.shape[:1]:
        wanted = f"one integer for each of the {len(x)} images"
        raise HardyError(f"{where} labels are {y.dtype} {list(y.shape)}; make them {wanted}.")
    if not x.size:
        raise HardyError(f"{where} images are {list(x.shape)}, which is empty; give at least one.")
    if y.min() < 0 or (classes is not None and y.max() >= classes):
        top = "the number of classes less one" if classes is None else classes - 1
        raise HardyError(f"{where} labels run from {y.min()} to {y.max()}; allowed are 0 to {top}.")
    return x, y.astype(np.int64)


def _domain(name: str, where: object, splits: Splits, classes: int | None) -> Domain:
    x_train, y_train = _checked(f"{where}: training", *splits[:2], classes)
    x_test, y_test = _checked(f"{where}: test", *splits[2:], classes)
    return Domain(name=name, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


def _dataset(name: str, classes: Sequence[str], domains: Sequence[Domain]) -> Dataset:
    first = domains[0].x_train.shape[1:]
    for domain in domains:
        for x in (domain.x_train, domain.x_test):
            if x.shape[1:] != first:
                shapes = f"{list(x.shape[1:])} in {domain.name}, {list(first)} in {domains[0].name}"
                raise HardyError(f"{name} has images of several shapes ({shapes}); bring all to one.")
    return Dataset(name=name, classes=tuple(classes), domains=tuple(domains))


def _positive(option: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, int) or value < 1):
        raise HardyError(f"{option} is {value!r}; give a whole number of at least 1, or leave it out.")


# Sources of arrays


_MINI = resources.files("hardy.data").joinpath("mini_digits.npz")


@_source("nothing: it comes with hardy-fl, so install that again", ())
def mini_digits(root: Path | None = None, *, domains: Sequence[str] = ()) -> Dataset:
    """Small digits of several domains, embedded.

    `domains` keeps only those named.
    """
    with resources.as_file(_MINI) as path:
        whole = _domains_of(path)
    known = {domain.name for domain in whole.domains}
    for name in domains:
        if name not in known:
            raise unknown("domain of mini_digits", name, known)
    return replace(whole, domains=tuple(domain for domain in whole.domains if domain.name in (domains or known)))


def _domains_of(path: Path) -> Dataset:
    found = readers.npz(path, SPLITS)
    colour = {key: np.repeat(x[..., None], 3, axis=-1) if x.ndim == 3 else x for key, x in found.items()}
    names = dict.fromkeys(key.rsplit("_", 2)[0] for key in found)
    domains = [_domain(name, f"{path} ({name})", readers.four(path, colour, f"{name}_"), 10) for name in names]
    return _dataset("mini_digits", _DIGITS.split(), domains)


_FEDBN = ("mnist", "svhn", "usps", "synth", "mnistm")
_FEDBN_FILES = tuple(f"digits_{domain}.npz" for domain in _FEDBN)


@_source(", ".join(_FEDBN_FILES), [_FEDBN_FILES])
def digits(root: Path | None = None, *, limit: int | None = None) -> Dataset:
    """FedBN's digits in five domains, 28 x 28 colour.

    `limit` keeps at most the first so many training rows of each domain.
    """
    _positive("limit", limit)
    domains = []
    for name, file in zip(_FEDBN, _require("digits", root).files, strict=True):
        domain = _domain(name, file, readers.npz_splits(file), 10)
        domains.append(replace(domain, x_train=domain.x_train[:limit], y_train=domain.y_train[:limit]))
    return _dataset("digits", _DIGITS.split(), domains)


def _single(name: str, layouts: _Layouts, classes: str, root: Path | None) -> Dataset:
    """One domain, from the layout that is there."""
    found, names = _require(name, root), classes.split()
    where = ", ".join(map(str, found.files))
    return _dataset(name, names, [_domain(name, where, layouts[found.layout](*found.files), len(names))])


_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR10_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_CIFAR10: _Layouts = {
    ("cifar10.npz",): readers.npz_splits,
    tuple(f"cifar-10-batches-py/{file}" for file in _CIFAR10_FILES): readers.batches(
        readers.cifar_python, labels=b"labels"
    ),
    tuple(f"cifar-10-batches-bin/{file}.bin" for file in _CIFAR10_FILES): readers.batches(
        readers.cifar_binary, labels=1
    ),
}


@_source(
    "cifar10.npz, or from the CIFAR home page the python version (cifar-10-batches-py/) or the binary "
    "version (cifar-10-batches-bin/), unpacked",
    _CIFAR10,
)
def cifar10(root: Path | None = None) -> Dataset:
    """Photographs of ten classes, 32 x 32 colour."""
    return _single("cifar10", _CIFAR10, _CIFAR10_CLASSES, root)


_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
_CIFAR100: _Layouts = {
    ("cifar100.npz",): readers.npz_splits,
    ("cifar-100-python/train", "cifar-100-python/test"): readers.batches(readers.cifar_python, labels=b"fine_labels"),
    ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"): readers.batches(readers.cifar_binary, labels=2),
}


@_source(
    "cifar100.npz, or from the CIFAR home page the python version (cifar-100-python/) or the binary "
    "version (cifar-100-binary/), unpacked",
    _CIFAR100,
)
def cifar100(root: Path | None = None) -> Dataset:
    """Photographs of a hundred classes, 32 x 32 colour."""
    return _single("cifar100", _CIFAR100, _CIFAR100_CLASSES, root)


_SVHN: _Layouts = {
    ("svhn.npz",): readers.npz_splits,
    ("train_32x32.mat", "test_32x32.mat"): readers.batches(readers.svhn_matlab),
}


@_source("svhn.npz, or train_32x32.mat and test_32x32.mat from the SVHN home page", _SVHN)
def svhn(root: Path | None = None) -> Dataset:
    """House numbers, 32 x 32 colour."""
    return _single("svhn", _SVHN, _DIGITS, root)


_IDX_FILES = tuple(f"{s}-{kind}-ubyte" for s in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_IDX: _Layouts = {tuple(file + packed for file in _IDX_FILES): readers.idx_splits for packed in ("", ".gz")}
_MNIST: _Layouts = {("mnist.npz",): readers.npz_splits, **_IDX}
_FASHION: _Layouts = {("fashion_mnist.npz",): readers.npz_splits, **_IDX}
_FASHION_CLASSES = "T-shirt/top trouser pullover dress coat sandal shirt sneaker bag ankle_boot"


@_source(f"mnist.npz, or from the MNIST home page {', '.join(_IDX_FILES)} (plain or .gz)", _MNIST)
def mnist(root: Path | None = None) -> Dataset:
    """Handwritten digits, 28 x 28 grey."""
    return _single("mnist", _MNIST, _DIGITS, root)


@_source(f"fashion_mnist.npz, or from its home page {', '.join(_IDX_FILES)} (plain or .gz)", _FASHION)
def fashion_mnist(root: Path | None = None) -> Dataset:
    """Clothes, 28 x 28 grey."""
    return _single("fashion_mnist", _FASHION, _FASHION_CLASSES, root)


_USPS: _Layouts = {
    ("usps.npz",): readers.npz_splits,
    ("digits_usps.npz",): readers.npz_splits,
    ("usps", "usps.t"): readers.batches(readers.usps_libsvm),
    ("usps.bz2", "usps.t.bz2"): readers.batches(readers.usps_libsvm),
}


@_source("usps.npz, digits_usps.npz, or usps and usps.t (plain or .bz2) from the LIBSVM data page", _USPS)
def usps(root: Path | None = None) -> Dataset:
    """Digits of postal codes, 16 x 16 grey or as in the .npz."""
    return _single("usps", _USPS, _DIGITS, root)


def arrays(
    x_train: ArrayLike | Mapping[str, Sequence[ArrayLike]],
    y_train: ArrayLike | None = None,
    x_test: ArrayLike | None = None,
    y_test: ArrayLike | None = None,
    *,
    classes: Sequence[str] | None = None,
    name: str = "arrays",
) -> Dataset:
    """Your own arrays: images uint8 or in [0, 1] (rounded to 256 levels), NHWC or NHW.

    A mapping gives x_train, y_train, x_test, y_test for each domain.
    """
    given = x_train if isinstance(x_train, Mapping) else {name: (x_train, y_train, x_test, y_test)}
    if not given:
        raise HardyError(f"{name} has no domains; give at least one.")
    domains = []
    for domain, four in given.items():
        if len(four) != len(SPLITS):
            raise HardyError(f"{name}: domain {domain} has {len(four)} arrays; give {', '.join(SPLITS)}.")
        x, y, xt, yt = map(np.asarray, four)
        splits = _bytes(domain, x), y, _bytes(domain, xt), yt
        domains.append(_domain(domain, domain, splits, None if classes is None else len(classes)))
    if classes is None:
        top = max(int(y.max()) for domain in domains for y in (domain.y_train, domain.y_test))
        classes = [str(label) for label in range(top + 1)]
    return _dataset(name, classes, domains)


def _bytes(where: str, x: Array) -> Array:
    if x.dtype.kind != "f":
        return x
    if not ((x >= 0) & (x <= 1)).all():
        raise HardyError(f"{where}: pixels run from {x.min()} to {x.max()}; bring floats into [0, 1].")
    pixels: Pixels = np.rint(x * 255).astype(np.uint8)
    return pixels


# Sources of pictures


def _pictures(folder: Path, depth: int = 2) -> list[Path]:
    files = sorted(folder.glob("/".join(["*"] * depth)))
    return [file for file in files if file.suffix.lower() in _PICTURES and not file.name.startswith(".")]


def _rows(folder: Path, classes: Sequence[str]) -> _Rows:
    """folder/class/picture, shuffled (always alike), so that the first rows are of all classes."""
    rows = [(file, classes.index(file.parent.name)) for file in _pictures(folder) if file.parent.name in classes]
    return [rows[i] for i in random.stream(0, "pictures", folder.name).permutation(len(rows))]


def _held_out(rows: _Rows) -> tuple[_Rows, _Rows]:
    """Training and test rows: each class gives a fifth, and at least one of two, to the test."""
    test: set[Path] = set()
    for label in {label for _, label in rows}:
        own = [file for file, other in rows if other == label]
        test.update(own[: max(1, round(len(own) / 5))] if len(own) > 1 else [])
    return [row for row in rows if row[0] not in test], [row for row in rows if row[0] in test]


def _picture_domain(where: Path, train: _Rows, test: _Rows, *, name: str, classes: int, size: int | None) -> Domain:
    for split, rows in (("training", train), ("test", test)):
        if not rows:
            raise HardyError(
                f"{where} gives {name} no {split} images; put at least one there ({', '.join(_PICTURES)})."
            )
    (x_train, y_train), (x_test, y_test) = (
        (readers.images([file for file, _ in rows], size), np.array([label for _, label in rows]))
        for rows in (train, test)
    )
    return _domain(name, where, (x_train, y_train, x_test, y_test), classes)


_DOMAINNET_CLASSES = "bird feather headphones ice_cream teapot tiger whale windmill wine_glass zebra"
_DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")


@_source(
    "the six domains from the DomainNet home page as <domain>/<class>/*.jpg, and beside them the lists "
    "<domain>_train.txt and <domain>_test.txt",
    [tuple(f"{domain}/{name}/*.*" for domain in _DOMAINNET for name in _DOMAINNET_CLASSES.split())],
)
def domainnet(root: Path | None = None, *, size: int = 256) -> Dataset:
    """FedBN's ten classes of DomainNet in six domains.

    Split by the official lists, or 80 to 20 where there are none.
    """
    _positive("size", size)
    base, classes, domains = _require("domainnet", root).base, _DOMAINNET_CLASSES.split(), []
    for name in _DOMAINNET:
        rows = _rows(base / name, classes)
        lists = [base / f"{name}_{split}.txt" for split in ("train", "test")]
        listed = any(file.exists() for file in lists)
        train, test = (_listed(file, rows, classes) for file in lists) if listed else _held_out(rows)
        domains.append(_picture_domain(base / name, train, test, name=name, classes=len(classes), size=size))
    return _dataset("domainnet", classes, domains)


def _listed(file: Path, rows: _Rows, classes: Sequence[str]) -> _Rows:
    """The rows that an official list names. Its labels number all 345 classes, so folders tell the class."""
    named = {file.parent / name for name in readers.picture_list(file) if Path(name).parent.name in classes}
    absent = named - {picture for picture, _ in rows}
    if absent:
        raise HardyError(f"{file} names {len(absent)} pictures not there, as {min(absent)}. Fetch that domain again.")
    return [row for row in rows if row[0] in named]


@_source(
    "CelebA and its split by LEAF: data/train/*.json, data/test/*.json and data/raw/img_align_celeba/*.jpg",
    [("data/train/*.json", "data/test/*.json", "data/raw/img_align_celeba/*.*")],
)
def celeba(root: Path | None = None, *, size: int = 84) -> Dataset:
    """LEAF's celebrities, smiling or not.

    The owner of a row is its celebrity, numbered through both splits.
    """
    _positive("size", size)
    data = _require("celeba", root).base / "data"
    train, test = (
        [sample for file in sorted((data / split).glob("*.json")) for sample in readers.leaf(file)]
        for split in ("train", "test")
    )
    users = {user: i for i, user in enumerate(dict.fromkeys(user for user, _, _ in train + test))}
    folder = data / "raw" / "img_align_celeba"
    rows = ([(folder / picture, smiles) for _, picture, smiles in samples] for samples in (train, test))
    domain = replace(
        _picture_domain(data, *rows, name="celeba", classes=2, size=size),
        owners_train=np.array([users[user] for user, _, _ in train]),
        owners_test=np.array([users[user] for user, _, _ in test]),
    )
    return _dataset("celeba", ("not smiling", "smiling"), [domain])


@_source(
    "pictures as <domain>/<class>/*.jpg or *.png, or as train/<domain>/<class>/* and test/<domain>/<class>/*",
    [("*/*/*.[jpJP]*",), ("train/*/*/*.[jpJP]*", "test/*/*/*.[jpJP]*")],
)
def image_folder(root: Path | None = None, *, size: int | None = None) -> Dataset:
    """Your own pictures.

    Split by train/ and test/, or 80 to 20 where there are none.
    """
    _positive("size", size)
    base = _require("image_folder", root).base
    halves = [base / "train", base / "test"]
    split = all(half.is_dir() for half in halves)
    tops = halves if split else [base]
    files = [file for top in tops for file in _pictures(top, 3)]
    if not files:
        place = f"{'train/' if split else ''}<domain>/<class>/"
        raise HardyError(f"{base} holds no pictures as {place}*{_PICTURES[0]} or *{_PICTURES[-1]}; put them so.")
    classes, domains = sorted({file.parent.name for file in files}), []
    for name in sorted({file.parent.parent.name for file in files}):
        parts = [_rows(top / name, classes) for top in tops]
        train, test = parts if split else _held_out(*parts)
        domains.append(_picture_domain(base, train, test, name=name, classes=len(classes), size=size))
    return _dataset("image_folder", classes, domains)
