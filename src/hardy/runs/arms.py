"""An experiment and its arms as runs: one folder, handled as one thing.

DIR                             the experiment: a run folder, or one of several seeds
DIR/arms.json                   written first: which arms there are
DIR/arms/NAME                   an arm each: experiment.toml, then a run folder, or one of several seeds
DIR/comparison.html             all of them side by side, when all are finished
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hardy import config
from hardy.config import Experiment
from hardy.config.arm_table import Arms, is_arm_name
from hardy.core.files import disk, write_atomic
from hardy.core.json_files import read_json
from hardy.errors import HardyError
from hardy.runs.seeds import run_or_resume
from hardy.user_code import RUN_FOLDER

_FILE = "arms.json"


def start_arms(experiment: Experiment, arms: Arms, folder: Path, seeds: int) -> None:
    """Checks every arm and writes down what the folder is for, before anything is trained."""
    if any((folder / name).exists() for name in ("config.toml", "seeds.json", "sweep.json", _FILE)):
        raise HardyError(f"{folder} already holds a run. Go on with `hardy resume {folder}`, or choose another folder.")
    text = experiment.to_toml()
    for name, overrides in arms.overrides.items():
        try:
            chosen = config.parse(text, overrides, allow=RUN_FOLDER)
        except HardyError as error:
            raise HardyError(f"arm {name}: {error} Or leave the arms out: --alone.") from error
        where = folder / "arms" / name
        with disk(f"the folder {where}"):
            where.mkdir(parents=True, exist_ok=True)
        write_atomic(where / "experiment.toml", (chosen.to_toml() + "\n").encode())
    write_atomic(folder / _FILE, json.dumps({"look": arms.look, "seeds": seeds, "arms": list(arms.overrides)}).encode())


def has_arms(folder: Path) -> bool:
    """Whether the folder is that of an experiment with arms."""
    return (folder / _FILE).is_file()


def look_of(folder: Path) -> str:
    """What to look at in their figures."""
    return str(_record(folder).get("look", ""))


def arm_folders(folder: Path) -> list[Path]:
    """The experiment's own folder and those of its arms; of a folder without arms, itself."""
    if not has_arms(folder):
        return [folder]
    return [folder, *(folder / "arms" / name for name in _record(folder)["arms"])]


def resume_arms(
    folder: Path, *, data_folder: Path | str | None, quiet: bool, remark: Callable[[str], None]
) -> Iterator[Path]:
    """Goes on with the arms that are not finished, or not begun; gives the folder of each when it is."""
    for where in arm_folders(folder)[1:]:
        run_or_resume(where, _record(folder)["seeds"], data_folder=data_folder, quiet=quiet, remark=remark)
        yield where


def _record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(folder / _FILE, dict, "Run the experiment again, into another folder.")
    arms, seeds = found.get("arms"), found.get("seeds")
    if not isinstance(arms, list) or not all(map(is_arm_name, arms)) or not isinstance(seeds, int) or seeds < 1:
        raise HardyError(f"{folder / _FILE} names no arms. Run the experiment again, into another folder.")
    return found
