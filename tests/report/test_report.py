"""What the report makes of a run folder: everything drawn, nothing fetched, bad input told."""

import base64
import hashlib
import json
import re
import struct
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hardy
from hardy.callbacks.trackers import write_tensorboard
from hardy.core.flatten import flat_row
from hardy.core.json_files import write_sealed
from hardy.errors import HardyError
from hardy.report.chart import si, thin
from hardy.report.compare import compare, seeds_summary, write_comparison
from hardy.report.count_plots import heat
from hardy.report.pictures import image_grid_png, picture_rows, row_labels
from hardy.report.plots import Series, lines
from hardy.report.run_page import write_report
from hardy.report.stored_run import read_run

NASTY = '<script>alert("x")</script>'


def accuracy(mean: float, clients: int = 4) -> dict[str, Any]:
    by_client = [mean + 0.01 * (at - clients / 2) for at in range(clients)]
    return {
        "mean": mean,
        "worst_client": min(by_client),
        "by_domain": {"pen": mean + 0.02, NASTY: mean - 0.02},
        "by_client": by_client,
    }


def make_run(
    folder: Path, *, rounds: int = 20, clients: int = 4, mean: float = 0.7, robust: bool = True, **summary: Any
) -> Path:
    (folder / "pictures").mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for at in range(1, rounds + 1):
        row: dict[str, Any] = {"round": at, "loss": 2.0 / at, "bytes_up": 1000, "bytes_down": 2000, "macs": 10**9}
        row |= {"lost": {"3": f"refused: {NASTY}"}, "slots": 2, "spread": at / 7}
        if at % 5 == 0:
            row |= {"standard_accuracy": accuracy(mean * at / rounds, clients), "validation_accuracy": accuracy(mean)}
        rows.append(row)
    rows[1]["loss"] = None
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = {
        "name": NASTY,
        "method": "fedavg",
        "rounds": rounds,
        "seconds": 75.0,
        "bytes_up": 1000 * rounds,
        "bytes_down": 2000 * rounds,
        "macs": rounds * 10**9,
        "standard_accuracy": accuracy(mean, clients),
        "best": {"round": 5, "validation_accuracy": mean, "standard_accuracy": accuracy(mean, clients)},
        "robust_accuracy": {"pgd": accuracy(mean / 2, clients)} if robust else {},
        "parameters": 1234,
        "seed": 0,
    }
    write_sealed(folder / "summary.json", whole | summary)
    held = [
        {"client": at, "domain": ("pen", NASTY)[2 * at // clients], "kind": "ST", "train": 9, "labels": [4, 5, 0]}
        for at in range(clients)
    ]
    (folder / "clients.json").write_text(json.dumps(held))
    (folder / "config.toml").write_text(f"# {NASTY}\n")
    (folder / "pictures" / "some samples.png").write_bytes(image_grid_png([np.zeros((2, 3, 3, 1), np.uint8)], ["pen"]))
    return folder


class Reader(HTMLParser):
    """Texts, tags and attribute values; open tags that stay open are a mistake."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.values: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [value or "" for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_report_shows_the_run(tmp_path: Path) -> None:
    out = write_report(make_run(tmp_path / "run"))
    assert out == tmp_path / "run" / "report.html"
    reader = Reader(out.read_text("utf-8"))
    for text in ("70.0%", "68.0%", "1 min 15 s", "20 kB", "40 kB", "20 G", "mean 70%", "up 20 kB", "refused 20"):
        assert text in reader.texts, text
    titles = ("Accuracy over rounds", "Loss", "Spread", "Training images by client and class", "some samples")
    assert all(title in reader.texts for title in titles)
    assert "Slots" not in reader.texts
    assert "Not a number in 1 of 20 rounds." in reader.texts
    assert "pen" in reader.texts  # the row of a contact sheet


def test_report_escapes_everything_and_fetches_nothing(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run")).read_text("utf-8")
    reader = Reader(page)
    assert reader.tags.count("script") == 1 and NASTY in reader.texts  # the page's own, by its hash
    script = page.split("<script>")[1].split("</script>")[0]
    known = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{known}'" in page and "http-equiv" in page.split(known)[0]
    assert not {"link", "iframe", "object"} & set(reader.tags)
    assert not [value for value in reader.values if "//" in value and not value.startswith("data:image/png;base64,")]
    assert "@import" not in page and "url(" not in page


def test_every_coordinate_is_a_number_inside_the_plot(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run")).read_text("utf-8")
    assert not re.search(r"\bnan\b|\binf\b", page.split("<main>")[1])
    places = [float(found) for found in re.findall(r' (?:[cxy][xy12]?)="(-?[\d.]+)%"', page)]
    assert places and min(places) >= 0 and max(places) <= 100
    curves = re.findall(r'class="curve[^"]*" d="M([\d .-]+)"', page)
    assert curves and all(0 <= float(v) <= 1000 for curve in curves for v in curve.split())


def test_drift_and_the_clients_that_were_up_weighted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=300)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for at, row in enumerate(rows):
        row |= {"drift": 2.0 + at, "variance": 4.0, "up_weighted": [3] if at < 200 else []}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(folder).read_text("utf-8")
    reader = Reader(page)
    for text in ("Client drift", "mean 301", "Variance of the updates", "Up-weighted clients"):
        assert text in reader.texts, text
    assert any("client 3, in 200 of 300 rounds." in text for text in reader.texts)
    picture = page[page.index("Up-weighted clients by round") :]
    cells = re.search(r'fill-opacity="1.00" d="([^"]+)"', picture)
    assert cells and cells[1].count("M") == 40  # 300 rounds in 120 columns: those with three of the 200
    assert "Drift and slack" not in write_report(make_run(tmp_path / "plain")).read_text("utf-8")


def test_size_of_a_usual_run(tmp_path: Path) -> None:
    assert write_report(make_run(tmp_path / "run", rounds=300, clients=50)).stat().st_size < 400_000


def test_a_bare_summary_is_enough(tmp_path: Path) -> None:
    write_sealed(tmp_path / "summary.json", {"standard_accuracy": None, "best": None})
    assert "<h1>" in write_report(tmp_path).read_text("utf-8")


def test_thinning_keeps_ends_and_peaks() -> None:
    points = [(float(at), 0.0) for at in range(5000)]
    points[1234] = (1234.0, 9.0)
    points[4321] = (4321.0, -9.0)
    kept = thin(points)
    assert len(kept) <= 400 and kept == sorted(kept)
    assert {points[0], points[-1], points[1234], points[4321]} <= set(kept)


def test_labels_of_close_curves_do_not_overlap() -> None:
    drawing = lines([Series(label=f"run {at}", points=[(1, 0.1), (9, 0.5 + at / 1e6)]) for at in range(30)], title="t")
    tops = sorted(float(top) for top in re.findall(r'<text x="100%" y="([\d.]+)" dx="9"', drawing))
    assert len(tops) == 30 and min(np.diff(tops)) >= 14.9 and tops[0] >= 0


def test_heat_map_of_many_clients_averages_within_domains() -> None:
    drawing = heat({"a": np.full((900, 3), 2.0), "b": np.zeros((100, 3))}, title="t")
    assert "a (900)" in drawing and "b (100)" in drawing
    cells = [path.count("M") for path in re.findall(r'fill-opacity="1.00" d="([^"]+)"', drawing)]
    assert cells == [3 * 129]  # 900 clients in rows of 7; the empty domain draws nothing


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (999.9, "1 kB"), (1234, "1.23 kB"), (2e12, "2 TB")])
def test_units(value: float, text: str) -> None:
    assert si(value, "B") == text


def test_torn_last_line_is_ignored_and_repeated_rounds_count_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 20, "bytes_up": 1000}) + '\n{"round": 21, "lo')
    assert "up 20 kB" in Reader(write_report(folder).read_text("utf-8")).texts


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("summary.json", None, "summary.json does not exist. Give the folder of a finished run"),
        ("summary.json", '{"name": ', "summary.json is not valid JSON"),
        ("summary.json", "[]", "summary.json holds a JSON list, not a dict"),
        ("clients.json", "{", "clients.json is not valid JSON"),
        ("metrics.jsonl", '{"round": 1}\n{"rou\n{"round": 3}\n', "metrics.jsonl, line 2 is not a JSON object"),
    ],
)
def test_bad_input_names_file_and_remedy(tmp_path: Path, name: str, text: str | None, told: str) -> None:
    folder = make_run(tmp_path / "run")
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(HardyError, match=re.escape(told)):
        write_report(folder)


def test_comparison_joins_seeds(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", mean=0.6, robust=False, seconds=10.0, bytes_up=1)
    for seed, mean in enumerate((0.7, 0.8, 0.9)):
        make_run(tmp_path / "many" / f"seed-{seed}", mean=mean, seconds=20.0, seed=seed)
    head, first, second, *_ = str(compare([one, tmp_path / "many"])).splitlines()
    assert " ".join(head.split()) == "run method rounds mean % worst client % pgd % seconds MB up GMACs"
    assert re.split(r"\s{2,}", first) == ["one", "fedavg", "20", "60.0", "58.0", "–", "10.0", "0.00 *", "20.00"]
    assert re.split(r"\s{2,}", second)[:5] == ["many (3 seeds)", "fedavg", "20", "80.0 ± 10.0", "78.0 ± 10.0"]
    assert first.index("60.0") + 4 == head.index("mean %") + 6  # numbers end below their head

    page = write_comparison([one, tmp_path / "many"], tmp_path / "out.html").read_text("utf-8")
    reader = Reader(page)
    assert {"80.0 ± 10.0", "one 60%", "many 80%", "Over bytes sent up"} <= set(reader.texts)
    assert page.count('class="band') == 2


def test_comparison_tells_equal_names_apart_and_needs_a_folder(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / parent / "run") for parent in "ab"]
    assert [row.name for row in compare(folders).rows] == [str(folder) for folder in folders]
    with pytest.raises(HardyError, match="at least one"):
        compare([])


def test_seeds_summary(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"seed-{at}", mean=mean) for at, mean in enumerate((0.6, 0.8))]
    found = seeds_summary(folders)
    assert found["runs"] == 2
    assert found["standard_accuracy"]["mean"] == pytest.approx(0.7)
    assert found["standard_accuracy"]["mean_std"] == pytest.approx(0.2 / np.sqrt(2))
    assert found["standard_accuracy"]["worst_client"] == pytest.approx(0.68)
    assert found["standard_accuracy"]["by_domain"]["pen"] == pytest.approx(0.72)
    assert found["robust_accuracy"]["pgd"]["by_domain_std"]["pen"] == pytest.approx(0.1 / np.sqrt(2))
    assert seeds_summary(folders[:1])["standard_accuracy"]["mean_std"] == 0


def test_contact_sheet_is_a_png_of_doubled_images() -> None:
    grey, colour = np.full((3, 2, 4, 1), 7, np.uint8), np.arange(24, dtype=np.uint8).reshape(1, 2, 4, 3)
    png = image_grid_png([grey, colour], ["grün", "b"])
    assert row_labels(png) == ["grün", "b"] and row_labels(b"\x89PNG") == []
    chunks, at = {}, 8
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        chunks[kind] = png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + chunks[kind])
        at += 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    assert (width, height) == (3 * 8 + 2 * 2, 2 * 4 + 2)
    pixels = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 4 * width)
    assert not pixels[:, 0].any()
    sheet = pixels[:, 1:].reshape(height, width, 4)
    assert (sheet[:4, :8] == [7, 7, 7, 255]).all() and not sheet[4:6].any() and not sheet[:, 8:10].any()
    assert (sheet[6:, :8, :3] == colour[0].repeat(2, 0).repeat(2, 1)).all() and not sheet[6:, 8:].any()


def test_tensorboard_gets_every_scalar_or_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, written = make_run(tmp_path / "run"), {}

    class Writer:
        def __init__(self, out: str) -> None:
            assert Path(out) == folder / "tensorboard"

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written[name, step] = value

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    rows = [flat_row(line) for line in read_run(folder).rounds]
    write_tensorboard(folder, rows)
    assert written["standard_accuracy/by_domain/pen", 20] == pytest.approx(0.72)
    assert written["loss", 1] == 2 and ("loss", 2) not in written and ("round", 1) not in written

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(HardyError, match=r"pip install 'hardy-fl\[tensorboard\]'"):
        write_tensorboard(folder, rows)


def test_sections_are_linked_and_none_is_empty(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run")).read_text("utf-8")
    headings = re.findall(r'<h2 id="([^"]+)">', page)
    assert headings == re.findall(r'<a href="#([^"]+)">', page) and len(set(headings)) == len(headings) > 3
    for part in page.split("<h2 id=")[1:]:
        assert re.search("<figure|<table|<p class|<details", part)


def test_rows_of_a_sheet_come_back_with_words_under_each_image(tmp_path: Path) -> None:
    rows = [np.full((3, 4, 5, 3), 80 * at, np.uint8) for at in range(2)]
    sheet = image_grid_png(rows, ["images, seen as cat, dog, emu", "attacked, seen as dog, dog, cat"])
    found = picture_rows(sheet)
    assert [column for _, column in found] == [12, 12]  # twice five pixels and a gap
    assert all(struct.unpack(">II", png[16:24]) == (34, 8) for png, _ in found)
    folder = make_run(tmp_path / "run")
    (folder / "pictures" / "attack pgd, client 3.png").write_bytes(sheet)
    page = write_report(folder).read_text("utf-8")
    assert '<figure data-client="3">' in page and "max-width:36px" in page
    assert [re.findall(r"<span title=[^>]*>(\w+)</span>", row) for row in re.findall(r'class="under".*?</div>', page)][
        :2
    ] == [
        ["cat", "dog", "emu"],
        ["dog", "dog", "cat"],
    ]


def test_axes_start_where_they_should() -> None:
    late = lines([Series(label="mean", points=[(5.0, 0.4), (10.0, 0.6)])], title="t")
    assert re.findall(r'class="tick middle">(\d+)<', late) == ["1", "5", "10"]
    assert re.search(r'class="curve c0".*?d="M444 ', late)  # (5 − 1) / (10 − 1)
    slow = lines([Series(label="mean", points=[(40.0, 0.4), (80.0, 0.6)])], title="t", x_name="seconds", x_step=0.0)
    assert re.findall(r'class="tick middle">(\d+)<', slow)[0] == "0"


def test_the_table_of_accuracies_has_standard_errors(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    summary["standard_accuracy"] |= {"mean": 0.5, "standard_error": 0.0123}
    write_sealed(folder / "summary.json", {key: value for key, value in summary.items() if key != "sha256"})
    page = write_report(folder).read_text("utf-8")
    assert "50.0% ± 1.2" in page and "±: standard error over test images." in page


def test_a_run_that_still_trains_has_a_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").unlink()
    page = write_report(folder, summary).read_text("utf-8")
    assert "Still training: round 20" in page and "Accuracy over rounds" in page


def test_the_report_is_there_after_the_first_round(tmp_path: Path) -> None:
    seen: list[str] = []

    def look(run: Any, line: dict[str, Any]) -> None:
        path = tmp_path / "run" / "report.html"
        seen.append(path.read_text("utf-8") if path.exists() else "")

    hardy.fit("demo", {"data.limit": 20}, rounds=3, out=tmp_path / "run", quiet=True, callbacks=[look])
    assert seen[0] == "" and "Still training: round 1" in seen[1]
    assert "Still training" not in (tmp_path / "run" / "report.html").read_text("utf-8")
