"""What a user calls: run an experiment, go on with one, look at one again, measure it."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hardy import config
from hardy.callbacks.base import check_callbacks, is_stored
from hardy.config import Experiment
from hardy.core.disk_store import DiskStore
from hardy.core.files import disk, make_folder, refuse_links
from hardy.core.json_files import read_sealed
from hardy.core.method import Method
from hardy.core.ranks import Ranks
from hardy.core.spending import privacy_spent
from hardy.core.store import MemoryStore
from hardy.core.tensors import shapes
from hardy.data.given import OwnData
from hardy.engines.process_group import ProcessGroup
from hardy.errors import HardyError
from hardy.runs import folder as folders
from hardy.runs.checkpoint import Checkpoint, load_checkpoint, rounds_in, saved_experiment
from hardy.runs.classifiers import Classifier, evaluate_classifier
from hardy.runs.evaluate import evaluate_run, metrics_of_round, of_round
from hardy.runs.loop import run_rounds
from hardy.runs.networks import OwnModel
from hardy.runs.prepare import Connect, prepare
from hardy.runs.profiles import without_rows
from hardy.runs.run import Run, RunTotals
from hardy.runs.warm_start import warm_start
from hardy.runs.workers import refuse_workers, serve_first_rank, started_ranks, torchrun_ranks, with_workers
from hardy.user_code import RUN_FOLDER, named_by_user

_LOG = logging.getLogger("hardy")


def fit(
    experiment: Experiment | Path | str | None = None,
    overrides: Mapping[str, Any] | Iterable[str] = (),
    *,
    method: Method | config.Table | str | None = None,
    model: OwnModel | config.Table | str | None = None,
    data: OwnData | config.Table | str | None = None,
    out: Path | str | None = None,
    data_folder: Path | str | None = None,
    quiet: bool = False,
    network: Connect | None = None,
    callbacks: Sequence[Any] = (),
    init: Any = None,
    init_head: bool = True,
    **keys: Any,
) -> Run:
    """Runs an experiment: a bundled name, a TOML file, an Experiment; without one, its defaults.

    Any key of an experiment is an argument (`rounds=5`, `training={"rate": 0.1}`); `overrides` takes dotted ones
    (`{"training.rate": 0.1}` or `["training.rate=0.1"]`). `method` and `model` are names, tables with options, or
    objects; a model may be a module, its class, or a function. `data` are rows: (x, y, x_test, y_test), a list of such
    tuples, one a client, or torch Datasets; or a path, or a table of [data].

    With `out`, the run is kept in that folder and can be resumed; without, it stays in memory. `network` makes the
    engine where the clients are elsewhere. `callbacks` are functions of (run, line), called after each round, or
    hardy.callbacks; the latter are written down with the experiment, so that a resumed run has them too.

    `init` is what to start from: a run, its folder, a state_dict, a .safetensors or .pt file, or a trained module.
    `init_head=False` leaves the last layer fresh, for another number of classes.
    """
    for name, value in (("method", method), ("model", model), ("data", data)):
        if isinstance(value, str | dict) and not (name == "data" and _are_rows(value)):
            keys[name] = {"source": value} if name == "data" and isinstance(value, str) else value
    experiment = _experiment(experiment, overrides, keys)
    method = None if isinstance(method, str | dict) else method
    model = None if isinstance(model, str | dict) else model
    data = None if "data" in keys else data
    kept = [callback for callback in callbacks if is_stored(callback) and callback not in experiment.callbacks]
    experiment = replace(experiment, callbacks=(*experiment.callbacks, *kept))
    experiment = with_workers(experiment)
    with started_ranks(experiment, data_folder, {"method": method, "model": model, "data": data}) as ranks:
        run = prepare(experiment, method=method, model=model, data=data, data_folder=data_folder, network=network)
        return _fit(run, out, quiet=quiet, callbacks=callbacks, init=init, init_head=init_head, ranks=ranks)


def _fit(
    run: Run, out: Path | str | None, *, quiet: bool, callbacks: Sequence[Any], init: Any, init_head: bool, ranks: Ranks
) -> Run:
    """A run that is prepared, from its first round to its report."""
    experiment = run.experiment
    refuse_workers(run)
    select = experiment.evaluation.select
    if select and run.local and not any(len(client.validation) for client in run.engine.data.profiles):
        raise HardyError(
            f"evaluation.select is {select!r}, but no client has validation rows. Set data.validation, such as 0.1."
        )
    if isinstance(ranks, ProcessGroup) and ranks.number:
        serve_first_rank(run, ranks)
        return run
    run.folder = None if out is None else Path(out)
    check_callbacks(run, [*experiment.callbacks, *callbacks])
    if init is not None:
        warm_start(run, init, head=init_head)
    elif experiment.init is not None:
        warm_start(run, experiment.init, head=experiment.init_head and init_head)
    elif not init_head:
        raise HardyError("init_head is False, but there is no init, so it has no effect. Leave it out.")
    if run.folder is None:
        return run_rounds(run, quiet=quiet, callbacks=callbacks, ranks=ranks)
    if (run.folder / "config.toml").exists():
        raise HardyError(
            f"{run.folder} already holds a run. Go on with `hardy resume {run.folder}`, or choose another folder."
        )
    with disk(f"the run folder {run.folder}"):
        make_folder(run.folder / "pictures")
    with folders.locked(run.folder):
        folders.write_run_header(run)
        return run_rounds(run, quiet=quiet, callbacks=callbacks, ranks=ranks)


def _are_rows(data: object) -> bool:
    """Whether a dict given as data holds clients' rows by name, not keys of [data]."""
    return isinstance(data, dict) and not data.keys() <= {field.name for field in fields(config.DataChoice)}


def _experiment(
    experiment: Experiment | Path | str | None, overrides: Mapping[str, Any] | Iterable[str], keys: dict[str, Any]
) -> Experiment:
    """The experiment that is meant, with other values for some keys."""
    if isinstance(experiment, str | Path):
        if not isinstance(overrides, Mapping):
            experiment, overrides = config.read(experiment, overrides, check=not keys), {}
        else:
            experiment = config.read(experiment, check=not (keys or overrides))
    elif experiment is None:
        experiment = Experiment()
    elif not isinstance(experiment, Experiment):
        raise HardyError(
            f"the experiment is {type(experiment).__name__}; it must be a bundled name, a TOML file or an Experiment."
        )
    return config.changed(config.changed(experiment, overrides), keys)


def resume(
    folder: Path | str,
    *,
    method: Method | config.Table | str | None = None,
    model: OwnModel | config.Table | str | None = None,
    data: OwnData | None = None,
    data_folder: Path | str | None = None,
    quiet: bool = False,
    remark: Callable[[str], None] = _LOG.warning,
    network: Connect | None = None,
    allow_change: bool = False,
    callbacks: Sequence[Any] = (),
    workers: int | None = None,
) -> Run:
    """Goes on with a run from its last good checkpoint; the end is the same, bit for bit, as if it had not stopped.

    A run that was given a method, a model or data as objects needs them again; a method or a model may also be a name,
    or a table with options, as in `fit`. A config.toml that is not the checkpoint's experiment is an error unless
    `allow_change`; more rounds are no change. `workers`: how many share the clients from here on, if not as many as
    before; the figures are then the same up to rounding.
    `remark` is told of damaged checkpoints, missing lines of metrics.jsonl and the like.
    """
    folder = Path(folder)
    number, world = torchrun_ranks()
    workers = workers or (world if world > 1 else None)
    if number:  # the first rank alone writes to the folder
        run, _ = _reopen(folder, method, model, data, data_folder, _LOG.debug, network, allow_change)
        with _ranks_again(run, data_folder, workers) as ranks:
            assert isinstance(ranks, ProcessGroup)
            serve_first_rank(run, ranks)
        return run
    with folders.locked(folder):
        run, digests = _reopen(folder, method, model, data, data_folder, remark, network, allow_change)
        if run.state.round == 0:
            folders.write_run_header(run)
        for line in folders.mend(run, digests):
            remark(line)
        check_callbacks(run, [*run.experiment.callbacks, *callbacks])
        if run.experiment.init is not None and not rounds_in(folder / "checkpoint"):
            warm_start(run, run.experiment.init, head=run.experiment.init_head)
        with _ranks_again(run, data_folder, workers) as ranks:
            return run_rounds(run, quiet=quiet, callbacks=callbacks, ranks=ranks)


@contextmanager
def _ranks_again(run: Run, data_folder: Path | str | None, workers: int | None) -> Iterator[Ranks]:
    """The ranks of a run that goes on, as many as are asked for."""
    choice, held = run.experiment.engine, run.experiment
    run.experiment = with_workers(replace(held, engine=replace(choice, workers=workers or choice.workers)))
    refuse_workers(run)
    named = {"method": held.method, "model": held.model, "data": held.data.source}
    objects = {name: value if value == config.FROM_PYTHON else None for name, value in named.items()}
    with started_ranks(run.experiment, data_folder, objects) as ranks:
        yield ranks


def load(
    folder: Path | str,
    *,
    method: Method | config.Table | str | None = None,
    model: OwnModel | config.Table | str | None = None,
    data: OwnData | None = None,
    data_folder: Path | str | None = None,
    best: bool = False,
    allow_change: bool = False,
) -> Run:
    """A run as its last good checkpoint left it, or as it was at its best round on validation rows; that one's folder
    is `best`, so that figures of it do not take the place of the last round's. The rest is as in `resume`."""
    run, _ = _reopen(Path(folder), method, model, data, data_folder, _LOG.warning, None, allow_change)
    if run.state.round == 0 and not rounds_in(Path(folder) / "checkpoint"):
        raise HardyError(f"{folder} has no checkpoint, so its networks are untrained. `hardy resume {folder}` first.")
    if best:
        known = run.history
        run.folder, run.robust, run.robust_metrics = Path(folder) / "best", {}, {}
        if not run.folder.is_dir():
            raise HardyError(
                f"{folder} has no best round: none was evaluated on validation rows. Set data.validation, such as 0.1, "
                "and run it again, or take the last round."
            )
        found, _ = load_checkpoint(run.folder, run.engine.device)
        run.state, run.figures = run.server.exchange.opened(found.server), RunTotals(**found.figures)
        run.rows = [row for row in known if row["round"] <= run.state.round]
        best_rows = found.store.cast(run.engine.cast)
        on_disk = isinstance(best_rows, DiskStore)
        run.engine.store = best_rows if on_disk else MemoryStore({**run.engine.store, **best_rows})
    return run


def evaluate(
    model: Run | Classifier, *given: Any, data_folder: Path | str | None = None, **options: Any
) -> dict[str, Any]:
    """Measures a run or the run in a folder, `evaluate(run, "pgd-20")`, or any classifier on data: a torch module, a
    function of images or an ONNX file, `evaluate(net, (x, y), "pgd-20")`.

    hardy.runs.evaluate.evaluate_run and hardy.runs.classifiers.evaluate_classifier say what the options are.
    """
    if not isinstance(model, Run | Path | str) or (isinstance(model, Path | str) and Path(model).suffix == ".onnx"):
        if not given and "data" not in options:
            raise HardyError("a classifier is measured on data: hardy.evaluate(net, (x, y), 'pgd-20').")
        return evaluate_classifier(model, *given, **options)
    run = model if isinstance(model, Run) else load(model, data_folder=data_folder)
    given = tuple(named_by_user(one) if isinstance(one, list | tuple) else one for one in given)
    if not any(len(client.test) + len(client.validation) for client in run.engine.data.profiles):
        raise HardyError(
            f"nobody in {run.folder or 'this run'} holds rows to measure on, here. Over a network let the nodes "
            "measure (evaluation.threats in the experiment), or pass data to hardy.load."
        )
    return evaluate_run(run, *given, **options)


def _reopen(
    folder: Path,
    method: Method | config.Table | str | None,
    model: OwnModel | config.Table | str | None,
    data: OwnData | None,
    data_folder: Path | str | None,
    remark: Callable[[str], None],
    network: Connect | None,
    allow_change: bool,
) -> tuple[Run, dict[str, str]]:
    """The run of a folder as its newest whole checkpoint has it, and the checksums of the files it answers for."""
    if not (folder / "config.toml").is_file():
        several = (
            "setting-1" if (folder / "sweep.json").exists() else next((p.name for p in folder.glob("seed-*")), None)
        )
        if several is not None:
            raise HardyError(f"{folder} holds several runs. Give one of them, such as {folder / several}.")
        raise HardyError(
            f"{folder} holds no run (no config.toml). Start one with `hardy run EXPERIMENT --out {folder}`."
        )
    refuse_links(folder)
    try:
        text = (folder / "config.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HardyError(f"cannot read {folder / 'config.toml'}: {error}. It must be a TOML file in UTF-8.") from error
    saved = config.parse(text, where=str(folder / "config.toml"), check=method is None, allow=RUN_FOLDER, folder=folder)
    before = saved_experiment(folder / "checkpoint")
    if before is not None and not allow_change:
        folders.refuse_changes(folder, text, saved, before)
    method = _same_name(folder, "method", saved.method, method)
    model = _same_name(folder, "model", saved.model, model)
    if isinstance(method, str | dict):
        method = config.method(config.changed(saved, {"method": method}))
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
    if not rounds_in(folder / "checkpoint"):
        if (folder / "metrics.jsonl").exists():
            remark(f"{folder} has no checkpoint: it was stopped before the first one, or lost them.")
        return run, {}
    checkpoint, remarks = load_checkpoint(folder / "checkpoint", run.engine.device)
    for line in remarks:
        remark(line)
    _refuse_other_tensors(folder, run, checkpoint, private=not far)
    run.state = run.server.exchange.opened(checkpoint.server)
    if not far:
        run.engine.store = checkpoint.store.cast(run.engine.cast)
    run.figures, run.rows = RunTotals(**checkpoint.figures), None
    if before is not None and allow_change and (privacy_spent(run.server, 1) or _was_private(run)):
        folders.refuse_private_changes(folder, folders.changed_keys(text, saved, before))
    if (folder / "summary.json").exists():
        try:
            known = read_sealed(folder / "summary.json", "Its figures are measured anew.")
            run.robust = of_round(known["robust_accuracy"], run.state.round)
            run.robust_metrics = metrics_of_round(known.get("robust_metrics", {}), run.state.round)
        except (HardyError, KeyError, AttributeError) as error:
            remark(str(error))
    return run, checkpoint.digests


def _was_private(run: Run) -> bool:
    """Whether the rounds so far spent privacy."""
    return any(key.endswith("_epsilon") for line in run.history[:1] for key in line)


def _same_name(folder: Path, key: str, saved: config.Table | str, given: Any) -> Any:
    """A name given for what the run has by name too is nothing new, or a mistake."""
    if not isinstance(given, str | dict):
        return given
    given = named_by_user(given)
    if config.named(saved, key)[0] == config.FROM_PYTHON:
        return given
    if config.named(given, key) != config.named(saved, key):
        raise HardyError(
            f"{key} is {given!r}, but {folder} was started with {saved!r}. Leave it out, or start another run."
        )
    return None


def _refuse_other_tensors(folder: Path, run: Run, checkpoint: Checkpoint, *, private: bool) -> None:
    """A checkpoint of another method, model or version has other tensors; to go on with it would mean nothing."""
    groups = [
        (shapes(run.state.shared), shapes(checkpoint.server.shared)),
        (run.state.reported.shapes, checkpoint.server.reported.shapes),
        (shapes(run.state.memory), shapes(checkpoint.server.memory)),
    ]
    if private and run.local is not None:
        groups.append((run.engine.store.shapes, checkpoint.store.shapes))
    for expected, found in groups:
        other = expected.items() ^ found.items()
        if other:
            raise HardyError(
                f"the checkpoint of {folder} does not fit method {run.engine.plan.method.name!r}: {min(other)[0]} is "
                "missing, additional or of another shape. Pass the method, model and data that the run was started "
                "with, or start it again."
            )
