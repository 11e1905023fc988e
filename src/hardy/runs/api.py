"""What a user calls: run an experiment, go on with one, look at one again, measure it."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hardy import config
from hardy.attacks.threats import Threat
from hardy.config import Experiment
from hardy.core.federation import Federation
from hardy.core.files import disk
from hardy.core.method import BuildModel, Method
from hardy.core.tensors import shapes
from hardy.data.dataset import Dataset
from hardy.errors import HardyError
from hardy.runs import folder as folders
from hardy.runs.checkpoint import Checkpoint, load_checkpoint
from hardy.runs.evaluate import evaluate_run, of_round
from hardy.runs.loop import run_rounds
from hardy.runs.prepare import Connect, prepare
from hardy.runs.profiles import without_rows
from hardy.runs.run import Run, RunTotals


def fit(
    experiment: Experiment,
    *,
    method: Method | None = None,
    model: BuildModel | None = None,
    data: Federation | Dataset | None = None,
    out: Path | str | None = None,
    data_folder: Path | str | None = None,
    quiet: bool = False,
    network: Connect | None = None,
) -> Run:
    """Runs an experiment. A method, a model or data given as objects take the place of the names in it.

    With `out`, the run is kept in that folder and can be resumed; without, it stays in memory. `network` makes the
    engine where the clients are elsewhere.
    """
    run = prepare(experiment, method=method, model=model, data=data, data_folder=data_folder, network=network)
    select = experiment.evaluation.select
    if select and network is None and not any(len(client.validation) for client in run.engine.data.clients):
        raise HardyError(
            f"evaluation.select is {select!r}, but no client has validation rows. Set data.validation, such as 0.1."
        )
    if out is None:
        return run_rounds(run, quiet=quiet)
    run.folder = Path(out)
    if (run.folder / "config.toml").exists():
        raise HardyError(
            f"{run.folder} already holds a run. Go on with `hardy resume {run.folder}`, or choose another folder."
        )
    with disk(f"the run folder {run.folder}"):
        (run.folder / "pictures").mkdir(parents=True, exist_ok=True)
    with folders.locked(run.folder):
        folders.write_run_header(run)
        return run_rounds(run, quiet=quiet)


def resume(
    folder: Path | str,
    *,
    method: Method | None = None,
    model: BuildModel | None = None,
    data: Federation | Dataset | None = None,
    data_folder: Path | str | None = None,
    quiet: bool = False,
    remark: Any = None,
    network: Connect | None = None,
) -> Run:
    """Goes on with a run from its last good checkpoint; the end is the same, bit for bit, as if it had not stopped."""
    folder = Path(folder)
    with folders.locked(folder):
        run = _reopen(folder, method, model, data, data_folder, remark, network)
        if run.state.round == 0:
            folders.write_run_header(run)
        return run_rounds(run, quiet=quiet)


def load(
    folder: Path | str,
    *,
    method: Method | None = None,
    model: BuildModel | None = None,
    data: Federation | Dataset | None = None,
    data_folder: Path | str | None = None,
    best: bool = False,
) -> Run:
    """A run as its last good checkpoint left it, or as it was at its best round on validation rows; that one's folder
    is `best`, so that figures of it do not take the place of the last round's."""
    run = _reopen(Path(folder), method, model, data, data_folder, None, None)
    if best:
        run.folder, run.robust = Path(folder) / "best", {}
        if not run.folder.is_dir():
            raise HardyError(
                f"{folder} has no best round: none was evaluated on validation rows. Set data.validation, such as 0.1, "
                "and run it again, or take the last round."
            )
        found, _ = load_checkpoint(run.folder, run.engine.device)
        run.state, run.figures = found.server, RunTotals(**found.figures)
        run.engine.store = {**run.engine.store, **run.engine.cast(found.store)}
    return run


def evaluate(
    run: Run | Path | str,
    threats: str | Sequence[str | Threat] = (),
    *,
    data_folder: Path | str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Measures a run, or the run in a folder; hardy.runs.evaluate.evaluate_run says what the options are."""
    run = run if isinstance(run, Run) else load(run, data_folder=data_folder)
    if not any(len(client.test) + len(client.validation) for client in run.engine.data.clients):
        raise HardyError(
            f"nobody in {run.folder or 'this run'} holds rows to measure on, here. Over a network let the nodes "
            "measure (evaluation.threats in the experiment), or pass data to hardy.load."
        )
    return evaluate_run(run, threats, **options)


def _reopen(
    folder: Path,
    method: Method | None,
    model: BuildModel | None,
    data: Federation | Dataset | None,
    data_folder: Path | str | None,
    remark: Any,
    network: Connect | None,
) -> Run:
    if not (folder / "config.toml").is_file():
        raise HardyError(
            f"{folder} holds no run (no config.toml). Start one with `hardy run EXPERIMENT --out {folder}`."
        )
    text = (folder / "config.toml").read_text(encoding="utf-8")
    saved = config.parse(text, where=str(folder / "config.toml"), check=method is None)
    if far := network is None and saved.engine.name == "flower":  # to be looked at here, not to be trained
        if saved.network.clients is not None and data is None:
            data = without_rows(folder)
        saved = replace(saved, engine=replace(saved.engine, name="sequential"), network=config.NetworkChoice())
    run = prepare(
        saved,
        method=method,
        model=model,
        data=data,
        data_folder=data_folder,
        network=network,
    )
    run.folder = folder
    if far and (kept := set(run.engine.store) & run.engine.plan.model_names):
        raise HardyError(
            f"the clients of {folder} kept their {min(kept)} and more at home, so their networks cannot be built "
            "here. Let the nodes measure them: evaluation.threats in the experiment."
        )
    if not any((folder / "checkpoint").glob("round-*")):
        return run  # stopped before the first checkpoint
    checkpoint, remarks = load_checkpoint(folder / "checkpoint", run.engine.device)
    for line in remarks if remark else ():
        remark(line)
    _refuse_other_tensors(folder, run, checkpoint, private=not far)
    run.state = checkpoint.server
    if not far:
        run.engine.store = run.engine.cast(checkpoint.store)
    run.figures = RunTotals(**checkpoint.figures)
    with suppress(OSError, ValueError, KeyError):
        known = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["robust_accuracy"]
        run.robust = of_round(known, run.state.round)
    return run


def _refuse_other_tensors(folder: Path, run: Run, checkpoint: Checkpoint, *, private: bool) -> None:
    """A checkpoint of another method, model or version has other tensors; to go on with it would mean nothing."""
    groups = [(run.state.shared, checkpoint.server.shared), (run.state.reported, checkpoint.server.reported)]
    groups += [(run.state.memory, checkpoint.server.memory)]
    if private and run.local is not None:
        groups.append((run.engine.store, checkpoint.store))
    for expected, found in groups:
        other = shapes(expected).items() ^ shapes(found).items()
        if other:
            raise HardyError(
                f"the checkpoint of {folder} does not fit method {run.engine.plan.method.name!r}: {min(other)[0]} is "
                "missing, additional or of another shape. Pass the method, model and data that the run was started "
                "with, or start it again."
            )
