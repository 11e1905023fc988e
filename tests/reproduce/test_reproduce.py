"""`hardy reproduce`: rows run, go on where they were stopped, and reach results and pages."""

import shutil
from pathlib import Path

import pytest

from hardy.cli import main
from hardy.reproduce.definition import find_folder, find_table, read_table, table_files
from hardy.reproduce.records import read_records
from hardy.reproduce.row_jobs import run_jobs
from hardy.reproduce.row_runs import RowJob, plan_rows, run_row

FOLDER = Path(__file__).parents[2] / "experiments"
TINY = ["rounds=1", "evaluation.every=1", "engine={name='sequential',device='cpu'}", "training.batch=8"]
MARK = "<!-- {}, written by `hardy reproduce --write` -->\n<!-- end -->\n"


@pytest.fixture
def folder(tmp_path):
    """A folder of tables with one paper, on the embedded digits."""
    paper = tmp_path / "experiments" / "demo"
    paper.mkdir(parents=True)
    (paper / "e.toml").write_text(
        'name = "e"\nrounds = 3\nmethod = "fedbn"\nmodel = { name = "tiny_cnn", width = 0.25 }\n'
        '[data]\nlimit = 40\n[engine]\ndevice = "cpu"\n[checkpoint]\nevery = 1\n'
    )
    (paper / "t.toml").write_text(
        'title = "T"\nexperiment = "e.toml"\ncolumns = ["clean", "fgsm"]\ncompare = ["clean"]\nagainst = "a"\n'
        '[rows]\n"a" = { paper = { clean = 50.0 } }\n"b, κ" = { set = ["training.rate=0.05"] }\n'
        '[[measures]]\nname = "fgsm"\nthreat = "fgsm"\nlimit = 5\n'
    )
    (paper / "paper.toml").write_text(
        'title = "Demo"\nreference = "us"\nclaim = "c"\nverdict = "v"\n'
        '[published]\n"Table 1" = { shows = "all", tables = ["t"] }\n"Figure 1" = { shows = "x", why = "a drawing" }\n'
        '[[pictures]]\nfile = "p.svg"\ntitle = "P"\ntable = "t"\ncolumns = ["clean"]\nrows = { "a" = "A" }\n'
    )
    (paper / "README.md").write_text("# Demo\n\n" + MARK.format("list") + MARK.format("demo/t"))
    (paper.parent / "README.md").write_text("# All\n\n" + MARK.format("list"))
    return paper.parent


def job(folder, row="a", **options):
    return RowJob(
        **{"folder": folder, "table": "demo/t", "row": row, "seed": 0, "out": folder.parent / "runs", **options}
    )


def test_a_row_goes_on_in_the_middle_and_is_not_run_again(folder):
    first = run_row(job(folder))
    (run,) = (folder.parent / "runs").glob("demo/t/a-*/seed-0")
    shutil.rmtree(run / "checkpoint" / "round-000003")  # as if it had been killed after round 2
    run.with_name("seed-0.t.json").unlink()
    again = run_row(job(folder))
    same = ("figures", "curve", "configuration", "rounds")
    assert {key: first[key] for key in same} == {key: again[key] for key in same}
    assert first["figures"]["clean"]["images"] == 1000 and first["figures"]["fgsm"]["images"] == 50
    assert len(first["curve"]) == 3 and first["figures"]["fgsm"]["how"] == {"threat": "fgsm", "limit": 5}
    shutil.rmtree(run)  # the record alone is enough, as long as it has what the table asks
    assert run_row(job(folder)) == again


def test_a_new_column_is_measured_on_the_run_that_is_there(folder):
    seconds = run_row(job(folder))["seconds"]
    toml = folder / "demo" / "t.toml"
    toml.write_text(toml.read_text().replace('columns = ["clean", "fgsm"]', 'columns = ["clean", "fgsm", "pgd-1"]'))
    found = run_row(job(folder))
    assert "pgd-1" in found["figures"] and found["seconds"] == seconds


def test_one_image_a_client_says_nothing_of_its_error(folder):
    toml = folder / "demo" / "t.toml"
    text = toml.read_text().partition("[[measures]]")[0].replace('"fgsm"', '"one image"')
    toml.write_text(text + '[[measures]]\nname = "one image"\nlimit = 1\n')
    found = run_row(job(folder, overrides=("rounds=5", "data.limit=100", "training.batch=8")))["figures"]["one image"]
    assert found["images"] == 10 and 0 < found["mean"] < 1
    assert found["standard_error"] == pytest.approx((found["mean"] * (1 - found["mean"]) / 10) ** 0.5, abs=1e-6)


def test_a_module_tells_images_and_errors(tmp_path):
    row = "dp_sgd, noise 2 (ε = 49)"
    found = run_row(RowJob(folder=FOLDER, table="private/attacks", row=row, seed=0, out=tmp_path, quick=True))
    assert found["figures"].keys() == {*find_table(FOLDER, "private/attacks").columns}
    assert found["figures"]["advantage"]["images"] == 1300 and found["figures"]["inversion, as sent"]["images"] == 4
    assert all(figure["standard_error"] > 0 for figure in found["figures"].values())


def test_the_command_writes_results_pages_and_a_picture(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert main(["reproduce", "demo/t", "--seeds", "2", "--rows", "a", "--quiet", "--write", "rounds=1"]) == 0
    printed = capsys.readouterr().out
    assert "demo/t: a, seed 1: clean" in printed and "| a |" in printed
    table = find_table(find_folder(), "demo/t")
    records = read_records(table, quick=False)
    assert [record["seed"] for record in records] == [0, 1] and records[0]["overrides"] == ["rounds=1"]
    page = (folder / "demo" / "README.md").read_text()
    mean = 50 * sum(record["figures"]["clean"]["mean"] for record in records)
    assert f"| a | 50 | {mean:.1f} ± " in page and "shorter: 1 of 3 rounds, 1 of 2 rows, 2 seeds" in page
    assert "</svg>" in (folder / "demo" / "p.svg").read_text() and "Demo" in (folder / "README.md").read_text()
    assert main(["reproduce", "--list"]) == 0
    assert "2 tables and figures: 0 full length, 0 all rounds, 1 shorter" in capsys.readouterr().out
    assert main(["reproduce", "--write"]) == 0 and "written" not in capsys.readouterr().out


def test_a_row_that_fails_leaves_the_others(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    toml = folder / "demo" / "t.toml"
    toml.write_text(toml.read_text().replace("training.rate=0.05", "data.source=mnist"))
    monkeypatch.delenv("HARDY_DATA", raising=False)
    assert main(["reproduce", "demo/t", "--quiet", "rounds=1"]) == 2
    printed = capsys.readouterr()
    assert "a, seed 0: clean" in printed.out and "1 rows could not be run: demo/t, b, κ:" in printed.err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["demo/x"], "unknown table 'demo/x'"),
        (["demo/e"], "no rows, so it is no table"),
        (["demo/t", "--rows", "zz"], "unknown row 'zz'"),
        (["demo/t", "--rows", "("], "is no pattern"),
        (["demo/t", "--quick"], "no short form"),
        ([], "no table is named"),
        (["demo/t", "trainin.rate=1"], "trainin"),
    ],
)
def test_mistakes_are_one_line(folder, capsys, monkeypatch, words, answer):
    monkeypatch.chdir(folder.parent)
    assert main(["reproduce", *words, "--quiet"]) == 2
    assert answer in capsys.readouterr().err


def test_rows_of_one_run_and_seeds_are_planned_in_turn(folder, tmp_path):
    options = {"patterns": [], "quick": False, "out": tmp_path}
    _, jobs = plan_rows(folder, ["demo"], seeds=2, **options)
    assert [(one.row, one.seed) for one in jobs] == [("a", 0), ("b, κ", 0), ("a", 1), ("b, κ", 1)]
    tables, again = plan_rows(folder, ["demo/t", "demo"], seeds=2, **options)
    assert again == jobs and len(tables) == 1, "a table named twice is run once"


def test_time_that_is_up_leaves_rows_to_the_next_call(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert main(["reproduce", "demo/t", "--minutes", "0.001", "--seeds", "2"]) == 0
    assert "Not finished in 0.001 minutes: 4 of 4 rows. The same command goes on." in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["reproduce", "demo/t", "--minutes", "inf"])


@pytest.mark.slow
def test_several_rows_at_once_and_a_process_that_is_killed(folder):
    jobs = [job(folder, row, overrides=("rounds=1",)) for row in ("a", "b, κ")]
    found = {one.row: record for one, record in run_jobs(jobs, 2)}
    assert found.keys() == {"a", "b, κ"} and all(isinstance(record, dict) for record in found.values())
    alone = run_row(job(folder, "a", overrides=("rounds=1",), out=folder.parent / "alone"))
    assert alone["figures"]["clean"]["mean"] == found["a"]["figures"]["clean"]["mean"]
    (folder / "demo" / "dies.py").write_text("import os\n\ndef measure_row(options, seed, quick):\n    os._exit(9)\n")
    (folder / "demo" / "d.toml").write_text(
        'title = "D"\nprogram = "dies.py"\ncolumns = ["x"]\n[rows]\n"a" = {}\n"b" = {}\n'
    )
    ended = [words for _, words in run_jobs([job(folder, row, table="demo/d") for row in "ab"], 2)]
    assert len(ended) == 2 and all("ended with code 9" in words for words in ended)


@pytest.mark.slow
def test_a_row_that_is_under_way_when_time_is_up_leaves_a_checkpoint(folder):
    endless = job(folder, overrides=("rounds=1000000",))
    runs = folder.parent / "runs"
    for minutes in (0.25, 0.5, 1.0, 2.0, 4.0):  # a busy machine needs longer to begin
        assert list(run_jobs([endless], minutes=minutes)) == []
        if saved := list(runs.glob("demo/t/a-*/seed-0/checkpoint/round-*")):
            break
    assert saved and not list(runs.glob("demo/t/*.json"))


QUICK = {
    "fedrbn/table_2": ("MNIST: FedRBN, λ = 0.5", "data.limit=40"),
    "fedrobust/figures_1_2_alexnet": ("FedRobust", "data.limit=40"),
    "sfat/table_2": ("SFAT, AT", "data.limit=60"),
    "fbn/figure_3": ("FBN, γ = 0", "data.limit=80"),
    "split_mix/table_1": ("Split-Mix", "data.limit=80"),
    "hostile/triggers": ("pixel pattern: median", "data.limit=80"),
    "private/example_level": ("ε = 8, z = 1.8", "data.limit=80"),
}
"""short forms, and what makes them tiny"""


def run_quick(path, row, tmp_path, *more):
    table = find_table(FOLDER, path)
    small = find_table(FOLDER, path).quick
    jobs = RowJob(folder=FOLDER, table=path, row=row, seed=0, out=tmp_path, quick=True, overrides=(*TINY, *more))
    assert small is not None
    found = run_row(jobs)
    asked = {one.name for one in table.measures_of(row, quick=True)}
    assert (
        asked <= found["figures"].keys()
        and found["quick"]
        and found["unknown"].keys() <= {"commit", "rounds", "images", "seconds", "standard_error"}
    )
    return found


@pytest.mark.parametrize("path", QUICK)
def test_a_short_form_of_each_paper_runs(path, tmp_path, monkeypatch):
    monkeypatch.delenv("HARDY_DATA", raising=False)  # the embedded digits are enough
    row, limit = QUICK[path]
    found = run_quick(path, row, tmp_path, limit)
    assert found["rounds"] == 1
    assert all(0 <= figure["mean"] <= 1 for figure in found["figures"].values())


REST = [
    (table.path, row)
    for table in map(read_table, table_files(FOLDER))
    if table.quick is not None and table.path not in QUICK
    for row in table.rows_of(quick=True)[:1]
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "row"), REST, ids=[path for path, _ in REST])
def test_every_other_short_form_runs(path, row, tmp_path, monkeypatch):
    monkeypatch.delenv("HARDY_DATA", raising=False)
    table = find_table(FOLDER, path)
    if table.program:
        pytest.skip("minutes: its module has no tiny size")
    run_quick(path, row, tmp_path)
