"""What was measured of a row with a seed: one JSON, the same for every table.

    results/TABLE/ROW.seed-0.json          on the data of the table
    results/TABLE/quick/ROW.seed-0.json    with --quick

A key whose value is not known is null, and `unknown` says why.
"""

import datetime
import hashlib
import json
import math
import re
import subprocess
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from hardy.config import Experiment
from hardy.core.files import disk, make_folder, write_atomic
from hardy.core.json_files import read_json
from hardy.errors import HardyError
from hardy.reproduce.definition import COST, ResultTable, RowMeasure, split_column

SCHEMA = 1
KEYS: dict[str, type | tuple[type, ...]] = {
    "schema": int,
    "table": str,
    "row": str,
    "quick": bool,
    "seed": int,
    "configuration": str,
    "overrides": list,
    "commit": str,
    "device": str,
    "precision": str,
    "date": str,
    "rounds": int,
    "seconds": (int, float),
    "figures": dict,
    "costs": dict,
    "curve": list,
    "versions": dict,
}
"""every key of a record but `unknown` and `remark`, and what it holds"""
KNOWN = ("schema", "table", "row", "quick", "overrides", "figures")
"""keys that are never null"""
FIGURE = ("mean", "images", "standard_error")
"""what every figure has; further keys are worst client, domains, cost, and where single seeds are not known, seeds and
deviation"""
_NOT_TRAINING = ("name", "seed", "callbacks", "checkpoint", "network", "versions")
"""keys of an experiment that change no figure, or that a record has beside"""

Record = dict[str, Any]


def configuration_hash(experiment: Experiment, folder: Path) -> str:
    """Of everything that a trained network depends on but its seed: engines agree, so of the engine only precision.
    Files of code are named from the table's folder."""
    table = tomllib.loads(experiment.to_toml())
    for key in _NOT_TRAINING:
        table.pop(key, None)
    table["data"] = {key: value for key, value in table["data"].items() if key != "folder"}
    table["engine"] = {"precision": table["engine"].get("precision")}
    table["evaluation"] = {
        key: value for key, value in table["evaluation"].items() if key not in ("threats", "robustness")
    }
    text = json.dumps(table, sort_keys=True, default=str).replace(str(folder.resolve()), "")
    return short_hash(text)


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def commit_of(folder: Path) -> str | None:
    """The commit that a folder's checkout is at, with a plus where files differ from it; None outside of one."""
    try:
        words = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def slug(row: str) -> str:
    """A row's name as that of a file: words of ASCII, and a few letters of its hash where some were lost."""
    plain = re.sub(r"[^a-z0-9.]+", "-", row.lower()).strip("-.")
    lost = re.sub(r"[ ,:]", "", row.lower()) != re.sub(r"[-]", "", plain)
    return f"{plain[:60]}-{hashlib.sha256(row.encode()).hexdigest()[:4]}" if lost or len(plain) > 60 else plain


def results_folder(table: ResultTable, *, quick: bool) -> Path:
    where = table.folder / "results" / table.name
    return where / "quick" if quick else where


def record_file(table: ResultTable, record: Record) -> Path:
    seed = record["seed"]
    name = f"{slug(record['row'])}.seed-{'mean' if seed is None else seed}.json"
    return results_folder(table, quick=record["quick"]) / name


def write_record(path: Path, record: Record) -> None:
    check_record(record, str(path))
    with disk(str(path)):
        make_folder(path.parent)
    write_atomic(path, (_lines(record) + "\n").encode())


def _lines(record: Record) -> str:
    """JSON with a line a key, and a line a figure."""
    rows = []
    for key, value in record.items():
        if key == "figures" and value:
            inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items())
            rows.append(f' "figures": {{\n{inner}\n }}')
        else:
            rows.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(rows) + "\n}"


def read_record(path: Path) -> Record:
    record: Record = read_json(path, dict, "Remove it: the row can be run again.")
    check_record(record, str(path))
    return record


def read_records(table: ResultTable, *, quick: bool) -> list[Record]:
    """All of a table; a file that is of no row of it is an error."""
    found = []
    for path in sorted(results_folder(table, quick=quick).glob("*.json")):
        record = read_record(path)
        if record["table"] != table.path or record["row"] not in table.rows or record["quick"] != quick:
            raise HardyError(f"{path} is of {record['table']}, row {record['row']!r}; {table.path} has no such row.")
        found.append(record)
    return found


def check_record(record: Record, where: str) -> None:
    """Refuses a record that is not whole: every key is there, of its kind, or null with a reason."""

    def refuse(words: str) -> HardyError:
        return HardyError(f"{where} is no record of a row: {words}.")

    reasons = record.get("unknown")
    if not isinstance(reasons, dict):
        raise refuse("`unknown` is missing")
    if extra := record.keys() - KEYS.keys() - {"unknown", "remark"}:
        raise refuse(f"unknown key {min(extra)!r}")
    for key, kind in KEYS.items():
        if key not in record:
            raise refuse(f"{key} is missing")
        if record[key] is None:
            if key in KNOWN or not reasons.get(key):
                raise refuse(f"{key} is null without a reason")
        elif not isinstance(record[key], kind):
            raise refuse(f"{key} is {record[key]!r}")
    if record["schema"] != SCHEMA:
        raise refuse(f"its schema is {record['schema']}, known is {SCHEMA}")
    for name, figure in record["figures"].items():
        for key in FIGURE:
            if key not in figure:
                raise refuse(f"figure {name!r} has no {key}")
            if figure[key] is None and not reasons.get(key) and not reasons.get(f"{name}: {key}"):
                raise refuse(f"{key} of figure {name!r} is null without a reason")
        if not isinstance(figure["mean"], int | float) or not math.isfinite(figure["mean"]):
            raise refuse(f"the mean of figure {name!r} is {figure['mean']!r}")


def value_of(record: Record, column: str) -> float | None:
    """What a record has in a column: the mean, the worst client, a domain, a cost."""
    measure, key = split_column(column)
    figure = record["costs"] if measure == COST else record["figures"].get(measure)
    if figure is None:
        return None
    for place in (figure, figure.get("by_domain") or {}):
        for name in (key, key.replace(" ", "_")):
            if isinstance(place.get(name), int | float):
                return float(place[name])
    return None


def has_figure(record: Record, measure: RowMeasure) -> bool:
    """Whether the figure is there, measured as it is asked for."""
    found = record["figures"].get(measure.name)
    return found is not None and found.get("how") == described(measure)


def described(measure: RowMeasure) -> dict[str, Any]:
    """The options of a measure that are not the usual ones."""
    return {
        one.name: value
        for one in fields(measure)
        if one.name not in ("name", "rows") and (value := getattr(measure, one.name)) != _usual(one)
    }


def _usual(one: Any) -> Any:
    return one.default if one.default is not MISSING else one.default_factory()
