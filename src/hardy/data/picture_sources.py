"""Sources that are pictures: DomainNet, CelebA, and a folder of your own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hardy.core import random
from hardy.data import readers
from hardy.data.dataset import Dataset, Domain
from hardy.data.own_data import Reading
from hardy.data.own_files import PICTURES, picture_files, read_pictures
from hardy.data.sources import checked_dataset, checked_domain, enter, refuse_below_one, require
from hardy.errors import HardyError

_Rows = list[tuple[Path, int]]  # picture and label


def _rows(folder: Path, classes: Sequence[str]) -> _Rows:
    """folder/class/picture, shuffled (always alike), so that the first rows are of all classes."""
    rows = [(file, classes.index(file.parent.name)) for file in picture_files(folder) if file.parent.name in classes]
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
            raise HardyError(f"{where} gives {name} no {split} images; put at least one there ({', '.join(PICTURES)}).")
    (x_train, y_train), (x_test, y_test) = (
        (readers.images([file for file, _ in rows], size), np.array([label for _, label in rows]))
        for rows in (train, test)
    )
    return checked_domain(name, where, (x_train, y_train, x_test, y_test), classes)


_DOMAINNET_CLASSES = "bird feather headphones ice_cream teapot tiger whale windmill wine_glass zebra"
_DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")


@enter(
    "the six domains from the DomainNet home page as <domain>/<class>/*.jpg, and beside them the lists "
    "<domain>_train.txt and <domain>_test.txt",
    [tuple(f"{domain}/{name}/*.*" for domain in _DOMAINNET for name in _DOMAINNET_CLASSES.split())],
)
def domainnet(root: Path | None = None, *, size: int = 256) -> Dataset:
    """FedBN's ten classes of DomainNet in six domains.

    Split by the official lists, or 80 to 20 where there are none.
    """
    refuse_below_one("size", size)
    base, classes, domains = require("domainnet", root).base, _DOMAINNET_CLASSES.split(), []
    for name in _DOMAINNET:
        rows = _rows(base / name, classes)
        lists = [base / f"{name}_{split}.txt" for split in ("train", "test")]
        listed = any(file.exists() for file in lists)
        train, test = (_listed(file, rows, classes) for file in lists) if listed else _held_out(rows)
        domains.append(_picture_domain(base / name, train, test, name=name, classes=len(classes), size=size))
    return checked_dataset("domainnet", classes, domains)


def _listed(file: Path, rows: _Rows, classes: Sequence[str]) -> _Rows:
    """The rows that an official list names. Its labels number all 345 classes, so folders tell the class."""
    named = {file.parent / name for name in readers.picture_list(file) if Path(name).parent.name in classes}
    absent = named - {picture for picture, _ in rows}
    if absent:
        raise HardyError(f"{file} names {len(absent)} pictures not there, as {min(absent)}. Fetch that domain again.")
    return [row for row in rows if row[0] in named]


@enter(
    "CelebA and its split by LEAF: data/train/*.json, data/test/*.json and data/raw/img_align_celeba/*.jpg",
    [("data/train/*.json", "data/test/*.json", "data/raw/img_align_celeba/*.*")],
)
def celeba(root: Path | None = None, *, size: int = 84) -> Dataset:
    """LEAF's celebrities, smiling or not.

    The owner of a row is its celebrity, numbered through both splits.
    """
    refuse_below_one("size", size)
    data = require("celeba", root).base / "data"
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
    return checked_dataset("celeba", ("not smiling", "smiling"), [domain])


@enter(
    "pictures as <class>/*.jpg or *.png, as <domain>/<class>/*, or as either of them in train/ and test/",
    [
        ("*/*/*.[jpJP]*",),
        ("train/*/*/*.[jpJP]*", "test/*/*/*.[jpJP]*"),
        ("*/*.[jpJP]*",),
        ("train/*/*.[jpJP]*", "test/*/*.[jpJP]*"),
    ],
)
def image_folder(root: Path | None = None, *, size: int | None = None) -> Dataset:
    """Your own pictures.

    Split by train/ and test/, or 80 to 20 where there are none.
    """
    refuse_below_one("size", size)
    return replace(read_pictures(require("image_folder", root).base, Reading(), size=size), name="image_folder")
