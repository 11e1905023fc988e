"""`hardy sweep`: which settings it makes, that it goes on where it stopped, and that validation rows choose."""

import json

import pytest

from hardy.cli import main
from hardy.core.json_files import write_sealed
from hardy.errors import HardyError
from hardy.runs import loop, seeds
from hardy.runs.sweep import grid_settings, random_settings

TINY = ["rounds=2", "model.width=0.25", "training.batch=100", "data.limit=60", "engine.name=sequential", "--quiet"]


def test_a_grid_is_every_combination():
    assert grid_settings(["a.b=1,2", 'c=x,[1, 2],{ k = "y,z" }']) == [
        [f"a.b={first}", f"c={second}"] for first in "12" for second in ("x", "[1, 2]", '{ k = "y,z" }')
    ]


def test_random_settings_repeat_differ_and_stay_in_their_ranges():
    vary = ["rate=0.001..1:log", "epochs=1..5", "method=fedavg,fedbn", "share=0.5..1"]
    drawn = random_settings(vary, 200, seed=0)
    assert drawn == random_settings(vary, 200, seed=0) != random_settings(vary, 200, seed=1)
    columns = [[setting[at].partition("=")[2] for setting in drawn] for at in range(4)]
    rates = [float(rate) for rate in columns[0]]
    assert all(0.001 <= rate <= 1 for rate in rates)
    assert 60 < sum(rate < 10**-1.5 for rate in rates) < 140  # half of them on a logarithmic scale, 3 % on another
    assert set(columns[1]) == set("12345") and set(columns[2]) == {"fedavg", "fedbn"}
    assert all(0.5 <= float(share) <= 1 for share in columns[3])
    assert len(random_settings(["a=1,2,3", "b=1,2"], 6, seed=0)) == 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grid_settings(["rate"]), "write KEY=VALUE,VALUE, for example training.rate=0.01,0.1"),
        (lambda: grid_settings(["seed=1,2"]), "Use --seeds N"),
        (lambda: grid_settings(["a=1,1"]), "stands there twice"),
        (lambda: grid_settings(["a=1", "a=2"]), "names a key twice: a, a"),
        (lambda: grid_settings(["a=1..2"]), "a varies over the range 1..2: that needs --random N"),
        (lambda: grid_settings(["a=" + ",".join(map(str, range(1001)))]), "1001 settings; it may have up to 1000"),
        (lambda: random_settings(["a=2..1"], 2, 0), r"'2..1'; a range is LOW..HIGH or, with LOW above 0"),
        (lambda: random_settings(["a=0..1:log"], 2, 0), "a range is LOW..HIGH"),
        (lambda: random_settings(["a=1,2"], 3, 0), "--random is 3, but there are 2 settings in all"),
        (lambda: random_settings(["a=1..2"], 3, 0), "the ranges hold few whole numbers"),
        (lambda: random_settings(["a=1,2"], 0, 0), "--random is 0; it must be in 1 ... 1000"),
    ],
)
def test_settings_that_cannot_be_are_refused(call, message):
    with pytest.raises(HardyError, match=message):
        call()


def test_a_sweep_stops_goes_on_and_chooses_on_validation_rows(tmp_path, monkeypatch, capsys):
    out, trained, stops = tmp_path / "sweep", [], ["setting-2"]

    def watched(run, saving):
        if run.folder.name in stops:
            raise KeyboardInterrupt
        if run.experiment.training.rate == 0.5:
            raise HardyError("every reply was refused")
        trained.append(run.folder.name)
        return one_round(run, saving)

    one_round = loop._round
    monkeypatch.setattr(loop, "_round", watched)
    vary = ["--vary", "training.rate=0.01,0.2,0.5", "--out", str(out)]
    assert main(["sweep", "demo", *TINY, *vary]) == 130
    stops.clear()
    assert main(["sweep", "demo", *TINY, *vary]) == 2
    assert f"Go on with `hardy resume {out}`" in capsys.readouterr().err
    # a lie about test rows must not change the choice; one about validation rows must
    summary = json.loads((out / "setting-1" / "summary.json").read_text())
    summary["best"]["standard_accuracy"]["mean"] = summary["standard_accuracy"]["mean"] = 1.0
    del summary["sha256"]
    write_sealed(out / "setting-1" / "summary.json", summary)
    record = json.loads((out / "sweep.json").read_text())
    record["settings"][0]["validation_accuracy"] = 0.0
    (out / "sweep.json").write_text(json.dumps(record))
    assert main(["resume", str(out), "--quiet"]) == 2
    assert "sweep.json was changed or damaged: its checksum does not fit. Start the sweep" in capsys.readouterr().err
    del record["sha256"]
    write_sealed(out / "sweep.json", record)
    assert main(["resume", str(out), "--quiet"]) == 0
    assert trained == ["setting-1"] * 2 + ["setting-2"] * 2
    shown = capsys.readouterr().out
    assert "setting-3: training.rate=0.5: every reply was refused" in shown
    assert "chosen on validation rows: training.rate=0.2" in shown
    record = json.loads((out / "sweep.json").read_text())
    chosen = json.loads((out / "setting-2" / "summary.json").read_text())["best"]
    assert record["chosen"]["folder"] == "setting-2"
    assert record["chosen"]["validation_accuracy"] == chosen["validation_accuracy"]
    assert record["chosen"]["test_accuracy"] == chosen["standard_accuracy"]["mean"]
    assert [row.get("failed") for row in record["settings"]] == [None, None, "every reply was refused"]
    assert "100.0" not in shown  # test accuracy is shown of the chosen setting alone


def test_a_sweep_over_seeds_takes_their_mean(tmp_path):
    out = tmp_path / "sweep"
    assert main(["sweep", "demo", *TINY, "--vary", "training.rate=0.1", "--seeds", "2", "--out", str(out)]) == 0
    alone = [json.loads((out / "setting-1" / f"seed-{seed}" / "summary.json").read_text()) for seed in (0, 1)]
    best = [one["best"]["validation_accuracy"] for one in alone]
    assert json.loads((out / "sweep.json").read_text())["chosen"]["validation_accuracy"] == sum(best) / 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vary", "data.validation=0.1,0"], "a sweep chooses on validation rows and data.validation is 0"),
        (["--vary", "training.rat=1"], "unknown key in training 'rat'"),
        (["--vary", "engine.name=flower"], "a sweep runs on this machine"),
    ],
)
def test_mistakes_show_before_anything_runs(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.setattr(seeds, "fit", None)
    assert main(["sweep", "demo", *words, "--out", str(tmp_path / "sweep")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "sweep").exists()


def test_a_broken_record_is_one_line(tmp_path, capsys):
    write_sealed(tmp_path / "sweep.json", {"settings": [{}]})
    assert main(["resume", str(tmp_path)]) == 2
    assert "sweep.json: 'folder'. Start the sweep again" in capsys.readouterr().err
