"""A sweep: one experiment with several settings, ranked by accuracy on validation rows.

    DIR/sweep.json                      written first: the settings to run; figures come in as they are found
    DIR/setting-1, DIR/setting-2, ...   a run folder each, or a folder of seeds; experiment.toml in it is the setting's

Test rows choose nothing: the test accuracy of the chosen setting alone is given, at its best round on validation rows.
"""

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from torch import OutOfMemoryError

from hardy import config
from hardy.config import Experiment
from hardy.core.files import disk, write_atomic
from hardy.core.json_files import read_sealed, write_sealed
from hardy.errors import HardyError
from hardy.report.stored_run import number, read_run, seed_folders
from hardy.runs.folder import locked
from hardy.runs.seeds import run_or_resume
from hardy.user_code import RUN_FOLDER

_MOST = 1000
"""settings of one sweep"""


def grid_settings(vary: Sequence[str]) -> list[list[str]]:
    """Every combination of the values: ["rate=1,2", "batch=3"] gives [["rate=1", "batch=3"], ["rate=2", "batch=3"]]."""
    choices: dict[str, list[str]] = {}
    for key, values in _choices(vary).items():
        if isinstance(values, _Range):
            raise HardyError(f"{key} varies over the range {values.text}: that needs --random N. Or list the values.")
        choices[key] = values
    if (count := math.prod(map(len, choices.values()))) > _MOST:
        raise HardyError(f"the grid has {count} settings; it may have up to {_MOST}. Vary less, or take --random N.")
    return [
        [f"{key}={value}" for key, value in zip(choices, chosen, strict=True)]
        for chosen in itertools.product(*choices.values())
    ]


def random_settings(vary: Sequence[str], count: int, seed: int) -> list[list[str]]:
    """So many different settings, drawn at random: a value of each list, a number of each range."""
    if not 1 <= count <= _MOST:
        raise HardyError(f"--random is {count}; it must be in 1 ... {_MOST}.")
    choices = _choices(vary)
    listed = [list(values) for values in choices.values() if not isinstance(values, _Range)]
    if len(listed) == len(choices) and count > (every := math.prod(map(len, listed))):
        raise HardyError(f"--random is {count}, but there are {every} settings in all. Leave it out for the grid.")
    draw, found = random.Random(seed), dict[tuple[str, ...], None]()
    for _ in range(100 * count):
        found[tuple(f"{key}={_drawn(values, draw)}" for key, values in choices.items())] = None
        if len(found) == count:
            return [list(setting) for setting in found]
    raise HardyError(f"--random is {count}, but the ranges hold few whole numbers. Ask for fewer, or widen them.")


class _Range:
    """`1e-3..0.1:log`: numbers between two, or their logarithms; whole ones between whole ones."""

    def __init__(self, key: str, text: str) -> None:
        self.text = text
        ends, _, scale = text.partition(":")
        try:
            low, high = (float(word) for word in ends.split(".."))
            self.whole = not set(ends.replace("..", "")) & set(".eE")
        except ValueError:
            low = high = math.nan
        if not low < high or scale not in ("", "log") or (scale and low <= 0) or math.isinf(high - low):
            raise HardyError(f"{key} varies over {text!r}; a range is LOW..HIGH or, with LOW above 0, LOW..HIGH:log.")
        self.low, self.high, self.log = low, high, bool(scale)

    def draw(self, source: random.Random) -> str:
        if self.log:
            value = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        elif self.whole:
            value = source.randint(int(self.low), int(self.high))
        else:
            value = source.uniform(self.low, self.high)
        return str(round(value)) if self.whole else f"{value:.4g}"


def _choices(vary: Sequence[str]) -> "dict[str, _Range | list[str]]":
    pairs = [_varied(text) for text in vary]
    found = dict(pairs)
    if len(found) < len(pairs):
        raise HardyError(f"--vary names a key twice: {', '.join(key for key, _ in pairs)}. List its values once.")
    return found


def _drawn(values: "_Range | list[str]", source: random.Random) -> str:
    return values.draw(source) if isinstance(values, _Range) else source.choice(values)


def _varied(text: str) -> "tuple[str, _Range | list[str]]":
    key, equals, values = text.partition("=")
    if not equals or not key or not values:
        raise HardyError(f"--vary {text!r}: write KEY=VALUE,VALUE, for example training.rate=0.01,0.1.")
    if key == "seed":
        raise HardyError("--vary seed would choose the luckiest seed. Use --seeds N: its mean counts.")
    if ".." in values and "/" not in values:  # ../mine.py:mine is a file
        return key, _Range(key, values)
    found = _split(values)
    if len(set(found)) != len(found) or not all(found):
        raise HardyError(f"--vary {text!r}: a value is empty or stands there twice.")
    return key, found


def _split(text: str) -> list[str]:
    """At the commas outside brackets, braces and quotes: each piece is a TOML value or a bare word."""
    found, depth, quoted = [""], 0, ""
    for letter in text:
        if quoted:
            quoted = "" if letter == quoted else quoted
        elif letter in "\"'":
            quoted = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quoted:
            found.append("")
        else:
            found[-1] += letter
    return [word.strip() for word in found]


def start_sweep(experiment: Experiment, folder: Path, settings: Sequence[Sequence[str]], seeds: int = 1) -> None:
    """Checks every setting and writes down what the folder is for."""
    if any((folder / name).exists() for name in ("config.toml", "seeds.json", "sweep.json")):
        raise HardyError(f"{folder} already holds a run. Go on with `hardy resume {folder}`, or choose another folder.")
    text, texts = experiment.to_toml(), []
    for setting in settings:
        chosen = config.parse(text, setting, allow=RUN_FOLDER)
        if not chosen.data.validation:
            raise HardyError("a sweep chooses on validation rows and data.validation is 0. Set it, such as 0.1.")
        if chosen.engine.name == "flower":
            raise HardyError("a sweep runs on this machine; engine.name is flower. Leave it out.")
        texts.append(chosen.to_toml() + "\n")
    rows = [{"folder": f"setting-{at}", "overrides": list(setting)} for at, setting in enumerate(settings, 1)]
    for row, made in zip(rows, texts, strict=True):
        where = folder / str(row["folder"])
        with disk(f"the folder {where}"):
            where.mkdir(parents=True, exist_ok=True)
        write_atomic(where / "experiment.toml", made.encode())
    _write(folder, {"seeds": seeds, "settings": rows})


def resume_sweep(
    folder: Path,
    *,
    data_folder: Path | str | None = None,
    quiet: bool = False,
    remark: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Goes on with the settings that have no figures yet, and gives the row of each when it has. A setting that cannot
    be run is noted and left; the others go on. At last the best one is chosen."""
    with locked(folder):
        record = read_sweep(folder)
        for row in record["settings"]:
            if "validation_accuracy" not in row:
                row.pop("failed", None)
                try:
                    where = folder / row["folder"]
                    run_or_resume(where, record["seeds"], data_folder=data_folder, quiet=quiet, remark=remark)
                    row |= _figures(where)
                except (HardyError, MemoryError, OutOfMemoryError) as error:
                    row["failed"] = str(error)
                _write(folder, record)
            yield row
        ranked = rank(record["settings"])
        if not ranked:
            raise HardyError(f"no setting of {folder} could be run; the first: {record['settings'][0]['failed']}")
        best = ranked[0]
        record["chosen"] = {**best, "test_accuracy": _figures(folder / best["folder"], test=True)["test_accuracy"]}
        _write(folder, record)


def _figures(where: Path, *, test: bool = False) -> dict[str, float]:
    """Accuracy at the best round on validation rows, mean over seeds; of validation rows, or also of test rows."""
    summaries = [read_run(run).summary for run in seed_folders(where).values() or [where]]
    keys: dict[str, tuple[str, ...]] = {"validation_accuracy": ("best", "validation_accuracy")}
    if test:
        keys["test_accuracy"] = ("best", "standard_accuracy", "mean")
    found = {name: [number(one, *path) for one in summaries] for name, path in keys.items()}
    if any(value is None for values in found.values() for value in values):
        raise HardyError(f"{where} has no accuracy on validation rows. Set data.validation, such as 0.1.")
    return {name: mean(value for value in values if value is not None) for name, values in found.items()}


def rank(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with figures, the best on validation rows first; of equals the earlier."""
    return sorted((row for row in rows if "validation_accuracy" in row), key=lambda row: -row["validation_accuracy"])


def read_sweep(folder: Path) -> dict[str, Any]:
    """What sweep.json holds."""
    path, remedy = folder / "sweep.json", "Start the sweep again elsewhere."
    record = read_sealed(path, remedy)
    try:
        if not all(re.fullmatch(r"setting-\d+", row["folder"]) and row["overrides"] for row in record["settings"]):
            raise ValueError("a setting without folder or overrides")
        int(record["seeds"])
    except (ValueError, KeyError, TypeError) as error:
        raise HardyError(f"cannot read {path}: {error}. {remedy}") from error
    return record


def _write(folder: Path, record: dict[str, Any]) -> None:
    write_sealed(folder / "sweep.json", record, indent=1)
