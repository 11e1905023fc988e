"""An experiment with arms: what runs beside it, what is printed and written, and how it goes on."""

import json
import tomllib

import pytest

import hardy
from hardy import config
from hardy.cli import main
from hardy.cli.parser import make_parser
from hardy.config.arm_table import read_arms
from hardy.errors import HardyError
from hardy.report.stored_run import read_run
from hardy.runs import seeds
from hardy.runs.arms import arm_folders

SHORT = ["data.limit=20", "rounds=1", "evaluation.every=1", "training.batch=64"]
OWN = """
name = "own"
rounds = 1
look = "mean: nothing to see"
data = { limit = 20 }
model = { name = "tiny_cnn", width = 0.25 }
engine = { name = "sequential", device = "cpu" }

[evaluation]
threats = ["fgsm"]
checks = false

[arms]
"FedProx" = ["method={name='fedprox',strength=1.0}"]
"FedBN" = ["method=fedbn", "training.rate=0.1"]
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.toml").write_text(OWN)
    return str(tmp_path / "own.toml")


def test_an_experiment_of_ones_own_and_its_arms(own, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["run", own, "training.rate=0.05", "--out", str(out), "--quiet"]) == 0
    folders = arm_folders(out)
    assert [folder.name for folder in folders] == ["run", "FedProx", "FedBN"]
    alone = hardy.fit(config.read(own, ["training.rate=0.05"]), quiet=True)
    beside = hardy.fit(config.read(own, ["method=fedbn", "training.rate=0.1"]), quiet=True)
    for folder, same in ((out, alone), (folders[2], beside)):  # each arm is what it would be by itself
        summary = read_run(folder).summary
        assert summary["standard_accuracy"]["by_client"] == same.summary()["standard_accuracy"]["by_client"]
        assert summary["robust_accuracy"]["fgsm"]["mean"] == same.robust["fgsm"]["mean"]
    rates = [tomllib.loads((folder / "config.toml").read_text())["training"]["rate"] for folder in folders]
    assert rates == [0.05, 0.05, 0.1]
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if line.startswith("FedBN  "))
    clean, robust = (read_run(folders[2]).summary[key] for key in ("standard_accuracy", "robust_accuracy"))
    for found in (clean, robust["fgsm"]):
        assert f"{100 * found['mean']:.1f} ± {100 * found['standard_error']:.1f}" in line
    assert "minus run" in shown and "Look at: mean: nothing to see" in shown
    page = (out / "comparison.html").read_text()
    assert "FedProx" in page and "FedBN" in page
    assert hardy.load(out).experiment.method == "fedavg"  # the folder is a run folder all the same


def test_an_override_that_arms_take_back_is_said(own, capsys):
    """FedProx and FedBN are other methods, which bring norms of their own."""
    chosen = make_parser().parse_args(["run", own, "method.norm=group", "training.rate=0.2"])
    assert chosen.call.__globals__["_arms"](chosen)
    said = capsys.readouterr().err
    assert said == "hardy: method.norm=group does not hold for FedProx, FedBN, where another part takes its place\n"


def test_it_goes_on_where_it_stopped(own, tmp_path, capsys, monkeypatch):
    """Killed between two arms: what is finished stays as it is, the others are run, and nothing else is asked."""
    out = tmp_path / "run"
    ran, fit = [], seeds.fit

    def stops(chosen, **options):
        ran.append(options["out"].name)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return fit(chosen, **options)

    monkeypatch.setattr(seeds, "fit", stops)
    assert main(["run", own, "--out", str(out), "--quiet"]) == 130
    assert ran == ["FedProx", "FedBN"] and not (out / "comparison.html").exists()
    before = (out / "arms" / "FedProx" / "metrics.jsonl").read_bytes()
    assert main(["resume", str(out), "--quiet"]) == 0
    assert ran == ["FedProx", "FedBN", "FedBN"]
    assert (out / "arms" / "FedProx" / "metrics.jsonl").read_bytes() == before
    assert (out / "comparison.html").exists() and "FedBN  " in capsys.readouterr().out
    assert main(["run", own, "--out", str(out)]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_several_seeds(own, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["run", own, "--seeds", "2", "--out", str(out), "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "±: standard error over the seeds." in shown and "2 seeds" in shown
    assert sorted(path.name for path in (out / "arms" / "FedBN").glob("seed-*")) == ["seed-0", "seed-1"]
    found = [read_run(out / "arms" / "FedBN" / f"seed-{n}").summary["standard_accuracy"]["mean"] for n in (0, 1)]
    mean, error = sum(found) / 2, abs(found[0] - found[1]) / 2
    line = next(line for line in shown.splitlines() if line.startswith("FedBN (2 seeds)"))
    assert f"{100 * mean:.1f} ± {100 * error:.1f}" in line


def test_what_is_measured_beside_arms_is_not_measured_alone(tmp_path, capsys):
    text = OWN.replace('[evaluation]\nthreats = ["fgsm"]\nchecks = false\n', "")
    text = text.replace("look =", 'measure = ["evaluation.threats=[\'fgsm\']", "rounds=2"]\nlook =')
    (tmp_path / "own.toml").write_text(text)
    assert not hardy.read(tmp_path / "own.toml").evaluation.threats
    out = tmp_path / "run"
    assert main(["run", str(tmp_path / "own.toml"), "rounds=1", "--out", str(out), "--quiet"]) == 0
    for folder in arm_folders(out):
        assert read_run(folder).summary["robust_accuracy"].keys() == {"fgsm"}
        assert read_run(folder).summary["rounds"] == 1  # the command line's word counts


def test_arms_are_left_out_on_other_data(tmp_path, capsys):
    out = tmp_path / "run"
    words = ["data.source={name='mini_digits',domains=['print']}", *SHORT, "engine.device=cpu"]
    assert main(["run", "demo", *words, "--out", str(out), "--quiet"]) == 0
    assert "on other data the arms of demo are left out: FATBN, FedRBN" in capsys.readouterr().err
    assert not (out / "arms").exists()


def test_alone(own, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["run", own, "--alone", "--out", str(out), "--quiet"]) == 0
    assert not (out / "arms").exists() and "FedBN" not in capsys.readouterr().out
    (tmp_path / "plain.toml").write_text("rounds = 1\n")
    assert main(["run", str(tmp_path / "plain.toml"), "--alone", "--out", str(tmp_path / "x")]) == 2
    assert "and has none" in capsys.readouterr().err.replace(f"{tmp_path / 'plain.toml'} ", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("look = 3", "it must be one line of text"),
        ("look = 'x'", "there are none"),
        ("measure = ['rounds=2']", "there are none"),
        ("measure = 'rounds=2'\n[arms]\nx = ['rounds=1']", "measure of"),
        ("[arms]\n'../x' = ['rounds=1']", "names a folder"),
        ("[arms]\n'' = ['rounds=1']", "names a folder"),
        ("[arms]\nx = 'rounds=1'", "it must be a list such as"),
        ("[arms]\nx = []", "it must be a list such as"),
        ("arms = 3", "must be a table of at most 100 lines"),
        ("[arms]\nx = ['method=fedprx']", "arm x: unknown method 'fedprx'. Did you mean 'fedprox'?"),
        ("[arms]\nx = ['rounds']", "arm x: 'rounds' is not an override"),
    ],
)
def test_mistakes_are_found_before_anything_is_trained(text, message, tmp_path, capsys):
    (tmp_path / "x.toml").write_text(f"rounds = 1\n{text}\n")
    assert main(["run", str(tmp_path / "x.toml"), "--out", str(tmp_path / "run"), "--quiet"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.toml").exists()


def test_a_damaged_list_of_arms_names_no_folder_outside(tmp_path, capsys):
    (tmp_path / "arms.json").write_text(json.dumps({"seeds": 1, "arms": ["../elsewhere"]}))
    with pytest.raises(HardyError, match="names no arms"):
        arm_folders(tmp_path)


@pytest.mark.parametrize("name", config.bundled())
def test_bundled_showcases_run_in_small(name, tmp_path, capsys):
    """A round of each arm, so that every override still fits the experiment."""
    assert read_arms(name).look and read_arms(name).overrides
    more = ["model.width=0.25"] if name != "split_mix" else []
    words = [*SHORT, *more, "engine.name=sequential", "engine.device=cpu"]
    assert main(["run", name, *words, "--out", str(tmp_path / "run"), "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert f"Look at: {read_arms(name).look}" in shown
    table = shown[shown.index("accuracy in %") :]
    for row in ("run", *read_arms(name).overrides):
        assert any(line.startswith(row) and " ± " in line for line in table.splitlines())
