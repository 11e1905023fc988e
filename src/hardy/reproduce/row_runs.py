"""Running rows: each a run folder that goes on where it was stopped, then its figures."""

import gc
import importlib.util
import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import hardy
from hardy.config import Experiment
from hardy.core.files import versions
from hardy.errors import AllRefused, HardyError, unknown
from hardy.report.stored_run import read_run
from hardy.reproduce.definition import ResultTable, RowMeasure, find_table, read_table, same_row, table_files
from hardy.reproduce.records import (
    SCHEMA,
    Record,
    commit_of,
    configuration_hash,
    described,
    has_figure,
    read_record,
    short_hash,
    slug,
    today,
    write_record,
)
from hardy.reproduce.row_tuning import chosen_overrides, row_settings, tuning_measures
from hardy.runs.api import evaluate, fit, load, resume
from hardy.runs.run import Run

_FIGURE = ("mean", "images", "standard_error", "worst_client", "by_domain", "round")
_KINDS = "AT", "ST"
_UNTESTED = ("evaluation.threats=[]", "evaluation.robustness=[]")
"""the table says what is measured"""


@dataclass(frozen=True, kw_only=True)
class RowJob:
    """A row with a seed, as a process is told of it."""

    folder: Path
    """of all tables"""
    table: str
    row: str
    seed: int
    """how many seeds after the experiment's"""
    out: Path
    quick: bool = False
    overrides: tuple[str, ...] = ()
    setting: tuple[str, ...] | None = None
    """overrides that tuning tries, on its own seed and validation rows; None: the row as it was tuned"""
    data: Path | None = None


def plan_rows(
    folder: Path,
    names: Sequence[str],
    *,
    patterns: Sequence[str],
    seeds: int,
    quick: bool,
    out: Path,
    overrides: tuple[str, ...] = (),
    data: Path | None = None,
    tune: bool = False,
) -> tuple[list[ResultTable], list[RowJob]]:
    """The tables that names stand for, and their rows: seed by seed, so that every row has one before any has two.
    With `tune`, every setting of every row instead."""
    named = (table for name in names for table in _tables(folder, name, quick=quick))
    tables = list({table.path: table for table in named}.values())
    rows = [(table, row) for table in tables for row in table.rows_of(quick=quick)]
    for table in tables:
        if quick and table.quick is None:
            raise HardyError(f"{table.path} has no short form on the embedded digits. Leave --quick out.")
    for pattern in patterns:
        if not any(_named(pattern, row) for _, row in rows):
            raise unknown("row", pattern, [row for _, row in rows])
    chosen = [(table, row) for table, row in rows if not patterns or any(_named(one, row) for one in patterns)]
    if tune:
        chosen = [(table, row) for table, row in chosen if table.tuning and not table.rows[row].same]
        if not chosen:
            raise HardyError(f"{', '.join(names)} has no [tuning] in its TOML, so --tune has no effect. Leave it out.")
    first = RowJob(folder=folder, table="", row="", seed=0, out=out, quick=quick, overrides=overrides, data=data)
    return tables, [
        replace(first, table=table.path, row=row, seed=seed, setting=setting)
        for seed in range(seeds)
        for table, row in chosen
        for setting in (row_settings(table, row) if tune else [None])
    ]


def _tables(folder: Path, name: str, *, quick: bool) -> list[ResultTable]:
    """One table, or all of a paper: with `quick`, those that have a short form."""
    if not (folder / name / "paper.toml").is_file():
        return [find_table(folder, name)]
    tables = [read_table(path) for path in table_files(folder, name)]
    return [table for table in tables if table.quick or not quick]


def _named(pattern: str, row: str) -> bool:
    if pattern == row:
        return True
    try:
        return re.search(pattern, row) is not None
    except re.error as error:
        raise HardyError(
            f"--rows {pattern!r} is no pattern: {error}. Give a row's name, or a regular expression."
        ) from None


def try_row(job: RowJob, *, quiet: bool) -> Record | str:
    """The record of a row, or the words of what went wrong: others may go on."""
    try:
        return run_row(job, quiet=quiet)
    except (HardyError, MemoryError, OSError, RuntimeError) as error:
        return str(error) or type(error).__name__
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run_row(job: RowJob, *, quiet: bool = True) -> Record:
    """The record of a row, from its run. A run and figures that are there are used again."""
    table = find_table(job.folder, job.table)
    measures = table.measures_of(job.row, quick=job.quick) if job.setting is None else tuning_measures(table)
    if job.setting is None and job.quick and table.quick and table.quick.limit:
        measures = [replace(one, limit=table.quick.limit) if one.threat else one for one in measures]
    if table.program:
        return _run_program(table, job)
    chosen, home, name = row_experiment(table, job)
    mark = configuration_hash(chosen, table.folder)
    folder = job.out / home.paper / home.name / f"{slug(name)}-{mark}" / f"seed-{chosen.seed}"
    record_path = folder.with_name(f"{folder.name}.{table.name}.json")
    record: Record | None = read_record(record_path) if record_path.exists() else None
    if record is not None and all(has_figure(record, one) for one in measures):
        return record
    try:
        run = _fit_or_resume(chosen, folder, job.data, quiet=quiet)
    except AllRefused as error:
        if job.setting is None:
            raise
        return {**_record(table, job, mark), **_of_none(chosen), "failed": str(error)}
    figures = {} if record is None else record["figures"]
    record = {**_record(table, job, mark), **_of_run(run, folder), "figures": figures}
    for measure in measures:  # those under one attack in a row, so that what evaluation.json holds is used again
        if not has_figure(record, measure):
            figures[measure.name] = _measure(run, measure, job.data, quiet=quiet)
            if figures[measure.name]["images"] is None:
                record["unknown"] |= dict.fromkeys(("images", "standard_error"), "of a number not of test images")
            write_record(record_path, record)
    return record


def row_experiment(table: ResultTable, job: RowJob) -> tuple[Experiment, ResultTable, str]:
    """The experiment of a row, and the table and row whose runs it shares."""
    home, name = same_row(table, job.row)
    file = home.quick.experiment if job.quick and home.quick and home.quick.experiment else home.experiment
    if job.setting is None:
        tuned = chosen_overrides(home, name, quick=job.quick, given=job.overrides)
    else:
        assert home.tuning is not None
        own = home.quick.tuning if job.quick and home.quick else None
        tuned = *(home.tuning.set if own is None else own), *job.setting
    overrides = [*home.overrides_of(name, quick=job.quick), *tuned, *_UNTESTED, *job.overrides]
    code = [str((home.folder / home.code).resolve())] if home.code else []
    chosen = hardy.read(home.folder / file, overrides, imports=code)
    if job.setting is not None and home.tuning is not None:
        return replace(chosen, seed=home.tuning.seed), home, name
    seed = chosen.seed + job.seed
    if home.tuning and seed == home.tuning.seed:
        raise HardyError(f"{home.path} is tuned on seed {seed}, so it cannot be measured on it. Take fewer --seeds.")
    return replace(chosen, seed=seed), home, name


def _record(table: ResultTable, job: RowJob, mark: str) -> Record:
    commit = commit_of(Path(hardy.__file__).parent)
    return {
        "schema": SCHEMA,
        "table": table.path,
        "row": job.row,
        "quick": job.quick,
        "configuration": mark,
        "overrides": list(job.overrides),
        "commit": commit,
        "date": today(),
        "versions": versions(),
        "unknown": {} if commit else {"commit": "not run in a checkout"},
    }


def _of_none(chosen: Experiment) -> Record:
    """A setting of tuning that cannot be trained: no figures, so that any other setting is better."""
    return {"seed": chosen.seed, "rounds": chosen.rounds, "seconds": None, "figures": {}}


def _of_run(run: Run, folder: Path) -> Record:
    summary = run.summary()
    costs = {key: summary[key] for key in ("parameters", "macs", "bytes_up", "bytes_down")}
    curve = read_run(folder).series("standard_accuracy", "mean")
    return {
        "seed": run.experiment.seed,
        "device": summary["device"],
        "precision": run.experiment.engine.precision,
        "rounds": summary["rounds"],
        "seconds": round(summary["seconds"], 1),
        "costs": costs | {"macs_a_round": round(summary["macs"] / summary["rounds"])},
        "curve": [[at, round(value, 4)] for at, value in curve],
    }


def _fit_or_resume(chosen: Experiment, folder: Path, data: Path | None, *, quiet: bool) -> Run:
    if (folder / "config.toml").exists():
        return resume(folder, data_folder=data, quiet=quiet)
    return fit(chosen, out=folder, data_folder=data, quiet=quiet)


def _measure(run: Run, measure: RowMeasure, data: Path | None, *, quiet: bool) -> dict[str, Any]:
    """A figure as a record holds it."""
    if measure.metric:
        return _own_metric(run, measure)
    assert run.folder is not None
    seen = load(run.folder, best=True, data_folder=data) if measure.best else run
    if measure.fine_tune:
        seen = seen.fine_tune(**measure.fine_tune)
    found = evaluate(
        seen,
        [measure.threat] if measure.threat else (),
        metrics=(),
        width=measure.width,
        robustness=measure.robustness,
        attack_branch=measure.attack_branch,
        predict_branch=measure.predict_branch,
        limit=measure.limit,
        part=measure.part,
        checks=False,
        report=False,
        quiet=quiet,
    )
    score = next(iter(found["robust_accuracy"].values())) if measure.threat else found["standard_accuracy"]
    figure = {key: _rounded(score[key]) for key in _FIGURE} | _distinct(run, measure, score)
    figure |= _by_kind(run, score["by_client"])
    if measure.width != 1 or len(run.engine.plan.method.budget.widths) > 1:
        costs = run.customise(client=0).customise(width=measure.width, robustness=measure.robustness).costs()
        figure |= {key: costs[key] for key in ("macs", "parameters")}
    return figure | {"how": described(measure)}


def _own_metric(run: Run, measure: RowMeasure) -> dict[str, Any]:
    """A metric that the run took in its last round, or another number of it, such as drift."""
    assert run.folder is not None
    taken = run.summary()["metrics"]
    if measure.metric in taken:
        found = taken[measure.metric]
        return {key: _rounded(found[key]) for key in _FIGURE} | {"how": described(measure)}
    series = read_run(run.folder).series(*measure.metric.split("."))
    if not series or series[-1][0] != run.state.round:
        raise unknown("metric of the run", measure.metric, [*taken, *numbers_of(read_run(run.folder).rounds[-1])])
    return {"mean": _rounded(series[-1][1]), "images": None, "standard_error": None, "how": described(measure)}


def numbers_of(line: Mapping[str, Any]) -> list[str]:
    """The names of the numbers in a line of metrics.jsonl, those of tables with a dot."""
    tables = {key: value for key, value in line.items() if isinstance(value, dict)}
    inner = {f"{key}.{name}": value for key, table in tables.items() for name, value in table.items()}
    return [name for name, value in {**line, **inner}.items() if isinstance(value, int | float)]


def _distinct(run: Run, measure: RowMeasure, score: dict[str, Any]) -> dict[str, Any]:
    """Where clients share test rows an image counts once. There, and where clients have one row each, which tells
    nothing of its error, the error is at most that of all images together."""
    rows = [getattr(client, measure.part)[: measure.limit] for client in run.engine.data.clients]
    images = len({row for own in rows for row in own.tolist()})
    if images == score["images"] and any(len(own) > 1 for own in rows):
        return {}
    return {"images": images, "standard_error": _rounded(math.sqrt(score["mean"] * (1 - score["mean"]) / images))}


def _by_kind(run: Run, shares: Sequence[float | None]) -> dict[str, float]:
    """The means over the clients that train adversarially and over those that do not, where there are both."""
    clients = run.engine.data.clients
    groups = {
        kind: [s for s, c in zip(shares, clients, strict=True) if c.kind == kind and s is not None] for kind in _KINDS
    }
    return {kind: round(sum(group) / len(group), 6) for kind, group in groups.items()} if all(groups.values()) else {}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return round(value, 6) if isinstance(value, float) else value


def _run_program(table: ResultTable, job: RowJob) -> Record:
    """A row that no experiment can express: the table's module gives its figures."""
    path = table.folder / table.program
    options = table.rows[job.row].options
    mark = short_hash(path.read_text("utf-8") + json.dumps([options, job.quick], sort_keys=True))
    where = job.out / table.paper / table.name / f"{slug(job.row)}-{mark}.seed-{job.seed}.json"
    if where.exists():
        return read_record(where)
    if job.overrides:
        raise HardyError(
            f"{table.path} is measured by {table.program}, so {job.overrides[0]} has no effect. Leave it out."
        )
    found: Mapping[str, float | dict[str, Any]] = _program(path)(options, seed=job.seed, quick=job.quick)
    figures = {
        name: {"images": None, "standard_error": None}
        | (value if isinstance(value, dict) else {"mean": value})
        | {"how": {"program": table.program}}
        for name, value in found.items()
    }
    known = _record(table, job, mark)
    reasons = {"seconds": "not timed", "rounds": "not of a run", "precision": "the program's own"}
    missing = {key for figure in figures.values() for key, value in figure.items() if value is None}
    reasons |= dict.fromkeys(sorted(missing), "not of test images")
    record = {
        **known,
        "seed": job.seed,
        "device": "cpu",
        "precision": None,
        "rounds": None,
        "seconds": None,
        "costs": {},
        "curve": [],
        "figures": figures,
        "unknown": known["unknown"] | reasons,
    }
    write_record(where, record)
    return record


def _program(path: Path) -> Any:
    """measure_row of a module beside the table."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    measure = getattr(module, "measure_row", None)
    if measure is None or not {"seed", "quick"} <= inspect.signature(measure).parameters.keys():
        raise HardyError(f"{path} has no measure_row(options, seed, quick). Add it, or name an experiment instead.")
    return measure
