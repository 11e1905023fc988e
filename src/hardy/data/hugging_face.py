"""Data sets of Hugging Face, by id or from a folder, read with the library `datasets`."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hardy.data.dataset import Dataset
from hardy.data.own_data import Raw, Reading, own_dataset
from hardy.data.readers import extra_module, picture_pixels
from hardy.data.table_reader import table_rows
from hardy.errors import HardyError

MARKS = ("dataset_dict.json", "dataset_info.json", "state.json")
"""files of a data set that was saved by save_to_disk"""
_LABELS = ("label", "labels", "fine_label", "class", "target")


def read_hugging_face(
    place: Path,
    how: Reading,
    *,
    image: str | None = None,
    label: str | None = None,
    size: int | None = None,
    subset: str | None = None,
    drop: Sequence[str] = (),
) -> Dataset:
    """Images of the column `image`, or feature vectors of all columns but `drop`; labels of the column `label`. A
    `subset` is what the library calls a configuration."""
    splits = _splits(str(place), subset)
    train = splits.get("train") or next(iter(splits.values()))
    test = splits.get("test")
    image = image or next((name for name, kind in train.features.items() if type(kind).__name__ == "Image"), None)
    named = [name for name, kind in train.features.items() if type(kind).__name__ == "ClassLabel"]
    label = label or next((name for name in (*_LABELS, *named) if name in train.column_names), None)
    for column in (image, label, *drop):
        if column is not None and column not in train.column_names:
            raise HardyError(f"{place} has no column {column!r}; columns: {', '.join(train.column_names)}.")
    if label is None:
        raise HardyError(
            f'{place} has no column {", ".join(_LABELS)}. Name the one with the labels: label = "...". Columns: '
            f"{', '.join(train.column_names)}."
        )
    names = getattr(train.features[label], "names", None)
    if how.classes is None and names:
        how = replace(how, classes=list(names))
    raw = Raw(
        *(part for rows in (train, test) if rows is not None for part in _rows(place, rows, image, label, size, drop))
    )
    return own_dataset(place.name, {place.name: raw}, how, where=f"{place}: ")


def _splits(place: str, subset: str | None) -> dict[str, Any]:
    """Its splits by name."""
    library = extra_module("datasets", f"the Hugging Face data set {place}", "hf")
    try:
        if any((Path(place) / name).is_file() for name in MARKS):
            found = library.load_from_disk(place)
        else:
            found = library.load_dataset(os.fspath(place), subset) if subset else library.load_dataset(place)
    except Exception as error:  # a missing id, no network, a damaged file
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise HardyError(
            f"the Hugging Face data set {place} cannot be loaded ({first}). Give the id of one that is on the hub or "
            "in the cache, or a folder."
        ) from error
    return dict(found) if isinstance(found, dict) else {"train": found}


def _rows(
    place: Path, rows: Any, image: str | None, label: str, size: int | None, drop: Sequence[str]
) -> tuple[Any, Any]:
    if image is not None:
        return np.stack([picture_pixels(picture, size) for picture in rows[image]]), np.asarray(rows[label])
    columns = {name: np.asarray(rows[name]) for name in rows.column_names}
    (found,) = table_rows(place, columns, label=label, client=None, split=None, drop=drop).values()
    return found.x, found.y
