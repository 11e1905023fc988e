"""Sources that are arrays: the digits, CIFAR, SVHN, MNIST and its like."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hardy.data import readers
from hardy.data.dataset import Dataset
from hardy.data.readers import SPLITS, Splits
from hardy.data.sources import checked_dataset, checked_domain, embedded, enter, refuse_below_one, require
from hardy.errors import unknown

_Layouts = dict[tuple[str, ...], Callable[..., Splits]]  # files, and what reads them

_DIGITS = "0 1 2 3 4 5 6 7 8 9"


@enter("nothing: it comes with hardy-fl, so install that again", ())
def mini_digits(root: Path | None = None, *, domains: Sequence[str] = ()) -> Dataset:
    """Small digits of several domains, embedded.

    `domains` keeps only those named.
    """
    with embedded("mini_digits") as path:
        whole = _domains_of(path)
    known = {domain.name for domain in whole.domains}
    _refuse_unknown(domains, known, "mini_digits")
    return replace(whole, domains=tuple(domain for domain in whole.domains if domain.name in (domains or known)))


def _refuse_unknown(domains: Sequence[str], known: Collection[str], source: str) -> None:
    for name in domains:
        if name not in known:
            raise unknown(f"domain of {source}", name, known)


def _domains_of(path: Path) -> Dataset:
    found = readers.npz(path, SPLITS)
    colour = {key: np.repeat(x[..., None], 3, axis=-1) if x.ndim == 3 else x for key, x in found.items()}
    names = dict.fromkeys(key.rsplit("_", 2)[0] for key in found)
    domains = [checked_domain(name, f"{path} ({name})", readers.four(path, colour, f"{name}_"), 10) for name in names]
    return checked_dataset("mini_digits", _DIGITS.split(), domains)


_FEDBN = ("mnist", "svhn", "usps", "synth", "mnistm")
_FEDBN_FILES = tuple(f"digits_{domain}.npz" for domain in _FEDBN)


@enter(", ".join(_FEDBN_FILES), [_FEDBN_FILES])
def digits(root: Path | None = None, *, limit: int | None = None, domains: Sequence[str] = ()) -> Dataset:
    """FedBN's digits in five domains, 28 x 28 colour.

    `limit` keeps at most the first so many training rows of each domain, `domains` only those named.
    """
    refuse_below_one("limit", limit)
    _refuse_unknown(domains, _FEDBN, "digits")
    found = []
    for name, file in zip(_FEDBN, require("digits", root).files, strict=True):
        if domains and name not in domains:
            continue
        domain = checked_domain(name, file, readers.npz_splits(file), 10)
        found.append(replace(domain, x_train=domain.x_train[:limit], y_train=domain.y_train[:limit]))
    return checked_dataset("digits", _DIGITS.split(), found)


def _single(name: str, layouts: _Layouts, classes: str, root: Path | None) -> Dataset:
    """One domain, from the layout that is there."""
    found, names = require(name, root), classes.split()
    where = ", ".join(map(str, found.files))
    return checked_dataset(name, names, [checked_domain(name, where, layouts[found.layout](*found.files), len(names))])


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


@enter(
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


@enter(
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


@enter("svhn.npz, or train_32x32.mat and test_32x32.mat from the SVHN home page", _SVHN)
def svhn(root: Path | None = None) -> Dataset:
    """House numbers, 32 x 32 colour."""
    return _single("svhn", _SVHN, _DIGITS, root)


_IDX_FILES = tuple(f"{s}-{kind}-ubyte" for s in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_IDX: _Layouts = {tuple(file + packed for file in _IDX_FILES): readers.idx_splits for packed in ("", ".gz")}
_MNIST: _Layouts = {("mnist.npz",): readers.npz_splits, ("digits_mnist.npz",): readers.grey_splits, **_IDX}
_FASHION: _Layouts = {("fashion_mnist.npz",): readers.npz_splits, **_IDX}
_FASHION_CLASSES = "T-shirt/top trouser pullover dress coat sandal shirt sneaker bag ankle_boot"


@enter(f"mnist.npz, digits_mnist.npz, or from the MNIST home page {', '.join(_IDX_FILES)} (plain or .gz)", _MNIST)
def mnist(root: Path | None = None) -> Dataset:
    """Handwritten digits, 28 x 28 grey."""
    return _single("mnist", _MNIST, _DIGITS, root)


@enter(f"fashion_mnist.npz, or from its home page {', '.join(_IDX_FILES)} (plain or .gz)", _FASHION)
def fashion_mnist(root: Path | None = None) -> Dataset:
    """Clothes, 28 x 28 grey."""
    return _single("fashion_mnist", _FASHION, _FASHION_CLASSES, root)


_USPS: _Layouts = {
    ("usps.npz",): readers.npz_splits,
    ("digits_usps.npz",): readers.npz_splits,
    ("usps", "usps.t"): readers.batches(readers.usps_libsvm),
    ("usps.bz2", "usps.t.bz2"): readers.batches(readers.usps_libsvm),
}


@enter("usps.npz, digits_usps.npz, or usps and usps.t (plain or .bz2) from the LIBSVM data page", _USPS)
def usps(root: Path | None = None) -> Dataset:
    """Digits of postal codes, 16 x 16 grey or as in the .npz."""
    return _single("usps", _USPS, _DIGITS, root)
