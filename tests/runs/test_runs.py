"""Runs in folders: figures of the round they are said to be of, Ctrl-C, one report."""

import json
import signal
import subprocess
import sys
import time

import pytest

import hardy
from conftest import everything, federation, fit, net, with_momentum
from hardy import papers
from hardy.config import CheckpointChoice, EvaluationChoice
from hardy.errors import HardyError
from hardy.report import run_page
from hardy.runs import evaluate as evaluating

GIVEN = {"method": with_momentum(papers.fedbn()), "model": net, "data": federation()}
THREATS = EvaluationChoice(threats=("fgsm@0.1", "pgd-3@0.1"))


def stored(folder):
    return json.loads((folder / "summary.json").read_text())


def prolong(folder, rounds: int) -> None:
    saved = folder / "config.toml"
    saved.write_text(saved.read_text().replace("rounds = 2\n", f"rounds = {rounds}\n"))


def test_a_run_made_longer_ends_like_a_long_one(tmp_path):
    fit(papers.fedbn(), rounds=4, evaluation=THREATS, out=tmp_path / "long")
    fit(papers.fedbn(), rounds=2, evaluation=THREATS, out=tmp_path / "short")
    hardy.evaluate(hardy.load(tmp_path / "short", **GIVEN), "fgsm@0.2", checks=False, quiet=True)
    early = stored(tmp_path / "short")
    assert {f["round"] for f in early["robust_accuracy"].values()} == {2} and len(early["robust_accuracy"]) == 3
    prolong(tmp_path / "short", 4)
    hardy.resume(tmp_path / "short", **GIVEN, quiet=True)
    long, made_longer = stored(tmp_path / "long"), stored(tmp_path / "short")
    timed = {"seconds": 0, "files_sha256": 0, "sha256": 0}
    assert {**long, **timed} == {**made_longer, **timed}
    assert long["robust_accuracy"]["pgd-3@0.1"] != early["robust_accuracy"]["pgd-3@0.1"]  # else this could not fail
    drawn = [json.loads((tmp_path / run / "projections.json").read_text()) for run in ("long", "short")]
    assert drawn[0] == drawn[1] and drawn[0]["round"] == 4
    pictures = [sorted(p.name for p in (tmp_path / run / "pictures").iterdir()) for run in ("long", "short")]
    assert pictures[0] == pictures[1]


def test_every_figure_carries_its_round_and_its_images(tmp_path):
    run = fit(papers.fedbn(), rounds=3, evaluation=EvaluationChoice(every=2, threats=("fgsm",)), out=tmp_path / "run")
    images = sum(len(client.test) for client in run.engine.data.clients)
    summary = stored(tmp_path / "run")
    for figure in (summary["standard_accuracy"], *summary["robust_accuracy"].values()):
        assert (figure["round"], figure["images"]) == (3, images)
    assert summary["best"]["standard_accuracy"]["round"] == summary["best"]["round"]
    found = hardy.evaluate(run, "fgsm", limit=2, checks=False, quiet=True)
    assert found["robust_accuracy"]["fgsm"]["images"] == 2 * len(run.engine.data.clients)


def test_a_run_in_the_middle_is_measured_but_the_old_summary_stays(tmp_path):
    fit(papers.fedbn(), rounds=2, out=tmp_path / "run", checkpoint=CheckpointChoice(every=1))
    before = stored(tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoint").glob("round-*"))[-1]
    (newest / "record.json").write_text("torn")  # as if the summary were of a round that is gone
    run = hardy.load(tmp_path / "run", **GIVEN)
    assert hardy.evaluate(run, "fgsm", checks=False, quiet=True)["robust_accuracy"]["fgsm"]["round"] == 1
    assert stored(tmp_path / "run") == before


def test_the_report_is_written_once(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(
        evaluating, "write_report", lambda folder: written.append(folder) or run_page.write_report(folder)
    )
    choice = EvaluationChoice(threats=("fgsm",), robustness=(0.0, 1.0))
    run = fit(papers.split_mix_dat(width=0.5), rounds=1, evaluation=choice, out=tmp_path / "run")
    assert len(written) == 1 and "fgsm" in (tmp_path / "run" / "report.html").read_text()
    hardy.evaluate(run, "pgd-2", checks=False, quiet=True)
    assert len(written) == 2


LONG = """
import sys, time
sys.path.insert(0, {tests!r})
from conftest import fit
from dataclasses import replace
from hardy import papers
from hardy.cli import main, run_command
from hardy.engines.sequential import Sequential
train = Sequential.train

def slowly(self, work):
    for updates in train(self, work):
        print(work.round, flush=True)
        time.sleep(0.3)
        yield updates

Sequential.train = slowly
from hardy.config import CheckpointChoice
call = lambda options: fit(papers.{method}(), rounds=4, checkpoint=CheckpointChoice(every=100), out=options.out)
run_command.COMMAND = replace(run_command.COMMAND, call=call)
sys.exit(main(["run", "demo", "--alone", "--out", {folder!r}]))
"""


def interrupt(folder, *signals: int, method: str = "fedbn") -> tuple[int, str]:
    """Starts a run of four rounds and sends signals in the middle of the second; returns its exit code and stderr."""
    tests = str(__import__("conftest").__file__).rpartition("/")[0]
    code = LONG.format(tests=tests, folder=str(folder), method=method)
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{code}"  # a shell's & ignores it
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.strip() == "1":  # the first client of the second round has trained, the others have not
                break
        for number in signals:
            process.send_signal(number)
            time.sleep(0.2)
        _, said = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_save_the_round_they_come_in(tmp_path, number, code):
    ended, said = interrupt(tmp_path / "run", number)
    assert ended == code and f"stopped after round 2. `hardy resume {tmp_path / 'run'}` goes on after round 2." in said
    assert [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()] == ["round-000002"]
    again = hardy.resume(tmp_path / "run", **GIVEN, quiet=True)
    whole = fit(papers.fedbn(), rounds=4)
    assert all(tensor.equal(everything(again)[name]) for name, tensor in everything(whole).items())


def test_a_second_ctrl_c_stops_at_once_and_keeps_the_last_whole_round(tmp_path):
    code, said = interrupt(tmp_path / "run", signal.SIGINT, signal.SIGINT, method="fedavg")
    assert code == 130 and "Ctrl-C again stops at once" in said
    assert f"stopped at once. `hardy resume {tmp_path / 'run'}` goes on after round 1." in said
    again = hardy.resume(tmp_path / "run", **{**GIVEN, "method": with_momentum(papers.fedavg())}, quiet=True)
    whole = fit(papers.fedavg(), rounds=4)
    assert all(tensor.equal(everything(again)[name]) for name, tensor in everything(whole).items())


def test_private_tensors_that_a_broken_round_overwrote_are_not_saved(tmp_path):
    code, said = interrupt(tmp_path / "run", signal.SIGINT, signal.SIGTERM)
    assert code == 130 and "goes on from the start." in said
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_a_checkpoint_of_another_method_is_refused(tmp_path):
    fit(papers.fedavg(), rounds=1, out=tmp_path / "run")
    with pytest.raises(HardyError, match="does not fit method 'scaffold'"):
        hardy.resume(tmp_path / "run", method=papers.scaffold(), model=net, data=federation(), quiet=True)
