"""The commands as a user types them."""

import json
import subprocess
import sys

import pytest

from hardy import config
from hardy.cli import main

TINY = ["rounds=2", "model.width=0.25", "training.batch=100", "data.limit=60", "engine.name=sequential"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    for method in ("fedavg", "fedbn"):
        arguments = ["run", "demo", f"method={method}", "--out", str(folder / method), "--quiet", *TINY]
        assert main(arguments) == 0
    return folder


def test_a_run_folder_holds_what_the_contract_says(runs, capsys):
    names = {path.name for path in (runs / "fedbn").iterdir()}
    assert {"config.toml", "metrics.jsonl", "summary.json", "checkpoint", "report.html", "clients.json"} <= names
    summary = json.loads((runs / "fedbn" / "summary.json").read_text())
    assert {"standard_accuracy", "robust_accuracy", "rounds", "seconds", "bytes_up", "bytes_down", "macs"} <= set(
        summary
    )
    assert {"mean", "worst_client", "by_domain"} <= set(summary["standard_accuracy"])
    assert summary["rounds"] == 2 and len(summary["standard_accuracy"]["by_domain"]) == 5
    lines = [json.loads(line) for line in (runs / "fedbn" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    assert config.read(str(runs / "fedbn" / "config.toml")).rounds == 2


def test_resume_of_a_finished_run_changes_nothing(runs, capsys):
    before = (runs / "fedbn" / "summary.json").read_text()
    assert main(["resume", str(runs / "fedbn")]) == 0
    assert (runs / "fedbn" / "summary.json").read_text() == before
    assert "mean of clients" in capsys.readouterr().out


def test_a_run_is_not_overwritten(runs, capsys):
    assert main(["run", "demo", "--out", str(runs / "fedbn")]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_evaluate_and_compare(runs, capsys):
    assert main(["evaluate", str(runs / "fedbn"), "--threats", "pgd-2,fgsm@16/255", "--no-checks"]) == 0
    assert "pgd-2" in capsys.readouterr().out
    before = (runs / "fedbn" / "evaluation.json").read_text()
    assert main(["evaluate", str(runs / "fedbn"), "--threats", "fgsm", "--best", "--settings", "--no-checks"]) == 0
    assert "best/evaluation.json" in capsys.readouterr().out
    assert (runs / "fedbn" / "evaluation.json").read_text() == before
    measured = json.loads((runs / "fedbn" / "best" / "evaluation.json").read_text())["provenance"]["round"]
    assert measured == json.loads((runs / "fedbn" / "summary.json").read_text())["best"]["round"]
    assert main(["compare", str(runs / "fedavg"), str(runs / "fedbn"), "--out", str(runs / "c.html")]) == 0
    shown = capsys.readouterr().out
    assert "fedavg" in shown and "pgd-2" in shown and (runs / "c.html").stat().st_size > 1000
    assert main(["compare", str(runs / "fedavg"), "--out", str(runs / "no" / "c.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(("chosen", "images"), [(["--limit", "3"], {3}), (["--part", "train"], {27})])
def test_figures_of_other_rows_stay_out_of_the_summary(runs, chosen, images):
    folder = runs / "fedavg"
    before = (folder / "summary.json").read_text()
    assert main(["evaluate", str(folder), "--threats", "fgsm", *chosen, "--no-checks"]) == 0
    assert set(json.loads((folder / "evaluation.json").read_text())["provenance"]["images"]) == images
    assert (folder / "summary.json").read_text() == before


def test_seeds_give_mean_and_deviation(tmp_path, capsys):
    assert main(["run", "demo", *TINY, "--seeds", "2", "--out", str(tmp_path / "many"), "--quiet"]) == 0
    summary = json.loads((tmp_path / "many" / "summary.json").read_text())
    assert summary["runs"] == 2 and summary["standard_accuracy"]["mean_std"] >= 0
    assert "±" in capsys.readouterr().out


def test_lists(capsys):
    assert main(["parts"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("fedbn", "dirichlet", "trades", "digits_cnn", "autoattack"))
    assert main(["parts", "trimmed_mean"]) == 0
    shown = capsys.readouterr().out
    assert "aggregator trimmed_mean" in shown and "Yin et al." in shown and "\n  f" in shown
    assert main(["parts", "batch"]) == 0
    assert "momentum = 0.1 " in (shown := capsys.readouterr().out) and "share of the new batch" in shown
    assert main(["parts", "trimmed_men"]) == 2
    assert "Did you mean 'trimmed_mean'?" in capsys.readouterr().err
    assert main(["data"]) == 0
    assert "mini_digits" in capsys.readouterr().out
    assert main(["bench", "demo", "model.width=0.25"]) == 0
    assert "vectorised" in capsys.readouterr().out


def test_usage_mistakes(capsys):
    for arguments in (["run"], ["run", "demo", "--oot", "x"], ["fly"], ["run", "demo", "--seeds", "x"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
    assert main(["run", "demo", "--seeds", "0"]) == 2


def test_a_killed_reader_and_a_module_call():
    command = f"{sys.executable} -m hardy.cli parts | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.strip() and "Traceback" not in done.stderr
