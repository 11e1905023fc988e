"""The rounds of a run: train, measure, write down, save; then the figures of the finished run."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch

from hardy.attacks.threats import parse_threat
from hardy.callbacks.base import Notify, attached
from hardy.core import tensors
from hardy.core.engine import Question
from hardy.core.files import disk, file_lock
from hardy.core.flatten import flat_row
from hardy.core.json_files import write_sealed
from hardy.core.ranks import ALONE, Ranks
from hardy.core.spending import privacy_spent
from hardy.core.store import ClientStore
from hardy.core.tensors import Tensors
from hardy.engines.process_group import RankLost
from hardy.errors import AllRefused, HardyError
from hardy.evaluation import projections
from hardy.evaluation.diagnoses import diagnose_training
from hardy.evaluation.measure import client_tensors, figures, success_figures
from hardy.evaluation.record import EVALUATION_LOCK
from hardy.report.run_page import write_report
from hardy.runs import costs
from hardy.runs import folder as folders
from hardy.runs.checkpoint import CLIENT_ROWS, Checkpoint, save_checkpoint
from hardy.runs.evaluate import (
    evaluate_run,
    evaluate_settings,
    metrics_of_round,
    of_round,
    published,
    published_metrics,
    write_new_report,
)
from hardy.runs.interrupts import Stopped, StopRequest, deferred_interrupt
from hardy.runs.progress import Progress
from hardy.runs.run import Run, RunTotals
from hardy.runs.unseen import held_out_accuracy
from hardy.runs.workers import collect, hand_out, of_all_clients, release

_HOPELESS = 10
"""rounds in a row in which every reply was refused"""


def run_rounds(run: Run, *, quiet: bool, callbacks: Sequence[Any] = (), ranks: Ranks = ALONE) -> Run:
    """Trains the rounds that are left, then measures what the experiment asks for."""
    given = [callback for callback in callbacks if callback not in run.experiment.callbacks]
    hand_out(run, ranks)
    saving = _Saving(run) if run.folder is not None else None
    try:
        with attached(run, [*run.experiment.callbacks, *given]) as notify:
            _train(run, saving, notify, quiet=quiet)
            collect(run)
            _measure_finished(run, saving, quiet=quiet)
        release(run)
    except RankLost as lost:
        raise _without_rank(run, saving, lost) from lost
    return run


def _without_rank(run: Run, saving: "_Saving | None", lost: RankLost) -> HardyError:
    again = f"`hardy resume {saving.folder}` goes on after round {saving.saved}" if saving else "start again"
    return HardyError(f"{lost}. The run stopped after {run.state.round} of {run.experiment.rounds} rounds; {again}.")


def _train(run: Run, saving: "_Saving | None", notify: Notify, *, quiet: bool) -> None:
    rounds = run.experiment.rounds
    progress = Progress(rounds, done=run.state.round, quiet=quiet)
    wasted = 0
    try:
        with deferred_interrupt() if saving else nullcontext(StopRequest()) as stop:
            if saving and run.experiment.init and not run.state.round:
                saving.save(stop, last=True)  # what it was started from may be gone when it is resumed
            while run.state.round < rounds and not run.figures.stopped:
                try:
                    line = _round(run, saving)
                    failed = notify(line)
                    if saving:
                        ends = failed or run.figures.stopped or run.state.round == rounds
                        saving.save(stop, last=bool(ends))
                        if not ends:
                            with stop.unbroken():
                                saving.renew_report()
                    if failed:
                        raise failed
                    progress.update(run.state.round, _note(line, run.figures))
                except Stopped as asked:
                    raise _stopped(saving, stop, asked.signal, "at once") from None
                if stop.signal is not None:
                    raise _stopped(saving, stop, stop.signal, f"after round {run.state.round}")
                wasted = wasted + 1 if _all_refused(line) else 0
                if wasted == _HOPELESS:
                    raise _hopeless(run, line, wasted)
    finally:
        progress.close()


class _Saving:
    """What is kept of a run in its folder: a line a round, and checkpoints of whole rounds."""

    def __init__(self, run: Run) -> None:
        assert run.folder is not None
        self.run, self.folder, self.log = run, run.folder, folders.MetricsLog(run.folder)
        self.pace = folders.CheckpointSchedule(run.experiment.checkpoint.every)
        self.experiment = folders.resolved(run.experiment, (run.folder / "config.toml").read_text("utf-8"))
        self.saved = run.state.round
        run.engine.store.place(run.folder / CLIENT_ROWS / "private")
        run.state.reported.place(run.folder / CLIENT_ROWS / "reported")
        self.reports, self.reported = folders.CheckpointSchedule(None), False
        self.note_whole()

    def note_whole(self) -> None:
        """The last whole round: what is saved if the next one is broken off. Nothing is copied."""
        self.before = self.run.engine.store.snapshot()
        self.whole = self._checkpoint(self.before.store)

    def save(self, stop: StopRequest, *, last: bool) -> None:
        self.note_whole()
        if last or stop.signal is not None or self.pace.due(self.run.state.round):
            with self.pace.timed(), stop.unbroken():
                self._write("checkpoint", self.whole)
                self.saved = self.whole.server.round

    def save_broken_off(self) -> None:
        """The last whole round in the middle of the next, unless clients have overwritten their private tensors."""
        if self.whole.server.round > self.saved and self.before.intact:
            self._write("checkpoint", self.whole)
            self.saved = self.whole.server.round

    def renew_report(self) -> None:
        """report.html after the first round, and from then on so seldom that it costs little."""
        if self.reported and not self.reports.due(self.run.state.round):
            return
        with self.reports.timed(), disk("report.html"):
            write_report(self.folder, self.run.summary())
        self.reported = True

    def save_best(self) -> None:
        """To be served, not to be trained on: the networks without the objective's own tensors."""
        engine = self.run.engine
        self._write("best", self._checkpoint(engine.store.only(engine.plan.model_names)), keep=1)

    def _checkpoint(self, store: ClientStore) -> Checkpoint:
        figures = self.run.figures
        totals = {name: getattr(figures, name) for name in RunTotals.__dataclass_fields__}
        return Checkpoint(
            server=self.run.state,
            store=store,
            figures={**totals, "lost": dict(figures.lost)},
            experiment=self.experiment,
            digests=self.log.digests,
        )

    def _write(self, name: str, checkpoint: Checkpoint, keep: int = 2) -> None:
        self.log.sync()  # first: no checkpoint outlives the lines of its rounds
        save_checkpoint(self.folder / name, checkpoint, keep=keep)


def _stopped(saving: _Saving | None, stop: StopRequest, number: int, when: str) -> Stopped:
    assert saving is not None  # without a folder nobody waits for the end of a round
    with stop.unbroken():
        saving.save_broken_off()
    start = f"after round {saving.saved}" if saving.saved else "from the start"
    return Stopped(f"stopped {when}. `hardy resume {saving.folder}` goes on {start}.", number)


def _round(run: Run, saving: _Saving | None) -> dict[str, Any]:
    """One round, its line of metrics.jsonl, and a copy of the networks if they are the best so far."""
    began = time.perf_counter()
    rate = run.experiment.training.rate_at(run.state.round, run.experiment.rounds)
    run.state, line = run.server.round(run.state, run.engine, rate)
    line = {"round": run.state.round, "seconds": time.perf_counter() - began, **line}
    line["macs"] = sum(costs.macs_of_a_round(run, run.state.round - 1).values())
    line |= {f"{spent['unit']}_epsilon": spent["epsilon"] for spent in privacy_spent(run.server, run.state.round)}
    best = _evaluate(run, line)
    line |= run.engine.account(line)
    run.figures.add(line)
    _note_target(run)
    run.last_line = line
    if run.rows is not None:
        run.rows.append(flat_row(line))
    if saving:
        saving.log.append(line)
        if best:
            saving.save_best()
    return line


def _all_refused(line: dict[str, Any]) -> bool:
    reasons = line["lost"].values()
    return line["loss"] is None and bool(reasons) and all(why.startswith("refused") for why in reasons)


def _hopeless(run: Run, line: dict[str, Any], wasted: int) -> AllRefused:
    client, why = next(iter(line["lost"].items()))
    rate = run.experiment.training.rate_at(run.state.round - 1, run.experiment.rounds)
    return AllRefused(
        f"every reply of the last {wasted} rounds was refused (round {run.state.round}, client {client}: "
        f"{why.removeprefix('refused: ')}). Lower training.rate ({rate:g}) or widen [admission]."
    )


def _evaluate(run: Run, line: dict[str, Any]) -> bool:
    """Accuracy on the rounds that ask for it; whether this is the best so far. Selection looks at validation rows."""
    experiment, choice, done = run.experiment, run.experiment.evaluation, run.state.round
    if done % choice.every and done != experiment.rounds:
        return False
    places = {"validation": Question("validation"), "standard": Question("test")}
    if choice.select:
        places["selection"] = Question("validation", choice.select)
    backdoor = _backdoor_questions(run)
    found = _measured(run, [q._replace(metric=m) for q in places.values() for m in (None, *choice.metrics)] + backdoor)
    if run.engine.name == "flower":
        for known in (value for question, value in found.items() if question.part == "validation"):
            known["median"] = _median(known)
    if run.engine.data.held_out:
        with of_all_clients(run) as engine:
            statistics = experiment.data.held_out_statistics
            found[places["standard"]] |= held_out_accuracy(engine, run.state, run.branches, statistics)
    for place, question in places.items():
        line[f"{place}_accuracy"] = found[question]
        if choice.metrics:
            others = {m.name: found[question._replace(metric=m)] for m in choice.metrics}
            line["metrics" if place == "standard" else f"{place}_metrics"] = others
    for question in backdoor:
        line.setdefault("metrics", {})["backdoor_success"] = success_figures(found[question])
    run.figures.latest, run.figures.metrics = line["standard_accuracy"], line.get("metrics", {})
    if choice.diagnosis:
        rate = experiment.training.rate_at(done - 1, experiment.rounds)
        with of_all_clients(run) as engine:
            line |= diagnose_training(engine, run.state, choice.diagnosis, rate=rate, branch=choice.predict_branch)
    return _note_best(run, line)


def _note_target(run: Run) -> None:
    """When the clock's target was reached."""
    clock, figures = run.server.clock, run.figures
    if clock is None or clock.choice.target is None or figures.reached or figures.latest is None:
        return
    if figures.latest["round"] == run.state.round and (figures.latest["mean"] or 0.0) >= clock.choice.target:
        figures.reached = {"round": run.state.round, "seconds": figures.clock_seconds}


def _backdoor_questions(run: Run) -> list[Question]:
    """What is asked where hostile clients plant a backdoor."""
    attack = run.experiment.faults.byzantine
    return [Question("triggered")] if attack is not None and attack.plants_backdoor else []


def _median(found: dict[str, Any]) -> float | None:
    """Over clients. Over a network each figure is a client's own word: the median chooses the best round and ends a run
    early, so that no client can do that alone."""
    known = [value for value in found["by_client"] if value is not None]
    return median(known) if known else None


def _typical(found: dict[str, Any]) -> float | None:
    """What is compared over rounds: the mean over clients, over a network the median."""
    chosen: float | None = found.get("median", found["mean"])
    return chosen


def _note_best(run: Run, line: dict[str, Any]) -> bool:
    """Whether the round is the best so far by what the experiment selects on."""
    choice, best = run.experiment.evaluation, run.figures.best
    place = "selection" if choice.select else "validation"
    accuracy, metric = _typical(line[f"{place}_accuracy"]), choice.selecting_metric
    score = _typical(line[f"{place}_metrics"][metric.name]) if metric else accuracy
    if best is not None and (best.get("select"), best.get("metric")) != (choice.select, choice.select_metric):
        best = None  # the run goes on by another measure
    sign = 1 if metric is None or metric.higher_is_better else -1
    if score is None or (best is not None and sign * score <= sign * best.get("score", best["validation_accuracy"])):
        return False
    run.figures.best = {
        "round": run.state.round,
        "select": choice.select,
        "metric": choice.select_metric,
        "score": score,
        "validation_accuracy": accuracy,
        "standard_accuracy": line["standard_accuracy"],
    }
    return True


def _measured(run: Run, asked: Sequence[Question]) -> dict[Question, dict[str, Any]]:
    """The figures that whoever measures the clients gives."""
    found = run.measures.measure(run.state, asked, run.branches)
    data, done = run.engine.data, run.state.round
    if run.folder is not None:
        folders.write_tables(run.folder, data, done, {str(q): v for q, v in zip(asked, found, strict=True)})

    def images(question: Question) -> list[int]:
        return [len(getattr(client, question.part)) for client in data.profiles]

    return {
        question: figures(values, data.profiles, images(question), done, question.metric, data=data)
        for question, values in zip(asked, found, strict=True)
    }


def _measure_finished(run: Run, saving: _Saving | None, *, quiet: bool) -> None:
    """What the experiment asks of its last round and is not known yet; the report comes last."""
    choice, folder, plan = run.experiment.evaluation, run.folder, run.engine.plan
    run.robust = of_round(run.robust, run.state.round)
    run.robust_metrics = metrics_of_round(run.robust_metrics, run.state.round)
    if run.figures.stopped and (run.figures.latest or {}).get("round") != run.state.round:
        backdoor = _backdoor_questions(run)
        found = _measured(run, [Question("test", "", m) for m in (None, *choice.metrics)] + backdoor)
        run.figures.latest = found[Question("test")]
        if run.local is not None:
            statistics = run.experiment.data.held_out_statistics
            run.figures.latest |= held_out_accuracy(run.local, run.state, run.branches, statistics)
        run.figures.metrics = {m.name: found[Question("test", "", m)] for m in choice.metrics}
        for question in backdoor:
            run.figures.metrics["backdoor_success"] = success_figures(found[question])
    _write_summary(run, saving)
    if folder is not None:
        with file_lock(folder / EVALUATION_LOCK, wait=True):
            projections.write_projections(folder, run.state.round, norms=projections.norms(plan, *_listed_tensors(run)))
        if run.local and (len(plan.method.budget.widths) > 1 or choice.robustness):
            threats = choice.threats if choice.robustness else ()
            evaluate_settings(run, robustness=choice.robustness, threats=threats, quiet=quiet, report=False)
    missing = [name for threat in choice.threats if not _known(run, name := parse_threat(threat).name)]
    if missing and run.local:
        result = evaluate_run(run, missing, checks=choice.checks, quiet=quiet, report=False)
        run.robust |= published(result)
        run.robust_metrics |= published_metrics(result)
    elif missing:
        found = _measured(run, [Question("test", name, m) for name in missing for m in (None, *choice.metrics)])
        run.robust |= {name: found[Question("test", name)] for name in missing}
        run.robust_metrics |= {
            name: {m.name: found[Question("test", name, m)] for m in choice.metrics}
            for name in missing
            if choice.metrics
        }
    _write_summary(run, saving)
    write_new_report(run)


def _listed_tensors(run: Run) -> tuple[Tensors, list[int]]:
    """The own tensors of the clients that are listed, and their numbers."""
    data = run.engine.data
    if data.sample is None or run.local is None:
        return run.own, list(data.measured)
    held = client_tensors(run.local, run.state)
    return tensors.gather(held, torch.tensor(data.listed)), [data.measured[at] for at in data.listed]


def _known(run: Run, threat: str) -> bool:
    """Whether all that the experiment asks for under a threat is measured."""
    wanted = {metric.name for metric in run.experiment.evaluation.metrics}
    return threat in run.robust and wanted <= run.robust_metrics.get(threat, {}).keys()


def _write_summary(run: Run, saving: _Saving | None) -> None:
    if saving:
        with file_lock(saving.folder / EVALUATION_LOCK, wait=True):
            write_sealed(
                saving.folder / "summary.json", {**run.summary(), "files_sha256": saving.log.digests}, indent=2
            )


def _note(line: dict[str, Any], figures: RunTotals) -> str:
    loss = f"loss {line['loss']:.3f}" if line["loss"] is not None else "no reply counted"
    if broken := line.get("broken_conditions"):
        loss += f"  {len(broken)} conditions on step sizes broken"
    for unit in ("client", "example"):
        if line.get(f"{unit}_epsilon") is not None:
            loss += f"  ε {line[f'{unit}_epsilon']:.2f} ({unit})"
    return (
        f"{loss}  accuracy {figures.latest['mean']:.1%}"
        if figures.latest and figures.latest["mean"] is not None
        else loss
    )
