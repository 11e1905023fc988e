"""A user's own files as a data set, by their path: .npz, CSV, Parquet, pictures, one file a site, Hugging Face."""

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hardy.core import random
from hardy.data import hugging_face, readers
from hardy.data.dataset import Dataset
from hardy.data.own_data import Raw, Reading, ValueRange, own_dataset
from hardy.data.table_reader import TABLES, table_columns, table_rows
from hardy.errors import HardyError, unknown

PICTURES = (".jpg", ".jpeg", ".png")
SITES = (".npz", *TABLES)
"""files that are a site each when they lie in a folder"""
_COMMON = ("classes", "channels", "holdout")
_LAYOUTS: tuple[tuple[str, ...], ...] = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x", "y"),
    ("images", "labels"),
)
"""names of the arrays in an .npz"""


def looks_like_path(text: str) -> bool:
    """Whether a source is meant as a file or folder, there or not."""
    return text.startswith(("hf:", ".", "~")) or "/" in text or os.sep in text or Path(text).suffix in SITES


def locate(text: str, root: Path | None) -> Path | None:
    """A file or folder by its path: from here, or in the data folder; one that was moved there is found by its name."""
    path = Path(text).expanduser()
    tried = [path, *([root / path, root / path.name] if root else [])]
    if root is not None and root.name == path.name:
        tried.append(root)
    return next((one.absolute() for one in tried if one.exists()), None)


def read_own(text: str, root: Path | None, *, value_range: ValueRange = None, **options: Any) -> Dataset:
    """The data set at a path, or of the Hugging Face id after "hf:"."""
    if text.startswith("hf:"):
        read, place = hugging_face.read_hugging_face, Path(text.removeprefix("hf:"))
    else:
        found = locate(text, root)
        if found is None:
            there = f" or in the data folder {root}" if root else ""
            raise HardyError(
                f"there is no file or folder {text!r} here{there}. If it moved, name the folder it is in now: "
                "--data FOLDER, or HARDY_DATA."
            )
        read, place = _kind(found), found
    own = [name for name, p in inspect.signature(read).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in (*_COMMON, *own):
            raise unknown(f"option of {text}", option, (*_COMMON, *own))
    how = Reading(value_range=value_range, **{key: options.pop(key) for key in _COMMON if key in options})
    return read(place, how, **options)


def _kind(path: Path) -> Callable[..., Dataset]:
    if path.is_file():
        if path.suffix in SITES:
            return _npz if path.suffix == ".npz" else _table
        raise HardyError(f"{path} is no data that Hardy reads; give {', '.join(SITES)} or a folder.")
    if any((path / name).is_file() for name in hugging_face.MARKS):
        return hugging_face.read_hugging_face
    if _site_files(path):
        return _sites
    if next((file for file in path.rglob("*") if file.suffix.lower() in PICTURES), None):
        return read_pictures
    raise HardyError(
        f"{path} holds no data that Hardy reads: one file a site ({', '.join(SITES)}), pictures as <class>/*.png or "
        "<domain>/<class>/*.png, or a Hugging Face data set saved by save_to_disk."
    )


def _npz(path: Path, how: Reading) -> Dataset:
    raw, classes = _npz_raw(path)
    return own_dataset(path.stem, {path.stem: raw}, _naming(how, classes), where=f"{path.parent}{os.sep}")


def _naming(how: Reading, classes: Sequence[str] | None) -> Reading:
    """The same with the names that a file has for its classes, where the user gives none."""
    return how if how.classes is not None or classes is None else replace(how, classes=classes)


def _npz_raw(path: Path) -> tuple[Raw, Sequence[str] | None]:
    """The arrays of a file, and the names of its classes if it has some."""
    known = {name for layout in _LAYOUTS for name in layout}
    arrays = readers.npz(path, (*known, "classes"))
    for layout in _LAYOUTS:
        if layout[0] in arrays and layout[1] in arrays:
            found = Raw(*(arrays.get(name) for name in layout))
            if (found.x_test is None) != (found.y_test is None):
                raise HardyError(f"{path} has one of {layout[2]} and {layout[3]}; give both or none.")
            if len(layout) == 4 and found.x_test is None:
                found = found._replace(x_test=found.x[:0], y_test=found.y[:0])
            return found, [str(name) for name in arrays["classes"].tolist()] if "classes" in arrays else None
    wanted = "; ".join(", ".join(layout) for layout in _LAYOUTS)
    raise HardyError(f"{path} has the arrays {', '.join(arrays)}; name them as one of: {wanted}.")


def _table(
    path: Path,
    how: Reading,
    *,
    label: str | None = None,
    client: str | None = None,
    split: str | None = None,
    drop: Sequence[str] = (),
) -> Dataset:
    rows = table_rows(path, table_columns(path), label=label, client=client, split=split, drop=drop)
    return own_dataset(path.stem, rows, how, natural=client is not None, where=f"{path.name}, ")


def _site_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in SITES and not file.name.startswith("."))


def _sites(
    folder: Path, how: Reading, *, label: str | None = None, split: str | None = None, drop: Sequence[str] = ()
) -> Dataset:
    """Every file is a client, by its name."""
    given: dict[str, Raw] = {}
    classes: Sequence[str] | None = None
    for file in _site_files(folder):
        if file.stem in given:
            raise HardyError(f"{folder} holds two files of the site {file.stem}; keep one.")
        if file.suffix == ".npz":
            given[file.stem], named = _npz_raw(file)
            if classes is not None and named is not None and named != classes:
                raise HardyError(f"{file} names other classes than the files before it; make them one list.")
            classes = classes or named
        else:
            given |= table_rows(file, table_columns(file), label=label, client=None, split=split, drop=drop)
    return own_dataset(folder.name, given, _naming(how, classes), natural=True, where=f"{folder}{os.sep}")


# Pictures


def read_pictures(folder: Path, how: Reading, *, size: int | None = None) -> Dataset:
    """<class>/*, <domain>/<class>/*, or the same under train/ and test/."""
    halves = [folder / "train", folder / "test"]
    split = all(half.is_dir() for half in halves)
    tops = halves if split else [folder]
    depth = 3 if any(picture_files(top, 3) for top in tops) else 2
    files = {top: picture_files(top, depth) for top in tops}
    if not any(files.values()):
        raise HardyError(f"{folder} holds no pictures as <class>/*.png or <domain>/<class>/*.png; put them so.")
    domain_of = (lambda file: file.parent.parent.name) if depth == 3 else (lambda file: folder.name)
    given = {}
    for domain in sorted({domain_of(file) for found in files.values() for file in found}):
        parts: list[Any] = []
        for top in tops:
            own = [file for file in files[top] if domain_of(file) == domain]
            own = [own[at] for at in random.stream(0, "pictures", domain).permutation(len(own))]
            parts += [readers.images(own, size) if own else [], [file.parent.name for file in own]]
        given[domain] = Raw(*parts)
    return own_dataset(folder.name, given, how, where=f"{folder}: ")


def picture_files(folder: Path, depth: int = 2) -> list[Path]:
    """Pictures so many levels below a folder."""
    files = sorted(folder.glob("/".join(["*"] * depth)))
    return [file for file in files if file.suffix.lower() in PICTURES and not file.name.startswith(".")]
