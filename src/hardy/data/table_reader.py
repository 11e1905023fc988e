"""Tables of rows as CSV or Parquet: a label, features, and perhaps who holds a row and whether it is for testing."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hardy.data.own_data import Raw
from hardy.data.readers import Array, extra_module, reading, refuse_bomb
from hardy.errors import HardyError, unknown

Columns = dict[str, Array]
TABLES = (".csv", ".parquet")
_LABELS = ("label", "class", "target", "y")
"""names of the column of labels, if none is given"""
_LETTER, _NUMBER = 4, 8
"""bytes in memory of a letter and of a number"""
_TESTS, _TRAININGS = ("test",), ("train", "validation", "val")
"""values of the column `split`"""


def table_columns(path: Path) -> Columns:
    """The columns of a table, each an array of numbers or words."""
    return _parquet(path) if path.suffix == ".parquet" else _csv(path)


def _csv(path: Path) -> Columns:
    with reading(path, "a CSV table"), path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        names = next(rows, [])
        content = [row for row in rows if row]
        if not content or len(set(names)) < len(names):
            raise ValueError("it has no rows below its header" if not content else "two columns have one name")
        for number, row in enumerate(content):
            if len(row) != len(names):
                raise ValueError(f"row {number} (counted from 0) has {len(row)} cells, the header {len(names)}")
        widest = sum(max(map(len, column)) for column in zip(*content, strict=True))  # as wide as its longest cell
        refuse_bomb(_LETTER * widest * len(content), path.stat().st_size)
        return {name: np.array(column) for name, column in zip(names, zip(*content, strict=True), strict=True)}


def _parquet(path: Path) -> Columns:
    parquet = extra_module("pyarrow.parquet", path, "parquet")
    with reading(path, "a Parquet table"):
        known = parquet.read_metadata(path)
        refuse_bomb(_NUMBER * known.num_rows * known.num_columns, path.stat().st_size)
        table = parquet.read_table(path)
        columns = {}
        for name in table.column_names:
            values = table.column(name).to_numpy()
            odd = values.dtype == object and not all(isinstance(value, str | None) for value in values)
            columns[name] = values if not odd else np.array([str(value) for value in values])
        return columns


def table_rows(
    path: Path, columns: Columns, *, label: str | None, client: str | None, split: str | None, drop: Sequence[str]
) -> dict[str, Raw]:
    """The rows of each client that the column `client` names, or of all under the file's name."""
    for named in (label, client, split, *drop):
        if named is not None and named not in columns:
            raise unknown(f"column of {path.name}", named, columns)
    label = label or next((name for name in _LABELS if name in columns), None)
    if label is None:
        raise HardyError(
            f'{path} has no column {", ".join(_LABELS)}. Name the one with the labels: label = "...". Columns: '
            f"{', '.join(columns)}."
        )
    split = split or ("split" if "split" in columns else None)
    features = [name for name in columns if name not in {label, client, split, *drop}]
    if not features:
        raise HardyError(f"{path} has no column of features besides {label!r}.")
    x = np.stack([_numbers(path, name, columns[name]) for name in features], 1)
    y, test = _as_labels(columns[label]), _for_testing(path, split, columns)
    owners = np.full(len(y), path.stem) if client is None else columns[client].astype(str)
    found = {}
    for owner in dict.fromkeys(owners.tolist()):
        own = owners == owner
        if test is None:
            found[owner] = Raw(x[own], y[own])
        else:
            found[owner] = Raw(x[own & ~test], y[own & ~test], x[own & test], y[own & test])
    return found


def _numbers(path: Path, name: str, column: Array) -> Array:
    if column.dtype.kind in "buif":
        return column.astype(np.float64)
    try:
        return column.astype(np.float64)
    except (TypeError, ValueError):
        for row, cell in enumerate(column.tolist()):
            try:
                float(cell)
            except (TypeError, ValueError):
                what = f"{cell!r}, which is no number" if cell else "nothing"
                raise HardyError(
                    f"{path}: row {row} (counted from 0) holds {what} in column {name!r}. Make it a number, or leave "
                    f'the column out: drop = ["{name}"].'
                ) from None
        raise


def _as_labels(column: Array) -> Array:
    """Numbers where all cells are whole numbers, else words."""
    if column.dtype.kind in "buif":
        return column
    words = np.array(["" if cell is None else str(cell) for cell in column.tolist()])
    try:
        return words.astype(np.int64)
    except ValueError:
        return words


def _for_testing(path: Path, split: str | None, columns: Columns) -> Array | None:
    if split is None:
        return None
    words = [str(cell).strip().lower() for cell in columns[split].tolist()]
    for row, word in enumerate(words):
        if word not in (*_TESTS, *_TRAININGS):
            raise HardyError(
                f"{path}: row {row} (counted from 0) holds {word!r} in column {split!r}; it must be train or test."
            )
    return np.array([word in _TESTS for word in words])
