"""Runs of one experiment with several seeds: one folder, handled as one thing.

DIR/experiment.toml, DIR/seeds.json    written first: what is to be run
DIR/seed-0, DIR/seed-1, ...            a run folder each
DIR/summary.json, DIR/evaluation.json  mean and sample standard deviation over them
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hardy import config
from hardy.config import Experiment
from hardy.core.files import disk, file_lock, refuse_links, write_atomic
from hardy.core.json_files import read_sealed
from hardy.errors import HardyError
from hardy.evaluation.record import EVALUATION_LOCK
from hardy.report.compare import over_seeds, seeds_summary
from hardy.report.stored_run import seed_folders
from hardy.runs.api import fit, resume
from hardy.runs.folder import locked
from hardy.runs.run import Run
from hardy.user_code import RUN_FOLDER


def start_seeds(experiment: Experiment, folder: Path, count: int) -> None:
    """Writes down which seeds the folder is for: the experiment's, and those after it."""
    if any((folder / name).exists() for name in ("config.toml", "seeds.json", "sweep.json")):
        raise HardyError(f"{folder} already holds a run. Go on with `hardy resume {folder}`, or choose another folder.")
    with disk(f"the run folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "experiment.toml", (experiment.to_toml() + "\n").encode())
    seeds = {"seeds": list(range(experiment.seed, experiment.seed + count))}
    write_atomic(folder / "seeds.json", json.dumps(seeds).encode())


def resume_seeds(
    folder: Path,
    *,
    data_folder: Path | str | None = None,
    quiet: bool = False,
    remark: Callable[[str], None],
    allow_change: bool = False,
) -> Iterator[Run]:
    """Goes on with every seed that is not finished or not begun, and gives each run when it is; then writes
    summary.json."""
    with locked(folder):
        for seed, where in seed_folders(folder).items():
            if (where / "config.toml").exists():
                yield resume(where, data_folder=data_folder, quiet=quiet, remark=remark, allow_change=allow_change)
                continue
            if not (folder / "experiment.toml").exists():
                raise HardyError(
                    f"{where} was not begun and {folder} has no experiment.toml. Run the experiment again."
                )
            chosen = replace(config.read(str(folder / "experiment.toml"), allow=RUN_FOLDER), seed=seed)
            yield fit(chosen, out=where, data_folder=data_folder, quiet=quiet)
        write_seeds_summary(folder)


def run_or_resume(
    folder: Path, seeds: int, *, data_folder: Path | str | None, quiet: bool, remark: Callable[[str], None]
) -> None:
    """Runs the experiment.toml of a folder there, with one seed or several, or goes on with what was begun."""
    if seeds == 1 and (folder / "config.toml").exists():
        resume(folder, data_folder=data_folder, quiet=quiet, remark=remark)
        return
    chosen = config.read(folder / "experiment.toml", allow=RUN_FOLDER)
    if seeds == 1:
        fit(chosen, out=folder, data_folder=data_folder, quiet=quiet)
        return
    if not seed_folders(folder):
        start_seeds(chosen, folder, seeds)
    for _ in resume_seeds(folder, data_folder=data_folder, quiet=quiet, remark=remark):
        pass


def finished_seeds(folder: Path) -> list[Path]:
    """The run folders of a folder of seeds, all of them finished; none for the folder of one run."""
    found = seed_folders(folder)
    missing = [str(seed) for seed, where in found.items() if not (where / "summary.json").exists()]
    if missing:
        raise HardyError(
            f"{folder} is not finished: seed {', '.join(missing)} of {len(found)} has no summary. Go on with "
            f"`hardy resume {folder}`."
        )
    return list(found.values())


def write_seeds_summary(folder: Path) -> dict[str, Any]:
    """summary.json of a folder of seeds."""
    found = seeds_summary(finished_seeds(folder))
    write_atomic(folder / "summary.json", json.dumps(found, indent=2).encode())
    return found


def write_seeds_evaluation(folder: Path, found: Sequence[dict[str, Any]], *, best: bool) -> tuple[Path, dict[str, Any]]:
    """evaluation.json of a folder of seeds, from all that is known of each, and the mean of what hardy.evaluate has now
    found; summary.json is written anew."""
    refuse_links(folder)
    places = [where / "best" if best else where for where in finished_seeds(folder)]
    path = folder / "best" / "evaluation.json" if best else folder / "evaluation.json"
    with disk(str(path)):
        path.parent.mkdir(exist_ok=True)
    made = [one["provenance"] for one in found]
    told = {"seeds": [one["seed"] for one in made], "settings": made[0]["settings"], "versions": made[0]["versions"]}
    with file_lock(folder / EVALUATION_LOCK, wait=True):
        known = [read_sealed(where / "evaluation.json", "Remove it, and evaluate again.") for where in places]
        if any(one.get("provenance") != then for one, then in zip(known, made, strict=True)):
            known = list(found)  # another evaluation, with other settings, has taken its place
        write_atomic(path, json.dumps({**over_seeds(known), "provenance": told}, indent=2).encode())
        write_seeds_summary(folder)
    return path, over_seeds(found)


def one_seed(folder: Path, seed: int | None) -> Path:
    """The run folder of one seed; a folder of one run needs none."""
    found = seed_folders(folder)
    if not found and seed is not None:
        raise HardyError(f"--seed is {seed}, but {folder} is not a folder of several seeds. Leave it out.")
    if found and seed not in found:
        known = ", ".join(map(str, found))
        asked = "" if seed is None else f", not {seed}"
        raise HardyError(f"{folder} holds the seeds {known}{asked}. Say which, such as --seed {min(found)}.")
    return found[seed] if seed is not None else folder
