"""An experiment's rounds: run, kept in a folder, resumed, and looked at afterwards."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hardy import config
from hardy.runs import costs, evaluate as evaluation, folder as folders
from hardy.evaluation import projections
from hardy.config import Experiment
from hardy.data.dataset import Dataset
from hardy.core.federation import Federation
from hardy.evaluation.metrics import diagnose
from hardy.engines import Flower
from hardy.errors import HardyError
from hardy.runs.prepare import Connect, prepare
from hardy.core.method import Method, BuildModel
from hardy.runs.progress import Progress
from hardy.report.run_page import write_report
from hardy.evaluation.measure import accuracies, averages
from hardy.attacks.threats import Threat
from hardy.runs.run import RunTotals, Run
from hardy.core.state import Checkpoint, disk, load_checkpoint, save_checkpoint, to, write_atomic
from hardy.core.tensors import Tensors

_HOPELESS = 10
"""rounds in a row in which every reply was refused"""


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
        return _rounds(run, quiet=quiet)
    run.folder = Path(out)
    if (run.folder / "config.toml").exists():
        raise HardyError(
            f"{run.folder} already holds a run. Go on with `hardy resume {run.folder}`, or choose another folder."
        )
    with disk(f"the run folder {run.folder}"):
        (run.folder / "pictures").mkdir(parents=True, exist_ok=True)
    with folders.locked(run.folder):
        folders.write_run_header(run)
        return _rounds(run, quiet=quiet)


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
        return _rounds(run, quiet=quiet)


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
        found, _ = load_checkpoint(run.folder)
        run.state, run.figures = to(found.server, run.engine.device), RunTotals(**found.figures)
        run.engine.store = {**run.engine.store, **run.engine.cast(found.store)}
    return run


def evaluate(
    run: Run | Path | str,
    threats: str | Sequence[str | Threat] = (),
    *,
    data_folder: Path | str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Measures a run, or the run in a folder, as `hardy.evaluation.evaluate` says."""
    run = run if isinstance(run, Run) else load(run, data_folder=data_folder)
    if not any(len(client.test) + len(client.validation) for client in run.engine.data.clients):
        raise HardyError(
            f"nobody in {run.folder or 'this run'} holds rows to measure on, here. Over a network let the nodes "
            "measure (evaluation.threats in the experiment), or pass data to hardy.load."
        )
    return evaluation.evaluate(run, threats, **options)


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
        saved = replace(saved, engine=replace(saved.engine, name="sequential"))
        if saved.network.clients is not None and data is None:
            from hardy.flower.membership import without_rows

            data = without_rows(folder)
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
    checkpoint, remarks = load_checkpoint(folder / "checkpoint")
    for line in remarks if remark else ():
        remark(line)
    run.state = to(checkpoint.server, run.engine.device)
    if not far:
        run.engine.store = run.engine.cast(checkpoint.store)
    run.figures = RunTotals(**checkpoint.figures)
    with suppress(OSError, ValueError, KeyError):
        run.robust = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["robust_accuracy"]
    return run


def _rounds(run: Run, *, quiet: bool) -> Run:
    experiment, folder, rounds = run.experiment, run.folder, run.experiment.rounds
    if folder is not None:
        folders.truncate(folder / "metrics.jsonl", run.state.round)
    progress = Progress(rounds, done=run.state.round, quiet=quiet)
    pace = folders.CheckpointSchedule(experiment.checkpoint.every)
    wasted = 0
    try:
        while run.state.round < rounds:
            began = time.perf_counter()
            rate = experiment.training.rate_at(run.state.round, rounds)
            run.state, line = run.server.round(run.state, run.engine, rate)
            line = {"round": run.state.round, "seconds": time.perf_counter() - began, **line}
            line["macs"] = sum(costs.macs_of_a_round(run, run.state.round - 1).values())
            best = _evaluate(run, line)
            line |= run.engine.account(line)
            run.figures.add(line)
            if folder is not None:
                with disk("metrics.jsonl"), (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                if best:  # to be served, not to be trained on: the networks without the objective's own tensors
                    networks = {n: t for n, t in run.engine.store.items() if n in run.engine.plan.model_names}
                    _save(run, folder / "best", networks, keep=1)
                if pace.due(run.state.round) or run.state.round == rounds:
                    with pace.timed(run.state.round):
                        _save(run, folder / "checkpoint", run.engine.store)
            progress.update(run.state.round, _note(line, run.figures))
            wasted = wasted + 1 if _all_refused(line) else 0
            if wasted == _HOPELESS:
                client, why = next(iter(line["lost"].items()))
                raise HardyError(
                    f"every reply of the last {wasted} rounds was refused (round {run.state.round}, client {client}: "
                    f"{why.removeprefix('refused: ')}). Lower training.rate ({rate:g}) or widen [admission]."
                )
    finally:  # interrupted, nothing is saved: in the middle of a round some clients have trained and some have not
        progress.close()
    if folder is not None:
        write_atomic(folder / "summary.json", json.dumps(run.summary(), indent=2).encode())
        projections.write(folder, norms=projections.norms(run))
        levels, threats = experiment.evaluation.robustness, experiment.evaluation.threats
        if (len(run.engine.plan.method.budget.widths) > 1 or levels) and not run.engine.remote:
            evaluation.settings(run, robustness=levels, threats=threats if levels else (), quiet=quiet)
        with disk("report.html"):
            write_report(folder)
    if experiment.evaluation.threats and not run.robust and isinstance(run.engine, Flower):
        _ask_robustness(run, run.engine)
    elif experiment.evaluation.threats and not run.robust:
        run.robust = evaluation.evaluate(run, experiment.evaluation.threats, quiet=quiet)["robust_accuracy"]
    return run


def _all_refused(line: dict[str, Any]) -> bool:
    reasons = line["lost"].values()
    return line["loss"] is None and bool(reasons) and all(why.startswith("refused") for why in reasons)


def _ask_robustness(run: Run, engine: Flower) -> None:
    """Accuracy under the experiment's threats, measured by the nodes on their own rows."""
    choice = run.experiment.evaluation
    found = engine.accuracies(run.state, choice.predict_branch, choice.threats)[2:]
    run.robust = {t: averages(v, engine.data.clients) for t, v in zip(choice.threats, found, strict=True)}
    if run.folder is not None:
        write_atomic(run.folder / "summary.json", json.dumps(run.summary(), indent=2).encode())
        with disk("report.html"):
            write_report(run.folder)


def _evaluate(run: Run, line: dict[str, Any]) -> bool:
    """Accuracy on the rounds that ask for it; whether this is the best so far. Selection looks at validation rows."""
    experiment, choice, done = run.experiment, run.experiment.evaluation, run.state.round
    if done % choice.every and done != experiment.rounds:
        return False
    if isinstance(run.engine, Flower):
        said = run.engine.accuracies(run.state, choice.predict_branch, choice.selecting, part="validation")
        found = [averages(values, run.engine.data.clients) for values in said]
    else:
        found = [accuracies(run.engine, run.state, part, choice.predict_branch) for part in ("validation", "test")]
        found += _under(run, choice.selecting)
    validation, test, *attacked = found
    line["validation_accuracy"], line["standard_accuracy"] = validation, test
    if attacked:
        line["selection_accuracy"] = attacked[0]
    run.figures.latest = test
    if choice.diagnose:
        line |= diagnose(run.engine, run.state, experiment.training.rate_at(done - 1, experiment.rounds))
    score, best = (attacked or [validation])[0]["mean"], run.figures.best
    if best is not None and best.get("select") != choice.select:
        best = None  # the run goes on by another measure
    if score is None or (best is not None and score <= best["validation_accuracy"]):
        return False
    figures = {"round": done, "select": choice.select, "validation_accuracy": score, "standard_accuracy": test}
    run.figures.best = figures
    return True


def _under(run: Run, threats: Sequence[str]) -> list[dict[str, Any]]:
    """Accuracy on validation rows under each threat."""
    if not threats:
        return []
    found = evaluation.evaluate(replace(run, folder=None), threats, part="validation", checks=False, quiet=True)
    return list(found["robust_accuracy"].values())


def _save(run: Run, folder: Path, store: Tensors, keep: int = 2) -> None:
    figures = {name: getattr(run.figures, name) for name in RunTotals.__dataclass_fields__}
    save_checkpoint(folder, Checkpoint(server=run.state, store=store, figures=figures), keep=keep)


def _note(line: dict[str, Any], figures: RunTotals) -> str:
    loss = f"loss {line['loss']:.3f}" if line["loss"] is not None else "no reply counted"
    if broken := line.get("broken_conditions"):
        loss += f"  {len(broken)} conditions on step sizes broken"
    return (
        f"{loss}  accuracy {figures.latest['mean']:.1%}"
        if figures.latest and figures.latest["mean"] is not None
        else loss
    )
