"""Results, pages and pictures say the same; the noise beside a figure is worked out as it is told."""

import re
from pathlib import Path

import pytest

from hardy.errors import HardyError
from hardy.reproduce.definition import CLEAN, ResultTable, RowMeasure, TableRow, read_paper, read_table, table_files
from hardy.reproduce.drawing import _points
from hardy.reproduce.listing import entries, listing, page_contents, state
from hardy.reproduce.published_pages import (
    chosen_records,
    row_difference,
    score,
    shown_difference,
    shown_score,
    table_markdown,
    written,
)
from hardy.reproduce.records import KEYS, check_record, read_records, record_file, slug
from hardy.reproduce.row_tuning import read_choice, tuning_file

FOLDER = Path(__file__).parents[2] / "experiments"
TABLES = [read_table(path) for path in table_files(FOLDER)]
PAPERS = sorted(path.parent for path in FOLDER.glob("*/paper.toml"))
FIVE = ("fbn", "fedrbn", "fedrobust", "sfat", "split_mix")
ASKED = {
    "fedrbn": ["Table 1", "Table 2", "Table 3", "Table 4", "Table 7", "Table 8"]
    + [f"Figure {n}" for n in (1, 3, 6, 8, 9, 10)],
    "fedrobust": [f"Figure {n}" for n in (1, 2, 3, 4)],
    "split_mix": ["Table 1", "Table 4", "Table 5", *(f"Figure {n}" for n in (5, 6, 7, 11, 12))],
    "sfat": [f"Table {n}" for n in (1, 2, 3, 9, 10, 11, 12)],
    "fbn": [f"Figure {n}" for n in range(2, 14)],
}
"""what must have a table that can be run"""


@pytest.mark.parametrize("table", TABLES, ids=[table.path for table in TABLES])
def test_results_are_records_of_rows_in_one_schema(table):
    for quick in (False, True):
        records = read_records(table, quick=quick)
        files = [record_file(table, record) for record in records]
        assert len(set(files)) == len(files) and all(path.is_file() for path in files)
        for record in records:  # a figure is measured as its table asks
            measures = {one.name for one in table.measures_of(record["row"], quick=quick)}
            assert measures & record["figures"].keys(), (record["row"], measures)


def test_no_result_is_an_orphan():
    found = set(FOLDER.rglob("results/**/*.json"))
    forms = [(table, quick) for table in TABLES for quick in (False, True)]
    known = {record_file(t, r) for t, quick in forms for r in read_records(t, quick=quick)}
    tuned = {
        tuning_file(t, row, quick=quick) for t, quick in forms for row in t.rows if read_choice(t, row, quick=quick)
    }
    assert found == known | tuned


def test_pages_and_pictures_are_what_the_results_say():
    stale = [path for path, text in page_contents(FOLDER).items() if path.read_text("utf-8") != text]
    assert not stale, "run `hardy reproduce --write`"


@pytest.mark.parametrize("paper", FIVE)
def test_every_table_that_matters_can_be_run(paper):
    published = read_paper(FOLDER / paper).published
    assert all(published[name].tables for name in ASKED[paper])
    text = listing(FOLDER, paper)
    assert all(re.search(rf"\b{name} ", text) for name in published)


def test_the_list_says_why_a_table_is_not_run():
    for entry in entries(FOLDER):
        assert entry.state and (not entry.state.startswith("not run") or len(entry.state) > len("not run: ")), entry
    states = {entry.table: entry.state for entry in entries(FOLDER)}
    assert states["fedrbn/table_2_domainnet"] == "not run: data: DomainNet"
    assert states["sfat/table_19"] == "not run: data: CelebA"


def test_full_length_is_said_of_a_papers_own_setting_alone():
    full = [table for table in TABLES if state(table).startswith("full length")]
    assert full and all(table.published and not table.reduced for table in full)
    states = {table.path: state(table) for table in TABLES}
    assert states["sfat/arms_embedded"] == "reduced: embedded digits; 3 seeds"


@pytest.mark.parametrize("folder", PAPERS, ids=lambda path: path.name)
def test_a_page_has_the_outline_and_little_prose(folder):
    page = (folder / "README.md").read_text("utf-8")
    order = [page.index(words) for words in ("![", "**Claim**", "**Verdict.**", "## Tables", "## What differs")]
    assert order == sorted(order)
    by_hand = re.sub(r"<!-- .*?written by.*?<!-- end -->", "", page, flags=re.DOTALL)
    for section in re.split(r"^#+ ", by_hand, flags=re.MULTILINE)[1:]:
        tables = max(1, page.count(f"<!-- {folder.name}/", *_span(page, section)))
        assert len(section.split()) <= 150 * tables, section[:80]


def _span(page, section):
    start = page.index(section.splitlines()[0])
    end = page.find("\n### ", start)
    return start, len(page) if end < 0 else end


# what is shown of records made by hand


def record(row, seed, mean, *, error=0.01, images=1000, rounds=10, mark="abc", date="2026-01-01", quick=False):
    known = {key: kind() if isinstance(kind, type) else 0 for key, kind in KEYS.items()}
    figures = {CLEAN: {"mean": mean, "images": images, "standard_error": error, "how": {}}}
    given = {"row": row, "seed": seed, "rounds": rounds, "configuration": mark, "date": date, "quick": quick}
    unknown = {"standard_error": "not recorded"} if error is None else {}
    return {**known, "schema": 1, "table": "p/t", "figures": figures, "unknown": unknown, **given, "device": "a GPU"}


def table(**options):
    rows = {name: TableRow(**given) for name, given in options.pop("rows", {"a": {}, "b": {}}).items()}
    return ResultTable(title="T", experiment="e.toml", rows=rows, paper="p", name="t", **options)


def test_mean_deviation_and_error_of_a_figure():
    found = score([record("a", 0, 0.5), record("a", 1, 0.6), record("a", 2, 0.7)], CLEAN)
    assert found.mean == pytest.approx(0.6) and found.deviation == pytest.approx(0.1) and found.seeds == 3
    assert found.noise == pytest.approx((0.01**2 + 0.1**2 / 3) ** 0.5)
    assert shown_score(found, "%") == "60.0 ± 10.0 (3)"
    assert shown_score(score([record("a", 0, 0.5)], CLEAN), "%") == "50.0 (1)"
    bound = score([record("a", 0, 0.2, error=None, images=1600)], CLEAN)
    assert bound.bound and bound.error == pytest.approx(0.01)  # sqrt(0.2 * 0.8 / 1600)


def test_a_difference_is_bold_only_where_seeds_and_images_tell_it_apart():
    a = [record("a", seed, 0.60 + 0.01 * seed) for seed in range(3)]
    b = [record("b", seed, 0.50 + 0.01 * seed) for seed in range(3)]
    sure = row_difference(a, b, CLEAN)  # the seeds agree, so only the images count: sqrt(2) * 0.01
    assert sure.noise == pytest.approx(0.014142, abs=1e-6) and sure.bold
    assert shown_difference(sure, "%") == "**+10.0** ± 1.4"
    one = row_difference(a[:1], b[:1], CLEAN)
    assert one.certain and not one.bold and shown_difference(one, "%") == "+10.0 ± 1.4"
    near = [record("c", seed, 0.61 + 0.01 * seed) for seed in range(3)]
    assert shown_difference(row_difference(near, a, CLEAN), "%") == "+1.0 ± 1.4: within noise"
    unlike = [record("d", seed, value) for seed, value in enumerate((0.9, 0.6, 0.45))]
    assert shown_difference(row_difference(unlike, a, CLEAN), "%").endswith("within noise")  # one lucky seed is no lead
    unknown = [record("e", 0, 0.9, error=None, images=None)]
    assert shown_difference(row_difference(unknown, b[:1], CLEAN), "%") == "+40.0, noise not known"


def test_the_longest_runs_of_one_configuration_are_shown():
    short, old = record("a", 0, 0.1, rounds=5), record("a", 0, 0.2, mark=None)
    new = [record("a", seed, 0.3, date="2026-02-01") for seed in range(2)]
    made = table()
    assert chosen_records(made, [short, old, *new], "a") == new
    assert chosen_records(made, [short, old], "a") == [old]
    assert chosen_records(made, [short], "b") == []


def test_a_table_shows_the_paper_and_what_is_shorter(tmp_path):
    (tmp_path / "e.toml").write_text("rounds = 20\n")
    made = table(rows={"a": {"paper": {CLEAN: 71.2}}, "b": {}}, compare=(CLEAN,), against="b", folder=tmp_path)
    text = table_markdown(made, [record("a", 0, 0.7), record("b", 0, 0.5)])
    lines = text.splitlines()
    assert lines[0] == "|  | clean, paper | clean | clean, difference | rounds |"
    assert lines[2] == "| a | 71.2 | 70.0 (1) | +20.0 ± 1.4 | 10 |" and lines[3] == "| b |  | 50.0 (1) |  | 10 |"
    assert "up to 1.0 on 1,000 images" in text and "**" not in text


def test_a_record_that_is_not_whole_is_refused():
    check_record(record("a", 0, 0.5), "here")
    for wrong, words in (
        ({"seed": None}, "null without a reason"),
        ({"rounds": "10"}, "rounds is '10'"),
        ({"more": 1}, "unknown key 'more'"),
        ({"figures": {CLEAN: {"mean": 0.5}}}, "no images"),
        ({"figures": {CLEAN: {"mean": float("nan"), "images": 1, "standard_error": 0.1}}}, "mean"),
        ({"schema": 7}, "schema is 7"),
    ):
        with pytest.raises(HardyError, match=words):
            check_record(record("a", 0, 0.5) | wrong, "here")
    check_record(record("a", 0, 0.5) | {"seed": None, "unknown": {"seed": "a mean of three"}}, "here")


def test_a_page_without_a_place_is_told_what_to_add():
    with pytest.raises(HardyError, match="0 places for 'p/t'; it needs one"):
        written("# page", "p/t", "text", "README.md")


def test_names_of_files_tell_rows_apart():
    names = [row for one in TABLES for row in one.rows]
    assert len({slug(name) for name in names}) == len(set(names))
    assert slug("FedRBN, λ = 0.5") != slug("FedRBN, λ = 0,5") and slug("FATBN") == "fatbn"


def test_a_metric_of_the_run_takes_no_options():
    with pytest.raises(HardyError, match="no effect"):
        RowMeasure(name="x", metric="backdoor_success", limit=5)


def test_mistakes_in_a_table_are_named(tmp_path):
    (tmp_path / "e.toml").write_text("rounds = 20\n")
    for options, words in (
        ({"against": "c"}, "unknown row under against"),
        ({"rows": {"a": {"paper": {"pgd-7": 1.0}}}}, "unknown column of the paper"),
        ({"rows": {"a": {"set": ("@x",)}}}, "unknown list of overrides"),
        ({"compare": ("pgd-7",)}, "unknown column under compare"),
        ({"measures": (RowMeasure(name="x", rows="z"),)}, "no row has the measure"),
        ({"program": "p.py"}, "an experiment or a program"),
    ):
        with pytest.raises(HardyError, match=words):
            table(folder=tmp_path, **options).check()


def test_a_table_can_be_like_another_on_other_data(tmp_path):
    (tmp_path / "one.toml").write_text("rounds = 3")
    (tmp_path / "two.toml").write_text("rounds = 5")
    (tmp_path / "base.toml").write_text(
        'title = "base"\nexperiment = "one.toml"\nreduced = "small"\nagainst = "a"\n'
        '[quick]\nset = ["rounds=1"]\n[overrides]\n"x" = ["seed=1"]\n"y" = ["seed=2"]\n'
        '[rows]\n"a" = { set = ["@x"] }\n"b" = { set = ["@y"] }\n'
    )
    (tmp_path / "more.toml").write_text(
        'title = "more"\nlike = "base"\nexperiment = "two.toml"\nnot_run = "GPU time"\n[overrides]\n"y" = ["seed=3"]\n'
    )
    (tmp_path / "most.toml").write_text('title = "most"\nlike = "more"\n')
    more = read_table(tmp_path / "more.toml")
    assert [more.overrides_of(row) for row in more.rows] == [["seed=1"], ["seed=3"]]
    assert (more.title, more.known_rounds, more.against, more.reduced, more.quick) == ("more", 5, "a", "", None)
    assert {path.stem for path in table_files(tmp_path.parent, tmp_path.name)} == {"base", "more", "most"}
    with pytest.raises(HardyError, match="like another"):
        read_table(tmp_path / "most.toml")


@pytest.mark.parametrize("name", ["unlike_sizes", "equal_sizes"])
def test_rules_and_sizes_can_be_run_on_real_data(name):
    tables = {table.path: table for table in TABLES}
    for data in ("cifar10", "digits"):
        real = tables[f"hostile/{name}_{data}"]
        assert list(real.rows) == list(tables[f"hostile/{name}"].rows) and data in real.experiment


def test_points_of_a_picture_are_means_over_the_seeds():
    def record(seed, macs, share):
        figure = {"mean": share, "images": 10, "standard_error": 0.1, "macs": macs}
        return {"row": "a", "seed": seed, "figures": {"×1": figure}}

    assert _points([record(0, 2e6, 0.5), record(1, 2e6, 0.7)], ("×1: macs", "×1")) == [(2.0, pytest.approx(0.6))]
