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
    assert {**long, "seconds": 0} == {**made_longer, "seconds": 0}
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
from hardy import cli, papers
from hardy.engines.sequential import Sequential
train = Sequential.train

def slowly(self, work):
    for updates in train(self, work):
        print(work.round, flush=True)
        time.sleep(0.3)
        yield updates

Sequential.train = slowly
cli._run = lambda options: fit(papers.fedbn(), rounds=4, checkpoint=CheckpointChoice(every=100), out=options.out)
from hardy.config import CheckpointChoice
sys.exit(cli.main(["run", "demo", "--out", {folder!r}]))
"""


def interrupt(folder, times: int) -> tuple[int, str]:
    """Starts a run of four rounds and sends Ctrl-C in the middle of the second; returns its exit code and stderr."""
    code = LONG.format(tests=str(__import__("conftest").__file__).rpartition("/")[0], folder=str(folder))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.strip() == "1":  # the first client of the second round has trained, the others have not
                break
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        _, said = process.communicate(timeout=60)
    return process.returncode, said


def test_ctrl_c_saves_the_round_it_comes_in(tmp_path):
    assert interrupt(tmp_path / "run", 1)[0] == 130
    assert [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()] == ["round-000002"]
    again = hardy.resume(tmp_path / "run", **GIVEN, quiet=True)
    whole = fit(papers.fedbn(), rounds=4)
    assert all(tensor.equal(everything(again)[name]) for name, tensor in everything(whole).items())


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    code, said = interrupt(tmp_path / "run", 2)
    assert code == 130 and "Ctrl-C again stops at once" in said and "hardy resume" in said
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_a_checkpoint_of_another_method_is_refused(tmp_path):
    fit(papers.fedavg(), rounds=1, out=tmp_path / "run")
    with pytest.raises(HardyError, match="does not fit method 'scaffold'"):
        hardy.resume(tmp_path / "run", method=papers.scaffold(), model=net, data=federation(), quiet=True)
