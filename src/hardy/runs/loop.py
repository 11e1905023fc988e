"""The rounds of a run: train, measure, write down, save; then the figures of the finished run."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from hardy.attacks.threats import parse_threat
from hardy.core.engine import Question
from hardy.core.files import disk, write_atomic
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.evaluation import projections
from hardy.evaluation.measure import figures
from hardy.evaluation.metrics import measure_metrics
from hardy.runs import costs
from hardy.runs import folder as folders
from hardy.runs.checkpoint import Checkpoint, save_checkpoint
from hardy.runs.evaluate import evaluate_run, evaluate_settings, of_round, published, write_new_report
from hardy.runs.progress import Progress
from hardy.runs.run import Run, RunTotals

_HOPELESS = 10
"""rounds in a row in which every reply was refused"""
_STOPPING = b"\nhardy: stopping after this round; Ctrl-C again stops at once.\n"


def run_rounds(run: Run, *, quiet: bool) -> Run:
    """Trains the rounds that are left, then measures what the experiment asks for."""
    experiment, folder, rounds = run.experiment, run.folder, run.experiment.rounds
    if folder is not None:
        folders.drop_stale(folder, run.state.round, rounds)
    progress = Progress(rounds, done=run.state.round, quiet=quiet)
    pace = folders.CheckpointSchedule(experiment.checkpoint.every)
    wasted = 0
    try:
        with deferred_interrupt() if folder is not None else nullcontext(lambda: False) as interrupted:
            while run.state.round < rounds:
                line = _round(run)
                stop = interrupted()
                if folder is not None and (stop or pace.due(run.state.round) or run.state.round == rounds):
                    with pace.timed():
                        _save(run, folder / "checkpoint", run.engine.store)
                progress.update(run.state.round, _note(line, run.figures))
                if stop:
                    raise KeyboardInterrupt
                wasted = wasted + 1 if _all_refused(line) else 0
                if wasted == _HOPELESS:
                    raise _hopeless(run, line, wasted)
    finally:
        progress.close()
    _measure_finished(run, quiet=quiet)
    return run


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits for the end of the round: in the middle of one some clients have trained and some have not. A second
    one stops at once. Gives a function that says whether there was one."""
    asked = False

    def note(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        os.write(2, _STOPPING)

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ours = usual and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: asked
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _round(run: Run) -> dict[str, Any]:
    """One round, its line of metrics.jsonl, and a copy of the networks if they are the best so far."""
    began, folder = time.perf_counter(), run.folder
    rate = run.experiment.training.rate_at(run.state.round, run.experiment.rounds)
    run.state, line = run.server.round(run.state, run.engine, rate)
    line = {"round": run.state.round, "seconds": time.perf_counter() - began, **line}
    line["macs"] = sum(costs.macs_of_a_round(run, run.state.round - 1).values())
    best = _evaluate(run, line)
    line |= run.engine.account(line)
    run.figures.add(line)
    run.last_line = line
    if folder is not None:
        with disk("metrics.jsonl"), (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if best:  # to be served, not to be trained on: the networks without the objective's own tensors
            networks = {n: t for n, t in run.engine.store.items() if n in run.engine.plan.model_names}
            _save(run, folder / "best", networks, keep=1)
    return line


def _all_refused(line: dict[str, Any]) -> bool:
    reasons = line["lost"].values()
    return line["loss"] is None and bool(reasons) and all(why.startswith("refused") for why in reasons)


def _hopeless(run: Run, line: dict[str, Any], wasted: int) -> HardyError:
    client, why = next(iter(line["lost"].items()))
    rate = run.experiment.training.rate_at(run.state.round - 1, run.experiment.rounds)
    return HardyError(
        f"every reply of the last {wasted} rounds was refused (round {run.state.round}, client {client}: "
        f"{why.removeprefix('refused: ')}). Lower training.rate ({rate:g}) or widen [admission]."
    )


def _evaluate(run: Run, line: dict[str, Any]) -> bool:
    """Accuracy on the rounds that ask for it; whether this is the best so far. Selection looks at validation rows."""
    experiment, choice, done = run.experiment, run.experiment.evaluation, run.state.round
    if done % choice.every and done != experiment.rounds:
        return False
    asked = [Question("validation"), Question("test"), *(Question("validation", t) for t in choice.selecting)]
    validation, test, *attacked = _measured(run, asked)
    line["validation_accuracy"], line["standard_accuracy"] = validation, test
    if attacked:
        line["selection_accuracy"] = attacked[0]
    run.figures.latest = test
    if choice.metrics:
        engine, rate = run.needs_local("evaluation.metrics"), experiment.training.rate_at(done - 1, experiment.rounds)
        line |= measure_metrics(engine, run.state, choice.metrics, rate=rate, branch=choice.predict_branch)
    score, best = (attacked or [validation])[0]["mean"], run.figures.best
    if best is not None and best.get("select") != choice.select:
        best = None  # the run goes on by another measure
    if score is None or (best is not None and score <= best["validation_accuracy"]):
        return False
    run.figures.best = {"round": done, "select": choice.select, "validation_accuracy": score, "standard_accuracy": test}
    return True


def _measured(run: Run, asked: list[Question]) -> list[dict[str, Any]]:
    """The figures that whoever measures the clients gives."""
    found = run.measures.measure(run.state, asked, run.branches)
    clients, done = run.engine.data.clients, run.state.round
    return [figures(v, clients, question.part, done) for question, v in zip(asked, found, strict=True)]


def _measure_finished(run: Run, *, quiet: bool) -> None:
    """What the experiment asks of its last round and is not known yet; the report comes last."""
    choice, folder, plan = run.experiment.evaluation, run.folder, run.engine.plan
    run.robust = of_round(run.robust, run.state.round)
    _write_summary(run)
    if folder is not None:
        projections.write_projections(folder, run.state.round, norms=projections.norms(plan, run.own))
        if run.local and (len(plan.method.budget.widths) > 1 or choice.robustness):
            threats = choice.threats if choice.robustness else ()
            evaluate_settings(run, robustness=choice.robustness, threats=threats, quiet=quiet, report=False)
    missing = [name for threat in choice.threats if (name := parse_threat(threat).name) not in run.robust]
    if missing and run.local:
        run.robust |= published(evaluate_run(run, missing, quiet=quiet, report=False))
    elif missing:
        run.robust |= dict(zip(missing, _measured(run, [Question("test", name) for name in missing]), strict=True))
    _write_summary(run)
    write_new_report(run)


def _write_summary(run: Run) -> None:
    if run.folder is not None:
        write_atomic(run.folder / "summary.json", json.dumps(run.summary(), indent=2).encode())


def _save(run: Run, folder: Path, store: Tensors, keep: int = 2) -> None:
    totals = {name: getattr(run.figures, name) for name in RunTotals.__dataclass_fields__}
    save_checkpoint(folder, Checkpoint(server=run.state, store=store, figures=totals), keep=keep)


def _note(line: dict[str, Any], figures: RunTotals) -> str:
    loss = f"loss {line['loss']:.3f}" if line["loss"] is not None else "no reply counted"
    if broken := line.get("broken_conditions"):
        loss += f"  {len(broken)} conditions on step sizes broken"
    return (
        f"{loss}  accuracy {figures.latest['mean']:.1%}"
        if figures.latest and figures.latest["mean"] is not None
        else loss
    )
