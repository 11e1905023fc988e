"""Callbacks: called around rounds, stop a run, fail without harm; trackers are told every round once."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import hardy
from conftest import assert_close, everything, experiment, federation, net
from hardy import HardyError, papers
from hardy.callbacks import Callback, Stop, early_stopping, mlflow, tensorboard, wandb
from hardy.config import CheckpointChoice, EvaluationChoice


def fit(callbacks=(), out=None, **changes):
    chosen = experiment(**changes)
    return hardy.fit(
        chosen, method=papers.fedavg(), model=net, data=federation(), out=out, quiet=True, callbacks=callbacks
    )


def resume(folder, **more):
    return hardy.resume(folder, method=papers.fedavg(), model=net, data=federation(), quiet=True, **more)


class Recorder(Callback):
    def __init__(self):
        self.calls = []

    def on_start(self, run):
        self.calls.append(("start", run.state.round))

    def on_round(self, run, line):
        self.calls.append(("round", line["round"], len(run.history)))

    def on_end(self, run):
        self.calls.append(("end", run.state.round, run.summary()["standard_accuracy"]["round"]))


def test_callbacks_are_called_in_order():
    recorder, seen = Recorder(), []
    run = fit([recorder, lambda run, line: seen.append(line)], rounds=2)
    assert recorder.calls == [("start", 0), ("round", 1, 1), ("round", 2, 2), ("end", 2, 2)]
    assert [line["round"] for line in seen] == [1, 2] and seen[-1] == run.last_line


def test_a_run_stops_when_it_is_told_to(tmp_path):
    """By True or by Stop, after the round; the summary says why, and a resume trains no further."""

    def enough(run, line):
        if line["round"] == 2:
            raise Stop("enough is known")

    run = fit([enough], out=tmp_path / "run", evaluation=EvaluationChoice(every=3))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["rounds"], summary["stopped"]) == (2, "enough is known")
    assert summary["standard_accuracy"]["round"] == 2, "the last round is measured, though every is 3"
    again = resume(tmp_path / "run")
    assert again.state.round == 2
    assert_close(everything(run), everything(again), 0)
    other = fit([lambda run, line: line["round"] == 1])
    assert other.state.round == 1 and "'<lambda>' asked for it" in other.summary()["stopped"]


def test_a_callback_that_fails_costs_no_round(tmp_path):
    """The round is saved, later callbacks are closed, and the run goes on from there to the same end."""

    def broken(run, line):
        if line["round"] == 3:
            raise ZeroDivisionError("by zero")

    recorder = Recorder()
    with pytest.raises(HardyError, match=r"callback 'broken' failed in on_round, round 3: ZeroDivisionError.*resume"):
        fit([recorder, broken], out=tmp_path / "run", checkpoint=CheckpointChoice(every=100))
    assert recorder.calls[-1][:2] == ("end", 3)
    seen = []
    again = resume(tmp_path / "run", callbacks=[lambda run, line: seen.append(line["round"])])
    assert seen == [4]
    assert_close(everything(again), everything(fit()), 0)


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (Recorder, "is no callback; give a function"),
        (3, "3 is no callback"),
        (lambda run, line: "yes", "returned 'yes' in round 1; return True to end the run"),
        (tensorboard(), "tensorboard writes into the run folder, and this run has none"),
        (early_stopping(metric="auroc"), "early_stopping looks at 'auroc', but evaluation.metrics names none"),
    ],
)
def test_what_is_no_callback_is_refused(callback, message):
    with pytest.raises(HardyError, match=message):
        fit([callback], rounds=1)


def test_early_stopping_refuses_what_would_have_no_effect():
    for wrong in ({"patience": 0}, {"min_delta": -1.0}):
        with pytest.raises(HardyError, match="patience of 1 round or more and a min_delta of 0"):
            early_stopping(**wrong)
    data = federation()
    clients = tuple(hardy.runs.run.replace(c, validation=c.validation[:0]) for c in data.clients)
    with pytest.raises(HardyError, match=r"no client has any. Set data.validation"):
        hardy.fit(
            experiment(),
            method=papers.fedavg(),
            model=net,
            data=hardy.runs.run.replace(data, clients=clients),
            callbacks=[early_stopping()],
            quiet=True,
        )


def decide(values, every=1, higher=True, **options):
    """The round in which early stopping would end a run with these validation figures."""
    metric = SimpleNamespace(name="m", higher_is_better=higher)
    choice = SimpleNamespace(metrics=[metric], select=None, select_metric="m")
    run = SimpleNamespace(experiment=SimpleNamespace(evaluation=choice), history=[])
    for at, value in enumerate(values, 1):
        row = {"round": at} | ({} if at % every else {"validation_metrics/m/mean": value})
        run.history.append(row)
        try:
            early_stopping(**options).on_round(run, {"round": at})
        except Stop:
            return at
    return None


def test_early_stopping_looks_at_robust_accuracy_where_it_chooses_the_best_round():
    choice = SimpleNamespace(metrics=[], select="pgd-2", select_metric=None)
    run = SimpleNamespace(experiment=SimpleNamespace(evaluation=choice), history=[])
    with pytest.raises(Stop, match=r"validation accuracy under pgd-2 has not been better than 0\.5, of round 1"):
        for at in range(1, 9):  # the clean accuracy rises all the time
            run.history.append({"round": at, "validation_accuracy/mean": at / 10, "selection_accuracy/mean": 0.5})
            early_stopping(patience=3).on_round(run, {"round": at})
    assert len(run.history) == 4


def test_when_early_stopping_stops():
    assert decide([1, 2, 3, 3, 3, 3], patience=2) == 5
    assert decide([3, 2, 1, 1, 1], patience=2, higher=False) == 5
    assert decide([1, 2, 1, 3, 1, 1], patience=2) == 6
    assert decide([1.0, 1.05, 1.09, 1.1], patience=2, min_delta=0.1) == 3
    assert decide([1, 2, 3, 4], patience=1) is None
    assert decide([9, 5, 9, 5, 9, 4, 9, 4], patience=2, every=2) == 4, "only rounds that were measured count"


def test_early_stopping_from_toml_is_exact_after_a_resume(tmp_path):
    """Stopped, killed and resumed, it ends in the same round with the same tensors."""
    text = 'callbacks = [{ name = "early_stopping", patience = 2 }]\n'
    chosen = hardy.config.parse(text)
    assert chosen.callbacks == (early_stopping(patience=2),)
    assert hardy.config.parse(chosen.to_toml()).callbacks == chosen.callbacks
    whole = fit(rounds=12, callbacks=[early_stopping(patience=2)])
    ended = whole.state.round
    assert 3 <= ended < 12 and "validation accuracy has not been better" in whole.summary()["stopped"]

    def kill(run, line):
        if line["round"] == ended - 1:
            raise RuntimeError("killed")

    with pytest.raises(HardyError, match="killed"):
        fit([early_stopping(patience=2), kill], out=tmp_path / "run", rounds=12)
    assert "early_stopping" in (tmp_path / "run" / "config.toml").read_text(), "built-in ones are written down"
    again = resume(tmp_path / "run")
    assert again.state.round == ended
    assert_close(everything(whole), everything(again), 0)


def test_history_is_flat_and_the_same_after_loading(tmp_path):
    run = fit(out=tmp_path / "run", rounds=2, evaluation=EvaluationChoice(metrics=("auroc",)))
    assert [row["round"] for row in run.history] == [1, 2]
    row = run.history[-1]
    assert row["metrics/auroc/mean"] == run.last_line["metrics"]["auroc"]["mean"]
    assert row["standard_accuracy/by_domain/odd"] == run.last_line["standard_accuracy"]["by_domain"]["odd"]
    assert all(isinstance(value, int | float) for value in row.values()) and row["lost"] == 0
    loaded = hardy.load(tmp_path / "run", method=papers.fedavg(), model=net, data=federation())
    assert loaded.history == run.history


class FakeWandb:
    def __init__(self):
        self.logged, self.options, self.summary, self.finished = {}, None, {}, False

    def init(self, **options):
        self.options = options
        return self

    def log(self, row, step):
        assert step not in self.logged
        self.logged[step] = row

    def finish(self):
        self.finished = True


class FakeMLflow:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *words, **options: self.calls.append((name, words, options))


def test_weights_and_biases_stay_offline(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = fit([wandb(project="trial")], rounds=2, out=tmp_path / "run")
    assert fake.options["mode"] == "offline" and fake.options["dir"] == str(tmp_path / "run")
    assert fake.options["project"] == "trial" and fake.options["config"]["method"] == "fedavg"
    assert [fake.logged[at] for at in (1, 2)] == run.history and fake.finished
    assert fake.summary["standard_accuracy/mean"] == run.summary()["standard_accuracy"]["mean"]
    again = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", again)
    resume(tmp_path / "run")
    assert again.logged == fake.logged, "a resumed run is told whole"


def test_mlflow_stays_in_the_run_folder(tmp_path, monkeypatch):
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    run = fit([mlflow()], rounds=2, out=tmp_path / "run")
    names = [name for name, *_ in fake.calls]
    assert names == [
        *("set_tracking_uri", "set_experiment", "start_run", "log_params", "log_metrics", "log_metrics", "end_run")
    ]
    assert fake.calls[0][1] == (f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}",)
    assert fake.calls[5][1:] == ((run.history[-1],), {"step": 2})


@pytest.mark.parametrize(("made", "module"), [(mlflow, "mlflow"), (wandb, "wandb")])
def test_an_absent_tracker_is_one_line(made, module, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(HardyError, match=rf"{module} is not installed. Remedy: pip install 'hardy-fl\[{module}\]'"):
        fit([made()], out=tmp_path / "run")
    assert not (tmp_path / "run").exists(), "refused before anything is written"


class FakeWriter:
    def __init__(self, folder):
        self.points, self.closed = [], False
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "events.out.tfevents.1").touch(exist_ok=False)  # of an earlier writer nothing may be left
        FakeWriter.last = self

    def add_scalar(self, name, value, step):
        self.points.append((name, step, value))

    def flush(self):
        pass

    def close(self):
        self.closed = True


def test_tensorboard_has_every_round_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=FakeWriter))
    fit([tensorboard(), lambda run, line: line["round"] == 2], out=tmp_path / "run")
    first = FakeWriter.last
    run = resume(tmp_path / "run")
    losses = [(step, value) for name, step, value in FakeWriter.last.points if name == "loss"]
    assert losses == [(row["round"], row["loss"]) for row in run.history] and len(losses) == 2
    assert first.closed and FakeWriter.last.closed and first.points == FakeWriter.last.points


def test_event_files_that_tensorboard_reads(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = fit([tensorboard()], out=tmp_path / "run", rounds=2)
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    points = [(event.step, event.value) for event in found.Scalars("loss")]
    assert points == [(row["round"], pytest.approx(row["loss"])) for row in run.history]
