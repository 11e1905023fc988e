"""The commands as a user types them."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

import hardy
from hardy import config
from hardy.cli import main, run_command
from hardy.cli.evaluate_command import DATA_PARTS
from hardy.cli.run_command import ENGINE_NAMES
from hardy.core.engine import DataPart
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.runs import loop

TINY = ["rounds=2", "model.width=0.25", "training.batch=100", "data.limit=60", "engine.name=sequential"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    for method in ("fedavg", "fedbn"):
        arguments = ["run", "demo", "--alone", f"method={method}", "--out", str(folder / method), "--quiet", *TINY]
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
    assert main(["run", "demo", "--alone", "--out", str(runs / "fedbn")]) == 2
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


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """A folder of three seeds."""
    folder = tmp_path_factory.mktemp("seeds") / "many"
    assert main(["run", "demo", "--alone", *TINY, "--seeds", "3", "--out", str(folder), "--quiet"]) == 0
    return folder


def test_seeds_give_mean_and_deviation(seeds, capsys):
    summary = json.loads((seeds / "summary.json").read_text())
    alone = [json.loads((seeds / f"seed-{seed}" / "summary.json").read_text()) for seed in range(3)]
    means = [one["standard_accuracy"]["mean"] for one in alone]
    assert summary["runs"] == 3 and summary["standard_accuracy"]["mean"] == pytest.approx(np.mean(means))
    assert summary["standard_accuracy"]["mean_std"] == pytest.approx(np.std(means, ddof=1))
    assert main(["run", "demo", "--alone", *TINY, "--seeds", "3", "--out", str(seeds)]) == 2
    assert f"Go on with `hardy resume {seeds}`" in capsys.readouterr().err


def test_seeds_stopped_between_and_within_go_on(seeds, tmp_path, monkeypatch, capsys):
    """The second seed stops after its first round, the third is not begun; resumed, all are as if nothing was."""
    folder, rounds, stops = tmp_path / "many", [], [(1, 1)]

    def stopping(run, saving):
        if (now := (run.experiment.seed, run.state.round)) in stops:
            raise KeyboardInterrupt
        rounds.append(now)
        return one_round(run, saving)

    one_round = loop._round
    monkeypatch.setattr(loop, "_round", stopping)
    again = ["run", "demo", "--alone", *TINY, "checkpoint.every=1", "--seeds", "3", "--out", str(folder), "--quiet"]
    assert main(again) == 130
    assert "seed 0: accuracy " in capsys.readouterr().out and not (folder / "seed-2").exists()
    assert main(["evaluate", str(folder)]) == 2
    assert "not finished: seed 1, 2 of 3 has no summary. Go on with `hardy resume" in capsys.readouterr().err
    stops.clear()
    assert main(["resume", str(folder), "--quiet"]) == 0
    assert rounds == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)] and "many (3 seeds)" in capsys.readouterr().out
    first, again = (json.loads((where / "summary.json").read_text()) for where in (seeds, folder))
    assert again["standard_accuracy"] == first["standard_accuracy"]


def test_seeds_are_evaluated_and_exported_as_one_thing(seeds, tmp_path, capsys):
    assert main(["evaluate", str(seeds), "--threats", "fgsm", "--no-checks", "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("seed ") == 3 and "mean ± deviation over 3 seeds" in shown
    found = json.loads((seeds / "evaluation.json").read_text())
    alone = [json.loads((seeds / f"seed-{seed}" / "evaluation.json").read_text()) for seed in range(3)]
    means = [one["robust_accuracy"]["fgsm"]["mean"] for one in alone]
    assert found["robust_accuracy"]["fgsm"]["mean"] == pytest.approx(np.mean(means))
    assert found["robust_accuracy"]["fgsm"]["mean_std"] == pytest.approx(np.std(means, ddof=1))
    assert found["provenance"]["seeds"] == [0, 1, 2]
    assert json.loads((seeds / "summary.json").read_text())["robust_accuracy"].keys() == {"fgsm"}
    assert main(["evaluate", str(seeds), "--settings"]) == 2
    assert "--settings is for one run" in capsys.readouterr().err

    model = ["--client", "0", "--out", str(tmp_path / "m.onnx")]
    assert main(["export", str(seeds), *model]) == 2
    assert "holds the seeds 0, 1, 2. Say which, such as --seed 0." in capsys.readouterr().err
    assert main(["export", str(seeds), "--seed", "7", *model]) == 2
    assert "holds the seeds 0, 1, 2, not 7." in capsys.readouterr().err
    assert main(["export", str(seeds / "seed-1"), "--seed", "1", *model]) == 2
    assert "not a folder of several seeds. Leave it out." in capsys.readouterr().err
    assert main(["export", str(seeds), "--seed", "1", *model]) == 0
    assert json.loads((tmp_path / "m.json").read_text())


def test_lists(capsys):
    assert main(["parts"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("fedbn", "dirichlet", "trades", "digits_cnn", "autoattack"))
    assert main(["parts", "trimmed_mean"]) == 0
    shown = capsys.readouterr().out
    assert "aggregator trimmed_mean" in shown and "Yin et al." in shown and "\n  f" in shown
    assert main(["parts", "batch"]) == 0
    assert "momentum = 0.1 " in (shown := capsys.readouterr().out) and "share of the new batch" in shown
    assert main(["parts", "fedrbn"]) == 0
    shown = capsys.readouterr().out
    assert "\n  weight = 0.5" in shown and "λ, weight of the loss through the frozen adversarial branch" in shown
    assert "\n  attack = pgd" in shown and "\n  affine = private" in shown and "\n  clip = inf" in shown
    assert main(["parts", "tiny_cnn"]) == 0
    assert "  width = 1 " in (shown := capsys.readouterr().out) and "shape" not in shown  # shape comes from the data
    assert main(["parts", "trimmed_men"]) == 2
    assert capsys.readouterr().err.endswith("Did you mean 'trimmed_mean'? `hardy parts` lists them all.\n")
    assert main(["data"]) == 0
    assert "mini_digits" in capsys.readouterr().out
    assert main(["bench", "demo", "model.width=0.25"]) == 0
    assert "vectorised" in capsys.readouterr().out


def test_usage_mistakes(capsys):
    for arguments in (
        ["run"],
        ["run", "demo", "--alone", "--oot", "x"],
        ["fly"],
        ["run", "demo", "--alone", "--seeds", "x"],
        ["run", "demo", "--alone", "--seeds=0"],
    ):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2


def test_a_mistyped_word_gets_the_nearest_one(capsys):
    for arguments, message in (
        (["rum"], "hardy: unknown command 'rum'. Did you mean 'run'? Known: bench, "),
        (
            ["run", "demo", "--alone", "--oot", "x"],
            "hardy run: unknown option '--oot'. Did you mean '--out'? Known: --alone, --data, ",
        ),
        (
            ["run", "demo", "--alone", "--engine=vectorized"],
            "hardy run: unknown value 'vectorized'. Did you mean 'vectorised'?",
        ),
        (["deploy", "certificate", "x"], "hardy deploy: unknown command 'certificate'. Did you mean 'certificates'?"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        shown = capsys.readouterr().err
        assert shown.startswith(message) and shown.count("\n") == 1


def test_an_override_that_a_later_one_takes_back_is_refused(capsys):
    """A new method takes the old one's options away: in this order they would be lost without a word."""
    assert main(["parts", "fedprox"]) == 0
    for overrides in (["method.strength=1", "method=fedprox"], ["rounds=1", "training.rate=0.1", "rounds=2"]):
        with pytest.raises(SystemExit) as left:
            main(["run", "demo", *overrides])
        assert left.value.code == 2
        assert f"{overrides[0]} has no effect: {overrides[-1]} after it" in capsys.readouterr().err


def test_a_word_of_another_library_gets_the_word_of_this_one(capsys):
    for override, word in (
        ("training.lr=0.1", "rate"),
        ("training.batch_size=8", "batch"),
        ("optimizer=sgd", "optimiser"),
    ):
        assert main(["run", "demo", "--alone", override]) == 2
        assert f"Did you mean {word!r}?" in capsys.readouterr().err


def test_a_folder_of_seeds_is_no_run(seeds):
    with pytest.raises(HardyError, match=r"holds several runs. Give one of them, such as .*seed-"):
        hardy.load(seeds)


@pytest.mark.parametrize("module", ["torch", "argparse"])
def test_ctrl_c_while_modules_load_is_one_line(module):
    code = f"""
import sys
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Stop())
from hardy.cli import main
sys.exit(main(["parts"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130 and done.stderr.startswith("hardy: stopped.") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB")])
def test_out_of_memory_is_one_line(error, monkeypatch, capsys):
    def full(options):
        raise error

    monkeypatch.setattr(run_command, "COMMAND", replace(run_command.COMMAND, call=full))
    assert main(["run", "demo", "--alone"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("hardy: out of memory") and "smaller batch" in shown and shown.count("\n") == 1


def test_a_name_never_leads_out_of_the_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["run", "demo", "--alone", "name=../../evil"]) == 2
    assert "name is '../../evil'; it names a folder in runs/" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


def test_help_loads_nothing_heavy():
    code = """
import os, sys
os.environ.pop("OMP_WAIT_POLICY", None)
from hardy.cli.parser import make_parser
make_parser().format_help()
assert not {"torch", "numpy"} & set(sys.modules), "heavy"
import hardy
assert not {"torch", "numpy"} & set(sys.modules), "heavy"
assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
assert not hasattr(hardy, "fitt") and "fit" in dir(hardy)
assert hardy.fit.__module__ == "hardy.runs.api" and hardy.papers.fedavg and hardy.deploy.OnnxPredictor
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_choices_written_out_are_those_of_the_package():
    assert get_args(get_type_hints(EngineChoice)["name"]) == ENGINE_NAMES
    assert get_args(DataPart) == (*DATA_PARTS, "triggered")  # which metric backdoor_success alone looks at


def test_a_killed_reader_and_a_module_call():
    command = f"{sys.executable} -m hardy parts | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.strip() and "Traceback" not in done.stderr
