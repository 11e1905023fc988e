"""One rule by which every row of a table is tuned, so that no method wins by a better rate.

1. A row's settings are the grid of what the table varies for all rows, such as the rate, and of one parameter of its
   own.
2. Each setting is run once, with a seed that the table does not use.
3. The setting with the best mean of the named measures on validation rows is the row's; of equals, the first. One that
   diverged has no figures, and any other is better.

    results/TABLE/tuning/ROW.json          every setting and its figures, and the one chosen
    results/TABLE/quick/tuning/ROW.json    with --quick
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from hardy.core.files import disk, make_folder, write_atomic
from hardy.core.json_files import read_json
from hardy.errors import HardyError
from hardy.reproduce.definition import CLEAN, ResultTable, RowMeasure
from hardy.reproduce.records import Record, results_folder, slug

Choice = dict[str, Any]


def row_settings(table: ResultTable, row: str) -> list[tuple[str, ...]]:
    """Line 1: the overrides of every setting of a row."""
    assert table.tuning is not None
    varied = {**table.tuning.vary, **table.rows[row].vary}
    return list(itertools.product(*([_override(key, value) for value in values] for key, values in varied.items())))


def _override(key: str, value: Any) -> str:
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def tuning_measures(table: ResultTable) -> list[RowMeasure]:
    """What line 3 takes the mean of."""
    assert table.tuning is not None
    defined = {measure.name: measure for measure in table.measures}
    plain = {by: RowMeasure(name=by, threat="" if by == CLEAN else by) for by in table.tuning.by if by not in defined}
    return [
        replace({**plain, **defined}[by], part="validation", limit=table.tuning.limit, rows="")
        for by in table.tuning.by
    ]


def choose_setting(settings: Mapping[tuple[str, ...], Record], *, quick: bool) -> Choice:
    """Line 3, as it is stored. The records are of one row, in the order of its settings."""
    scores: dict[tuple[str, ...], float | None] = {
        setting: round(mean(f["mean"] for f in record["figures"].values()), 6) if record["figures"] else None
        for setting, record in settings.items()
    }
    known = {setting: value for setting, value in scores.items() if value is not None}
    first = next(iter(settings.values()))
    if not known:
        raise HardyError(f"{first['table']}: no setting of row {first['row']!r} can be trained: {first['failed']}")
    best = max(known, key=known.__getitem__)
    return {
        "table": first["table"],
        "row": first["row"],
        "quick": quick,
        "seed": first["seed"],
        "rounds": first["rounds"],
        "date": first["date"],
        "commit": first["commit"],
        "chosen": list(best),
        "settings": [
            {"set": list(setting), "score": scores[setting], "seconds": record["seconds"]}
            for setting, record in settings.items()
        ],
    }


def tuning_file(table: ResultTable, row: str, *, quick: bool) -> Path:
    return results_folder(table, quick=quick) / "tuning" / f"{slug(row)}.json"


def write_choice(table: ResultTable, choice: Choice) -> Path:
    path = tuning_file(table, choice["row"], quick=choice["quick"])
    with disk(str(path)):
        make_folder(path.parent)
    write_atomic(path, (json.dumps(choice, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def read_choice(table: ResultTable, row: str, *, quick: bool) -> Choice | None:
    """What was chosen for a row; None: it was not tuned, or not among what the table varies now."""
    path = tuning_file(table, row, quick=quick)
    if table.tuning is None or not path.is_file():
        return None
    found: Choice = read_json(path, dict, "Remove it and tune again: hardy reproduce PAPER/TABLE --tune.")
    tried = [tuple(one["set"]) for one in found["settings"]]
    return found if tried == row_settings(table, row) and found["seed"] == table.tuning.seed else None


def chosen_overrides(table: ResultTable, row: str, *, quick: bool, given: Sequence[str] = ()) -> tuple[str, ...]:
    """The overrides that tuning chose for a row; where all that is tuned is given instead, none."""
    if table.tuning is None:
        return ()
    if {*table.tuning.vary, *table.rows[row].vary} <= {word.partition("=")[0] for word in given}:
        return ()
    choice = read_choice(table, row, quick=quick)
    if choice is None:
        short = " --quick" if quick else ""
        raise HardyError(
            f"{table.path}: row {row!r} is not tuned, or for other settings than the table has now. First "
            f"`hardy reproduce {table.path}{short} --tune`, or give {' and '.join(table.tuning.vary)} by hand."
        )
    return tuple(choice["chosen"])


def tuning_words(table: ResultTable, rows: Iterable[str], *, quick: bool) -> str:
    """The rule, its budget and what it chose, for the page."""
    if table.tuning is None:
        return ""
    choices = {row: found for row in rows if (found := read_choice(table, row, quick=quick))}
    if not choices:
        return ""
    counts = sorted({len(choice["settings"]) for choice in choices.values()})
    span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    rounds = max(choice["rounds"] for choice in choices.values())
    said = "; ".join(f"{row}: {', '.join(map(_short, choice['chosen']))}" for row, choice in choices.items())
    by = " and ".join(table.tuning.by)
    words = (
        f"Tuned by one rule: {span} settings a row, {rounds:,} rounds each, the best by {by} on validation rows "
        f"of seed {table.tuning.seed}, which the table does not use. Chosen: {said}."
    )
    ends = [row for row, choice in choices.items() if _at_an_end(table.tuning.vary, choice["chosen"])]
    return f"{words} At an end of what was tried: {', '.join(ends)}." if ends else words


def _at_an_end(vary: Mapping[str, Sequence[Any]], chosen: Sequence[str]) -> bool:
    """Whether a better value may lie beyond those that were tried for all rows."""
    ends = [_override(key, value) for key, values in vary.items() for value in (min(values), max(values))]
    return any(word in ends for word in chosen)


def _short(override: str) -> str:
    """training.rate=0.1 as rate 0.1."""
    key, _, value = override.partition("=")
    return f"{key.rpartition('.')[2].replace('_', ' ')} {value}"
