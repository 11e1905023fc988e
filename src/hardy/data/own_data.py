"""A user's own arrays as Hardy keeps them: images and feature vectors of any type, labels as numbers or words.

Images become uint8 or float32 in [0, 1], channels last; feature vectors float32. Labels become 0, 1, 2, ...; what they
were called stays as the names of the classes.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from hardy.core import random
from hardy.core.federation import Labels, Pixels
from hardy.data.dataset import Dataset, Domain
from hardy.data.readers import Array
from hardy.errors import HardyError

Channels = Literal["first", "last"]
ValueRange = tuple[float, float] | None
_LOG = logging.getLogger("hardy")
_COLOURS = (1, 3, 4)
"""channels of the images that are most common"""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How own arrays are to be read."""

    classes: Sequence[str] | int | None = None
    """names of the classes in order, or their number; None: those that the labels name"""
    value_range: ValueRange = None
    """the least and the greatest value an input can have; they become 0 and 1"""
    channels: Channels | None = None
    """where the channels of an image are; None: first in torch's tensors, else last"""
    holdout: float = 0.2
    """share of each class kept for testing where no test rows are given"""

    def __post_init__(self) -> None:
        if not 0 <= self.holdout < 1:
            raise HardyError(f"holdout is {self.holdout}; it must be in [0, 1): the share of rows kept for testing.")
        if self.channels not in (None, "first", "last"):
            raise HardyError(f"channels is {self.channels!r}; it must be first or last.")
        if isinstance(self.classes, int) and self.classes < 1:
            raise HardyError(f"classes is {self.classes}; give their number, 1 or more, or their names.")
        if self.value_range is not None and not self.value_range[0] < self.value_range[1]:
            low, high = self.value_range
            raise HardyError(f"data.range is [{low}, {high}]; the first number must be below the second.")


class Raw(NamedTuple):
    """One domain as it was given: arrays, tensors or lists. `x_test` None: no test rows are named."""

    x: Any
    y: Any
    x_test: Any = None
    y_test: Any = None


def own_dataset(
    name: str, given: Mapping[str, Raw], how: Reading, *, natural: bool = False, where: str = ""
) -> Dataset:
    """A data set of own arrays by domain, checked. `where` stands before a domain's name in messages; natural: every
    domain is a client."""
    if not given:
        raise HardyError(f"{name} has no domains; give at least one.")
    inputs: list[tuple[Pixels, Pixels | None]] = []
    labels: list[tuple[str, Array]] = []
    for domain, raw in given.items():
        place = f"{where}{domain}"
        x = _inputs(f"{place}: training", raw.x, how)
        labels.append((f"{place}: training", _labels(f"{place}: training", raw.y, len(x))))
        x_test = None
        if raw.x_test is not None:
            x_test, y_test = x[:0], np.zeros(0, np.int64)
            if len(raw.x_test):
                x_test = _inputs(f"{place}: test", raw.x_test, how)
                y_test = _labels(f"{place}: test", raw.y_test, len(x_test))
            labels.append((f"{place}: test", y_test))
        inputs.append((x, x_test))
    numbers, classes = _numbered(name, labels, how.classes)
    left, domains = iter(numbers), []
    for domain, (x, x_test) in zip(given, _alike(name, list(given), inputs), strict=True):
        y, tested = next(left), next(left) if x_test is not None else None
        domains.append(_domain(domain, x, y, x_test, tested, how.holdout, natural=natural))
    bounded = inputs[0][0].ndim == 4 or how.value_range is not None
    return Dataset(name=name, classes=classes, domains=tuple(domains), bounded=bounded, natural=natural)


def _domain(
    name: str, x: Pixels, y: Labels, x_test: Pixels | None, y_test: Labels | None, holdout: float, *, natural: bool
) -> Domain:
    """Rows that nobody split are shuffled, always alike, and a share of each class is kept for testing. So are those of
    a client, whose last rows will be its validation set."""
    if x_test is None or y_test is None or natural:
        order = random.stream(0, "rows", name).permutation(len(y))
        x, y = x[order], y[order]
    if x_test is None or y_test is None:
        test = np.zeros(len(y), dtype=bool)
        for label in np.unique(y) if holdout else ():
            own = np.flatnonzero(y == label)
            test[own[: max(1, round(len(own) * holdout))] if len(own) > 1 else own[:0]] = True
        x, x_test, y, y_test = x[~test], x[test], y[~test], y[test]
    owners = (np.zeros_like(y), np.zeros_like(y_test)) if natural else (None, None)
    return Domain(
        name=name, x_train=x, y_train=y, x_test=x_test, y_test=y_test, owners_train=owners[0], owners_test=owners[1]
    )


# Inputs


def _inputs(where: str, given: Any, how: Reading) -> Pixels:
    """Images [N, H, W, C] in bytes or in [0, 1], or vectors [N, F]."""
    first = how.channels == "first" or (how.channels is None and isinstance(given, torch.Tensor))
    x = as_array(where, given)
    if x.dtype.kind not in "buif":
        raise HardyError(f"{where} inputs are {x.dtype} {list(x.shape)}; make them numbers.")
    if x.ndim not in (2, 3, 4):
        raise HardyError(
            f"{where} inputs are {list(x.shape)}; make them images [N, H, W] or [N, H, W, C], or vectors [N, F]."
        )
    if not x.size:
        raise HardyError(f"{where} inputs are {list(x.shape)}, which is empty; give at least one row.")
    if x.ndim == 2:
        return _vectors(where, x, how.value_range)
    if x.ndim == 3:
        return _pixels(where, x[..., None], how.value_range)
    if first:
        x = x.transpose(0, 2, 3, 1)
    elif how.channels is None and x.shape[1] in _COLOURS and x.shape[3] not in _COLOURS:
        raise HardyError(
            f'{where} images are {list(x.shape)}, which looks like channels first. Say channels = "first", or "last" '
            f"if they have {x.shape[3]} channels."
        )
    return _pixels(where, np.ascontiguousarray(x), how.value_range)


def as_array(where: str, given: Any) -> Array:
    """An array of whatever holds numbers."""
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        numbers: Array = (given.float() if given.dtype is torch.bfloat16 else given).numpy()
        return numbers
    try:
        return np.asarray(given)
    except ValueError as error:
        raise HardyError(f"{where} rows are not of one shape ({error}). Bring all to one.") from None


def _vectors(where: str, x: Array, value_range: ValueRange) -> Pixels:
    if value_range is not None:
        return _scaled(where, x, value_range)
    return _finite(where, x)


def _pixels(where: str, x: Array, value_range: ValueRange) -> Pixels:
    if value_range is not None:
        return _scaled(where, x, value_range)
    if x.dtype == np.uint8:
        return x
    if x.dtype in (np.uint16, np.bool_):
        return _finite(where, x / (65535 if x.dtype == np.uint16 else 1))
    numbers = _finite(where, x)
    if x.dtype.kind == "f" and numbers.min() >= 0 and numbers.max() <= 1:
        return numbers
    low, high = x.min(), x.max()
    kind = "floats must be in [0, 1]" if x.dtype.kind == "f" else f"{x.dtype} has no usual range"
    usual = "[0, 255]" if low >= 0 and 1 < high <= 255 else f"[{low}, {high}] or wider, the same for all sites"
    raise HardyError(
        f"{where} pixels run from {low} to {high}; {kind}. Say which values are black and white: data.range = {usual}."
    )


def _finite(where: str, x: Array) -> Pixels:
    with np.errstate(over="ignore"):
        numbers = np.ascontiguousarray(x, dtype=np.float32)
    bad = np.flatnonzero(~np.isfinite(numbers).reshape(len(numbers), -1).all(1))
    if len(bad):
        row = x[bad[0]].ravel()
        value = row[~np.isfinite(numbers[bad[0]].ravel())][0]
        more = f", and {len(bad) - 1} more rows" if len(bad) > 1 else ""
        raise HardyError(
            f"{where} row {bad[0]} (counted from 0) holds {value}{more}; fill in a number or leave the row out."
        )
    return numbers


def _scaled(where: str, x: Array, value_range: tuple[float, float]) -> Pixels:
    _finite(where, x)
    low, high = value_range
    outside = np.flatnonzero(((x < low) | (x > high)).reshape(len(x), -1).any(1))
    if len(outside):
        row = x[outside[0]]
        value = row.min() if row.min() < low else row.max()
        raise HardyError(
            f"{where} row {outside[0]} (counted from 0) holds {value}, outside data.range = [{low:g}, {high:g}]. Widen "
            "the range, or clip the data."
        )
    return _finite(where, (x.astype(np.float64) - low) / (high - low))


def _alike(
    name: str, domains: Sequence[str], inputs: Sequence[tuple[Pixels, Pixels | None]]
) -> list[tuple[Pixels, Pixels | None]]:
    """The inputs of all domains in one shape and type: where some are bytes and others not, all become numbers."""
    first = inputs[0][0].shape[1:]
    for domain, pair in zip(domains, inputs, strict=True):
        for x in pair:
            if x is not None and x.shape[1:] != first:
                shapes = f"{list(x.shape[1:])} in {domain}, {list(first)} in {domains[0]}"
                raise HardyError(f"{name} has inputs of several shapes ({shapes}); bring all to one.")
    if len({x.dtype for pair in inputs for x in pair if x is not None}) == 1:
        return list(inputs)
    return [(_numbers(x), None if x_test is None else _numbers(x_test)) for x, x_test in inputs]


def _numbers(x: Pixels) -> Pixels:
    return (x / np.float32(255)).astype(np.float32) if x.dtype == np.uint8 else x


# Labels


def _labels(where: str, given: Any, rows: int) -> Array:
    """One label for each row: whole numbers or words."""
    y = as_array(where, given)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.shape != (rows,):
        hint = " One-hot rows become labels by y.argmax(1)." if y.ndim == 2 else ""
        raise HardyError(f"{where} labels are {y.dtype} {list(y.shape)}; give one for each of the {rows} rows.{hint}")
    if y.dtype.kind in "SO":
        y = np.array([label.decode() if isinstance(label, bytes) else label for label in y.tolist()])
    if y.dtype.kind == "f":
        odd = np.flatnonzero(~(np.isfinite(y) & (y == np.rint(y))))
        if len(odd):
            raise HardyError(
                f"{where} row {odd[0]} (counted from 0) has the label {y[odd[0]]}; a label is a whole number or a word."
            )
    elif y.dtype.kind == "U":
        if len(empty := np.flatnonzero(np.char.strip(y) == "")):
            raise HardyError(f"{where} row {empty[0]} (counted from 0) has no label; name it or leave the row out.")
        return np.char.strip(y)
    elif y.dtype.kind not in "iub":
        raise HardyError(f"{where} labels are {y.dtype}; make them whole numbers or words.")
    return y.astype(np.int64)


def _numbered(
    name: str, labels: Sequence[tuple[str, Array]], given: Sequence[str] | int | None
) -> tuple[list[Labels], tuple[str, ...]]:
    """Labels from 0, and the names of the classes."""
    kinds = {y.dtype.kind == "U" for _, y in labels if len(y)}
    if len(kinds) > 1:
        raise HardyError(f"{name} has words and numbers as labels; make them one or the other.")
    if kinds == {True}:
        return _named(labels, given)
    names = None if given is None else [str(n) for n in range(given)] if isinstance(given, int) else list(given)
    found = np.unique(np.concatenate([y for _, y in labels]))
    low, high = int(found[0]), int(found[-1])
    last = high if names is None else len(names) - 1
    from_one = low == 1 and (len(found) == high if names is None else high == len(names))
    if from_one:
        _LOG.warning("%s: labels run from 1 to %d; they are taken as classes 0 to %d.", name, high, high - 1)
        names = names if isinstance(given, Sequence) else [str(label) for label in range(1, high + 1)]
        return [(y - 1).astype(np.int64) for _, y in labels], tuple(names or ())
    for where, y in labels:
        if len(y) and (y.min() < 0 or y.max() > last):
            top = "the number of classes less one" if names is None else last
            raise HardyError(f"{where} labels run from {y.min()} to {y.max()}; allowed are 0 to {top}.")
    if names is None and low > 0:
        shown = ", ".join(map(str, found[:5])) + (", ..." if len(found) > 5 else "")
        raise HardyError(
            f"{name} has the labels {shown}: none is 0, and they are not 1, 2, 3, ... without a gap. Number them from "
            "0, make them words, or give classes, the number of classes or their names."
        )
    return [y for _, y in labels], tuple(names or (str(label) for label in range(high + 1)))


def _named(
    labels: Sequence[tuple[str, Array]], given: Sequence[str] | int | None
) -> tuple[list[Labels], tuple[str, ...]]:
    """Words are numbered in the order of the classes given, or of the alphabet."""
    found = sorted({str(word) for _, y in labels for word in np.unique(y)})
    if isinstance(given, int):
        raise HardyError(f"classes is {given}, but labels are words ({', '.join(found[:5])}). Give their names.")
    names = found if given is None else list(given)
    at = {word: number for number, word in enumerate(names)}
    for where, y in labels:
        for row, word in enumerate(y.tolist()):
            if word not in at:
                raise HardyError(
                    f"{where} row {row} (counted from 0) has the label {word!r}; classes are {', '.join(names)}."
                )
    return [np.array([at[word] for word in y.tolist()], np.int64) for _, y in labels], tuple(names)
