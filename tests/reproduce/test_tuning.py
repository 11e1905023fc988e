"""Every row of a table is tuned by one rule, on validation rows of a seed that the table does not use."""

import json
from pathlib import Path

import pytest

from hardy.cli import main
from hardy.errors import HardyError
from hardy.reproduce.definition import find_table
from hardy.reproduce.row_runs import RowJob, row_experiment
from hardy.reproduce.row_tuning import read_choice, row_settings, tuning_measures, tuning_words

TABLE = (
    'title = "T"\nexperiment = "e.toml"\n[tuning]\nseed = 9\nvary = { "training.rate" = [0.0001, 0.2] }\n'
    '[rows]\nplain = {}\n"SGD" = { set = ["method=fedavg"], vary = { "training.batch" = [8, 16] } }\n'
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with one table that is tuned."""
    paper = tmp_path / "experiments" / "demo"
    paper.mkdir(parents=True)
    (paper / "e.toml").write_text(
        'name = "e"\nrounds = 2\nmethod = "fedbn"\nmodel = { name = "tiny_cnn", width = 0.25 }\n'
        '[data]\nlimit = 40\nvalidation = 0.5\n[engine]\ndevice = "cpu"\n'
    )
    (paper / "t.toml").write_text(TABLE)
    (paper / "paper.toml").write_text('title = "D"\nreference = "us"\nclaim = "c"\nverdict = "v"\n')
    monkeypatch.chdir(tmp_path)
    return paper.parent


def test_the_best_setting_on_validation_rows_is_the_rows(folder, capsys):
    table = find_table(folder, "demo/t")
    assert row_settings(table, "SGD") == [
        (f"training.rate={rate}", f"training.batch={batch}") for rate in (0.0001, 0.2) for batch in (8, 16)
    ]
    assert main(["reproduce", "demo/t", "--quiet"]) == 2
    assert "not tuned" in capsys.readouterr().err
    assert main(["reproduce", "demo/t", "--tune", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("on validation rows") == 6
    choice = read_choice(table, "plain", quick=False)
    scores = {one["set"][0]: one["score"] for one in choice["settings"]}
    assert choice["chosen"] == [max(scores, key=scores.get)] and choice["seed"] == 9 and choice["rounds"] == 2
    job = RowJob(folder=folder, table="demo/t", row="plain", seed=1, out=Path("runs"))
    chosen, _, _ = row_experiment(table, job)
    assert f"training.rate={chosen.training.rate:g}" == choice["chosen"][0] and chosen.seed == 1
    by_hand, _, _ = row_experiment(table, RowJob(**{**vars(job), "overrides": ("training.rate=0.03",)}))
    assert by_hand.training.rate == 0.03
    words = tuning_words(table, table.rows, quick=False)
    assert "2 to 4 settings a row, 2 rounds each, the best by clean on validation rows of seed 9" in words
    assert "At an end of what was tried: plain, SGD." in words
    with pytest.raises(HardyError, match="tuned on seed 9"):
        row_experiment(table, RowJob(**{**vars(job), "seed": 9}))


def test_a_setting_that_diverges_loses(folder, capsys):
    (folder / "demo" / "t.toml").write_text(TABLE.replace("[0.0001, 0.2]", "[1e30, 0.0001]").partition('"SGD"')[0])
    (folder / "demo" / "e.toml").write_text((folder / "demo" / "e.toml").read_text().replace("= 2\n", "= 12\n", 1))
    assert main(["reproduce", "demo/t", "--tune", "--quiet"]) == 0
    assert "every reply of the last" in capsys.readouterr().out
    choice = read_choice(find_table(folder, "demo/t"), "plain", quick=False)
    assert choice["chosen"] == ["training.rate=0.0001"] and choice["settings"][0]["score"] is None
    (folder / "demo" / "t.toml").write_text(TABLE.replace("[0.0001, 0.2]", "[1e30]").partition('"SGD"')[0])
    assert main(["reproduce", "demo/t", "--tune", "--quiet", "--out", "anew"]) == 2
    assert "no setting of row 'plain' can be trained" in capsys.readouterr().err


def test_other_settings_are_another_tuning(folder):
    table = find_table(folder, "demo/t")
    where = folder / "demo" / "results" / "t" / "tuning"
    where.mkdir(parents=True)
    settings = [{"set": list(one), "score": 0.5, "seconds": 1.0} for one in row_settings(table, "plain")]
    choice = {"row": "plain", "seed": 9, "chosen": ["training.rate=0.2"], "settings": settings}
    (where / "plain.json").write_text(json.dumps(choice))
    assert read_choice(table, "plain", quick=False)["chosen"] == ["training.rate=0.2"]
    (folder / "demo" / "t.toml").write_text(TABLE.replace("0.0001", "0.01"))
    assert read_choice(find_table(folder, "demo/t"), "plain", quick=False) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('"training.batch" = [8, 16]', '"training.rate" = [1]'), "may vary one key"),
        (('"training.batch" = [8, 16]', '"a" = [1], "b" = [1]'), "may vary one key"),
        (("plain = {}", 'plain = { set = ["training.rate=1"] }'), "which tuning varies"),
        (("[0.0001, 0.2]", "[]"), "values to vary"),
    ],
)
def test_mistakes_are_named(folder, change, words):
    (folder / "demo" / "t.toml").write_text(TABLE.replace(*change))
    with pytest.raises(HardyError, match=words):
        find_table(folder, "demo/t")


def test_what_has_no_effect_is_refused(folder, capsys):
    assert main(["reproduce", "demo/t", "--tune", "rounds=1"]) == 2
    assert main(["reproduce", "demo/t", "--tune", "--seeds", "2"]) == 2
    (folder / "demo" / "t.toml").write_text(TABLE.partition("[tuning]")[0] + "[rows]\nplain = {}\n")
    assert main(["reproduce", "demo/t", "--tune"]) == 2
    assert "--tune has no effect" in capsys.readouterr().err


def test_a_tables_own_measure_chooses_and_the_small_table_tunes_shorter(folder):
    """Here a width: what is tuned by it is measured at it, on validation rows."""
    path = folder / "demo" / "t.toml"
    more = '[[measures]]\nname = "×0.5"\nwidth = 0.5\n'
    text = TABLE.replace("seed = 9\n", 'seed = 9\nby = ["clean", "×0.5"]\nset = ["rounds=7"]\n') + more
    path.write_text(text.replace("[rows]", '[quick]\nexperiment = "e.toml"\ntuning = ["rounds=1"]\n[rows]'))
    table = find_table(folder, "demo/t")
    found = [(one.name, one.width, one.part) for one in tuning_measures(table)]
    assert found == [("clean", 1.0, "validation"), ("×0.5", 0.5, "validation")]
    for quick, rounds in ((True, 1), (False, 7)):
        job = RowJob(folder=folder, table="demo/t", row="plain", seed=0, out=Path("runs"), quick=quick, setting=())
        assert row_experiment(table, job)[0].rounds == rounds
    path.write_text(text.replace('"×0.5"]', '"×0.7"]'))
    with pytest.raises(HardyError, match=r"×0\.7"):
        find_table(folder, "demo/t")
