"""Whether two rows of a comparison may be compared, and whether they differ by more than chance.

Two rows are paired over the seeds that both have, if these are two or more, or, if each is one run of the same seed,
over the clients. d₁ … dₙ are the differences of the pairs, d their mean and s/√n its standard error, with the sample
deviation s. The rows differ if |d| is above Student's t (95 %, n − 1 degrees of freedom) standard errors: 12.7 of them
for two seeds, 4.3 for three, 2.8 for five, 2.0 for fifty clients. Nothing corrects for comparing many rows.
"""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from hardy.report.stored_run import StoredRun, number

_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles for 1 ... 10 degrees of freedom"""
_HELD = ("domain", "train", "validation", "test", "labels")
"""what clients.json says of a client's rows"""
_ABILITIES = ("adversarial", "augmentation", "capacity")
"""keys of [data] that leave the rows as they are"""


def student(freedom: int) -> float:
    """How many standard errors a difference must be above; from 11 degrees of freedom on within 1 % of the quantile."""
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.5 / freedom


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run, or the seeds of one."""

    name: str
    runs: list[StoredRun]
    planned: int = 1
    """seeds the folder is for"""

    @property
    def title(self) -> str:
        if self.planned == len(self.runs):
            return self.name if self.planned == 1 else f"{self.name} ({self.planned} seeds)"
        return f"{self.name} ({len(self.runs)} of {self.planned} seeds)"

    @property
    def seeds(self) -> dict[int, StoredRun]:
        """By seed, where it is known."""
        return {int(seed): run for run in self.runs if (seed := number(run.summary, "seed")) is not None}

    def told(self, key: str) -> str:
        """What the runs say under this key, once."""
        return "/".join(dict.fromkeys(str(run.summary.get(key, "–")) for run in self.runs))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A row minus another, over pairs of seeds or clients."""

    mean: float
    error: float
    """the standard error of the mean"""
    pairs: int
    over: str

    @property
    def beyond_chance(self) -> bool:
        return abs(self.mean) > student(self.pairs - 1) * self.error


def difference(row: Row, other: Row, keys: Sequence[str]) -> Difference | None:
    """The figure of a row minus that of another, or None where nothing can be paired."""
    ours, theirs = row.seeds, other.seeds
    shared = [seed for seed in ours if seed in theirs and _same_data(ours[seed], theirs[seed])]
    if len(shared) > 1:
        sides = [[number(seeds[seed].summary, *keys) for seed in shared] for seeds in (ours, theirs)]
        return _paired(sides[0], sides[1], "seeds")
    if shared and len(row.runs) == len(other.runs) == 1 and keys[-1] == "mean":
        sides = [_by_client(one.runs[0].summary, keys) for one in (row, other)]
        return _paired(sides[0], sides[1], "clients") if len(sides[0]) == len(sides[1]) else None
    return None


def _by_client(summary: Any, keys: Sequence[str]) -> list[float | None]:
    for key in (*keys[:-1], "by_client"):
        summary = summary.get(key) if isinstance(summary, dict) else None
    return [number({"of": value}, "of") for value in summary] if isinstance(summary, list) else []


def _paired(ours: Sequence[float | None], theirs: Sequence[float | None], over: str) -> Difference | None:
    found = [a - b for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    if len(found) < 2:
        return None
    return Difference(mean=mean(found), error=stdev(found) / math.sqrt(len(found)), pairs=len(found), over=over)


def unlike(rows: Sequence[Row]) -> list[str]:
    """In what the rows differ that makes their figures hard to compare, a line each: data, rounds, seeds."""
    settings = [_flat(_data(row.runs[0])) for row in rows]
    keys = dict.fromkeys(key for one in settings for key in one)
    told = {f"data.{key}": [str(one.get(key, "absent")) for one in settings] for key in keys}
    if not any(len(set(values)) > 1 for values in told.values()) and not _same_clients(rows):
        counts = [str(len(row.runs[0].clients)) for row in rows]
        told |= {"clients": counts} if len(set(counts)) > 1 else {"data": _whose_rows(rows)}
    told["rounds"] = [row.told("rounds") for row in rows]
    told["seeds"] = [", ".join(map(str, row.seeds)) or "unknown" for row in rows]
    return [_line(key, values, rows) for key, values in told.items() if len(set(values)) > 1]


def _whose_rows(rows: Sequence[Row]) -> list[str]:
    """For each row the first one with the same clients."""
    first = (next(one for one in rows if one is row or _same_clients([one, row])) for row in rows)
    return [f"the rows of {one.name}" for one in first]


def _line(key: str, values: Sequence[str], rows: Sequence[Row]) -> str:
    groups: dict[str, list[str]] = {}
    for value, row in zip(values, rows, strict=True):
        groups.setdefault(value, []).append(row.name)
    return f"not alike: {key}: " + "; ".join(f"{value} ({', '.join(names)})" for value, names in groups.items())


def _data(run: StoredRun) -> dict[str, Any]:
    try:
        found = tomllib.loads(run.config).get("data")
    except tomllib.TOMLDecodeError:
        found = None
    return found if isinstance(found, dict) else {}


def _flat(table: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}
    return found


def _held(run: StoredRun) -> list[list[Any]]:
    return [[client.get(key) for key in _HELD] for client in run.clients]


def _same_data(run: StoredRun, other: StoredRun) -> bool:
    """Whether both dealt the same rows to the same clients, whatever these can afford and how they train on them."""
    tables = [{key: value for key, value in _data(one).items() if key not in _ABILITIES} for one in (run, other)]
    return tables[0] == tables[1] and _held(run) == _held(other)


def _same_clients(rows: Sequence[Row]) -> bool:
    """Whether all rows that have a seed in common dealt the same rows to the same clients with it."""
    first, *others = rows
    return all(
        _held(run) == _held(row.seeds[seed]) for seed, run in first.seeds.items() for row in others if seed in row.seeds
    )
