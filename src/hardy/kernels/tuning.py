"""Which tiles a kernel works in: tried once for each shape, and remembered in the user's cache folder.

All candidates give the same bits, which is checked when they are tried; so a choice by the clock decides speed alone.
"""

import json
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils import _pytree as pytree


class Tiles(NamedTuple):
    """Rows of a tile, warps that work on it, stages of loads under way."""

    rows: int
    warps: int
    stages: int


_known: dict[str, Tiles] = {}
_read: set[Path] = set()


def cache_file(device: torch.device) -> Path:
    """Where choices for this kind of device are kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hardy"
    name = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-").lower()
    return folder / f"tiles_{name}_triton-{triton.__version__}.json"


def quickest_tiles(
    kernel: str,
    shape: tuple[Any, ...],
    kinds: Sequence[Tiles],
    make: Callable[[], Callable[[Tiles], Any]],
    device: torch.device,
) -> Tiles:
    """The quickest for this shape, whatever the number of slots; `make` gives a launch to be timed. While a step is
    captured nothing can be timed, and an unknown shape takes the first."""
    if device.type != "cuda":
        return kinds[0]
    name = f"{kernel} {shape}"
    if name in _known:
        return _known[name]
    file = cache_file(device)
    if file not in _read:
        _read.add(file)
        _known.update({key: tiles for key, tiles in _load(file).items() if key not in _known})
    if name in _known:
        return _known[name]
    if torch.cuda.is_current_stream_capturing():
        return kinds[0]
    _known[name] = _quickest(kinds, make())
    _store(file)
    return _known[name]


def _quickest(kinds: Sequence[Tiles], run: Callable[[Tiles], Any]) -> Tiles:
    def fit(tiles: Tiles) -> bool:
        try:
            run(tiles)
        except triton.runtime.errors.OutOfResources:
            return False
        return True

    with ThreadPoolExecutor() as pool:  # compilers are processes and let go of Python's lock
        fits = list(pool.map(fit, kinds))
    torch.cuda.synchronize()
    wanted: list[Tensor] | None = None
    times: dict[Tiles, float] = {}
    for tiles in compress(kinds, fits):
        found = pytree.tree_leaves(run(tiles))
        if wanted is None:
            wanted = [out.clone() for out in found]
        elif not all(map(torch.equal, wanted, found)):
            continue
        times[tiles] = _milliseconds(lambda tiles=tiles: run(tiles))  # type: ignore[misc]
    return min(times, key=lambda tiles: times[tiles])


def _milliseconds(run: Callable[[], object], repeats: int = 7) -> float:
    """The median; each time several launches, so that a launch does not count."""
    found: list[float] = []
    for _ in range(repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(3):
            run()
        ended.record()
        ended.synchronize()
        found.append(float(began.elapsed_time(ended)))
    return statistics.median(found)


def _load(file: Path) -> dict[str, Tiles]:
    try:
        return {key: Tiles(*map(int, sizes)) for key, sizes in json.loads(file.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # absent or damaged: tried again


def _store(file: Path) -> None:
    """Adds to what other processes have found; without a cache folder, choices last as long as the process."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f"{file.name}.{os.getpid()}")
        draft.write_text(json.dumps({**_load(file), **_known}, indent=0))
        draft.replace(file)
    except OSError:
        pass
