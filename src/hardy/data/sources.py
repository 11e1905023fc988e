"""Sources of labelled data: one embedded, published ones in the folder of HARDY_DATA or --data, own files by path.

A source enters itself where it is written, in `array_sources` or `picture_sources`; here is what serves them all.
"""

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TypeVar

import numpy as np

from hardy.core.federation import Labels, Pixels
from hardy.data import readers
from hardy.data.dataset import Dataset, Domain
from hardy.data.own_data import ValueRange
from hardy.data.own_files import locate, looks_like_path, read_own
from hardy.data.readers import Array, Splits
from hardy.errors import HardyError, unknown
from hardy.registry import find
from hardy.user_code import plugins, reference, short

_Read = TypeVar("_Read", bound=Callable[..., Dataset])


@dataclass(frozen=True, kw_only=True)
class Source:
    """`read(root, **options)` needs every file of one of the layouts, in root/<name> or in root. None: embedded."""

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


def enter(fetch: str, layouts: Collection[tuple[str, ...]]) -> Callable[[_Read], _Read]:
    """Enters a function among the sources, described by the first line of its docstring."""

    def entered(read: _Read) -> _Read:
        name, about = read.__name__, (read.__doc__ or "").partition("\n")[0].removesuffix(".")
        SOURCES[name] = Source(name=name, about=about, fetch=fetch, layouts=layouts, read=read)
        return read

    return entered


def data_root(explicit: Path | None = None) -> Path | None:
    """The folder of real data: the explicit one, else that of HARDY_DATA, else none."""
    named = explicit or os.environ.get("HARDY_DATA")
    return Path(named).expanduser() if named else None


def load_dataset(name: str, root: Path | None = None, *, value_range: ValueRange = None, **options: object) -> Dataset:
    """The data of a source, or of files by their path, checked. Without a root, HARDY_DATA names it."""
    if name not in SOURCES:
        if reference(name) or any(entry == ("source", name) for entry in plugins()):
            return _own(name, root, options)
        if looks_like_path(name) or locate(name, data_root(root)):
            return read_own(name, data_root(root), value_range=value_range, **options)
        raise unknown("data source (no such file or folder either)", name, SOURCES)
    if value_range is not None:
        raise HardyError(f"data.range has no effect on {name}, whose images are bytes. Leave it out.")
    _, *allowed = inspect.signature(SOURCES[name].read).parameters
    for option in options:
        if option not in allowed:
            raise unknown(f"option of {name}", option, allowed)
    return SOURCES[name].read(root, **options)


def _own(name: str, root: Path | None, options: Mapping[str, object]) -> Dataset:
    """The data of a function of a user's own, which gets the data folder if it has an argument `root`."""
    read = find("source", name)
    allowed = inspect.signature(read).parameters
    for option in options:
        if option not in allowed:
            raise unknown(f"option of {short(name)}", option, allowed)
    made = read(**({"root": root} if "root" in allowed else {}), **options)
    if not isinstance(made, Dataset):
        raise HardyError(
            f"data source {short(name)} gives {type(made).__name__}; it must be a data set, as hardy.arrays makes one."
        )
    return made


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
class Found:
    """What of a layout is there."""

    base: Path
    layout: tuple[str, ...]
    files: tuple[Path, ...]
    missing: tuple[str, ...]

    def lack(self) -> str:
        more = f" and {len(self.missing) - 3} more" if len(self.missing) > 3 else ""
        return f"missing {', '.join(self.missing[:3])}{more}"


def _look(source: Source, root: Path) -> Found:
    """The first complete layout, else the one with most of its files there."""
    tried = []
    for base in (root / source.name, root):
        for layout in source.layouts:
            first = {p: next((f for f in base.glob(p) if f.is_file()), None) for p in layout}
            files = tuple(f for f in first.values() if f)
            tried.append(Found(base, layout, files, tuple(p for p, f in first.items() if not f)))
    return next((found for found in tried if not found.missing), max(tried, key=lambda found: len(found.files)))


def require(name: str, root: Path | None) -> Found:
    """A complete layout of a source, or an error that says what to fetch."""
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


def embedded(name: str) -> AbstractContextManager[Path]:
    """The file of a source that comes with Hardy."""
    return resources.as_file(resources.files("hardy.data") / f"{name}.npz")


def _listing(source: Source, root: Path | None) -> Listing:
    if not source.layouts:
        with embedded(source.name) as path:
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


def checked_domain(name: str, where: object, splits: Splits, classes: int | None) -> Domain:
    """A domain of sound arrays, or an error that begins with where they come from."""
    x_train, y_train = _checked(f"{where}: training", *splits[:2], classes)
    x_test, y_test = _checked(f"{where}: test", *splits[2:], classes)
    return Domain(name=name, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


def checked_dataset(name: str, classes: Sequence[str], domains: Sequence[Domain]) -> Dataset:
    """A data set of sound domains, which must agree on the shape of an image."""
    first = domains[0].x_train.shape[1:]
    for domain in domains:
        for x in (domain.x_train, domain.x_test):
            if x.shape[1:] != first:
                shapes = f"{list(x.shape[1:])} in {domain.name}, {list(first)} in {domains[0].name}"
                raise HardyError(f"{name} has images of several shapes ({shapes}); bring all to one.")
    return Dataset(name=name, classes=tuple(classes), domains=tuple(domains))


def refuse_below_one(option: str, value: int | None) -> None:
    """For an option that counts something; None leaves it out."""
    if value is not None and (not isinstance(value, int) or value < 1):
        raise HardyError(f"{option} is {value!r}; give a whole number of at least 1, or leave it out.")
