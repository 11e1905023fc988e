"""Own files by their path: what each kind becomes, and what is said about bad ones."""

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hardy.data.sources import load_dataset
from hardy.errors import HardyError
from hospital import CLASSES, scans, write_sites

X = np.arange(10 * 6, dtype=np.uint8).reshape(10, 3, 2)
Y = np.arange(10) % 2


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARDY_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def table(path: str, rows: list[list[object]], header: str = "age,weight,label") -> Path:
    with Path(path).open("w", newline="") as file:
        csv.writer(file).writerows([header.split(","), *rows])
    return Path(path)


ROWS: list[list[object]] = [[20 + i, 1.5 * i, ("ill", "well")[i % 2]] for i in range(10)]


@pytest.mark.parametrize(
    "names",
    [("x_train", "y_train", "x_test", "y_test"), ("train_images", "train_labels", "test_images", "test_labels")],
)
def test_an_npz_of_four_arrays(names: tuple[str, ...]) -> None:
    np.savez("x.npz", **dict(zip(names, (X, Y[:, None], X[:4], Y[:4]), strict=True)), val_images=X)
    data = load_dataset("x.npz")
    assert (data.name, data.shape, data.classes, data.natural) == ("x", (1, 3, 2), ("0", "1"), False)
    np.testing.assert_array_equal(data.domains[0].x_train[..., 0], X)
    assert data.domains[0].y_test.tolist() == [0, 1, 0, 1]


def test_an_npz_of_two_arrays_is_split_and_one_without_test_rows_has_none() -> None:
    np.savez("x.npz", x=X, y=Y, classes=["no", "yes"])
    data = load_dataset("x.npz")
    assert data.classes == ("no", "yes") and np.bincount(data.domains[0].y_test).tolist() == [1, 1]
    np.savez("x.npz", x_train=X, y_train=Y)
    assert len(load_dataset("x.npz").domains[0].y_test) == 0
    np.savez("x.npz", x_train=X, y_train=Y, x_test=X)
    with pytest.raises(HardyError, match=r"x\.npz has one of x_test and y_test; give both or none"):
        load_dataset("x.npz")
    np.savez("x.npz", pixels=X, y=Y)
    with pytest.raises(HardyError, match=r"x\.npz has the arrays y; name them as one of: x_train, y_train"):
        load_dataset("x.npz")


def test_a_path_is_looked_for_here_and_in_the_data_folder(tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    np.savez("moved/x.npz", x=X, y=Y)
    assert load_dataset("x.npz", tmp_path / "moved").name == "x"
    assert load_dataset("/long/ago/x.npz", tmp_path / "moved").name == "x"
    with pytest.raises(HardyError, match=r"no file or folder 'x\.npz' here\. If it moved, .* --data FOLDER"):
        load_dataset("x.npz")
    with pytest.raises(HardyError, match=r"no file or folder 'y\.npz' here or in the data folder .*moved"):
        load_dataset("y.npz", tmp_path / "moved")
    Path("notes.txt").write_text("")
    with pytest.raises(HardyError, match=r"notes\.txt is no data that Hardy reads; give \.npz, \.csv, \.parquet"):
        load_dataset("./notes.txt")
    Path("empty").mkdir()
    with pytest.raises(HardyError, match=r"empty holds no data that Hardy reads: one file a site"):
        load_dataset("empty")
    with pytest.raises(HardyError, match=r"unknown option of moved/x\.npz 'class'\. Did you mean 'classes'"):
        load_dataset("moved/x.npz", **{"class": 3})


def test_one_file_a_site(tmp_path: Path) -> None:
    write_sites(tmp_path / "sites", {"south": 6, "north": 10})
    data = load_dataset("sites")
    assert data.natural and data.classes == CLASSES and data.shape == (1, 16, 16)
    assert [(d.name, len(d.y_train), len(d.y_test)) for d in data.domains] == [("north", 10, 5), ("south", 6, 3)]
    raw, _ = scans(6)
    south = data.domains[1].x_train[..., 0]
    np.testing.assert_allclose(np.sort(south.ravel()), np.sort(raw.ravel()) / 65535, rtol=1e-6)

    x, y = scans(4, side=8)
    np.savez("sites/east.npz", x=x, y=y)
    with pytest.raises(HardyError, match=r"several shapes \(\[16, 16, 1\] in north, \[8, 8, 1\] in east\)"):
        load_dataset("sites")
    x, y = scans(4)
    np.savez("sites/east.npz", x=x, y=np.arange(4))
    with pytest.raises(HardyError, match="sites has words and numbers as labels"):
        load_dataset("sites")
    np.savez("sites/east.npz", x=x, y=y, classes=CLASSES)
    np.savez("sites/west.npz", x=x, y=y, classes=CLASSES[::-1])
    with pytest.raises(HardyError, match=r"west\.npz names other classes than the files before it"):
        load_dataset("sites")


def test_tables_by_site(tmp_path: Path) -> None:
    Path("sites").mkdir()
    table("sites/a.csv", ROWS)
    table("sites/b.csv", ROWS[:1])
    data = load_dataset("sites")
    assert [(d.name, len(d.y_train), len(d.y_test)) for d in data.domains] == [("a", 8, 2), ("b", 1, 0)]
    np.savez("sites/b.npz", x=np.zeros((2, 2)), y=["ill", "well"])
    with pytest.raises(HardyError, match="two files of the site b; keep one"):
        load_dataset("sites")


def test_a_table() -> None:
    table("t.csv", ROWS)
    data = load_dataset("t.csv", holdout=0)
    assert (data.shape, data.classes, data.bounded, data.natural) == ((2,), ("ill", "well"), False, False)
    pairs = {tuple(row) for row in data.domains[0].x_train.tolist()}
    assert pairs == {(20.0 + i, 1.5 * i) for i in range(10)}
    assert load_dataset("t.csv", value_range=(0.0, 30.0)).bounded


def test_columns_by_name() -> None:
    rows = [[i, "ab"[i % 2], i % 3 + 1, ("train", "test")[i > 5], 0.5 * i] for i in range(10)]
    table("t.csv", rows, "id,hospital,stage,split,dose")
    data = load_dataset("t.csv", label="stage", client="hospital", drop=["id"])
    assert data.natural and data.shape == (1,) and data.classes == ("1", "2", "3")
    a, b = data.domains
    assert (a.name, sorted(a.x_train[:, 0].tolist()), a.x_test[:, 0].tolist()) == ("a", [0, 1, 2], [3.0, 4.0])
    assert sorted(b.y_test.tolist()) == sorted([7 % 3, 9 % 3])


@pytest.mark.parametrize(
    ("rows", "header", "options", "message"),
    [
        (
            [[1, 2, 3]],
            "a,b,c",
            {},
            r'has no column label, class, target, y\. Name .*label = "\.\.\."\. Columns: a, b, c',
        ),
        (ROWS, "a,b,label", {"label": "lable"}, "unknown column of t.csv 'lable'. Did you mean 'label'"),
        ([[1, "", 0]], "a,b,label", {}, r"row 0 \(counted from 0\) holds nothing in column 'b'"),
        ([[1, 1, 0], [1, "f", 0]], "a,b,label", {}, r"row 1 .* holds 'f', which is no number.*drop = \[\"b\"\]"),
        ([[1, 1, 0], [1, "nan", 0]], "a,b,label", {}, r"t\.csv, t: training row \d .* holds nan"),
        (
            [[1, 2], [1, 2, 3]],
            "a,label",
            {},
            r"t\.csv cannot be read .*\(row 1 .* has 3 cells, the header 2",
        ),
        ([], "a,label", {}, "it has no rows below its header"),
        ([[1, 1]], "a,a", {}, "two columns have one name"),
        ([[1]], "label", {}, "has no column of features besides 'label'"),
        ([[1, 2, "dev"]], "a,label,split", {}, r"holds 'dev' in column 'split'; it must be train or test"),
    ],
)
def test_bad_tables(rows: list[list[object]], header: str, options: dict[str, object], message: str) -> None:
    table("t.csv", rows, header)
    with pytest.raises(HardyError, match=message):
        load_dataset("t.csv", **options)


def test_parquet_is_read_like_csv() -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs hardy-fl[parquet]")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = list(zip(*ROWS, strict=True))
    parquet.write_table(arrow.table({"age": columns[0], "weight": columns[1], "label": columns[2]}), "t.parquet")
    table("t.csv", ROWS)
    (ours,), (theirs,) = (load_dataset(name).domains for name in ("t.parquet", "t.csv"))
    np.testing.assert_array_equal(ours.x_train, theirs.x_train)
    np.testing.assert_array_equal(ours.y_train, theirs.y_train)
    parquet.write_table(arrow.table({"a": [1.0, None], "label": [0, 1]}), "t.parquet")
    with pytest.raises(HardyError, match=r"training row \d \(counted from 0\) holds nan"):
        load_dataset("t.parquet")


def test_without_pyarrow_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    Path("t.parquet").write_bytes(b"")
    with pytest.raises(HardyError, match=r"t\.parquet needs pyarrow, .*: pip install 'hardy-fl\[parquet\]'"):
        load_dataset("t.parquet")


def picture(path: str, value: int, mode: str = "L") -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4), value, np.uint16 if mode == "I;16" else np.uint8)).save(path)


def test_pictures_by_class_and_sixteen_bits() -> None:
    for i in range(5):
        picture(f"scans/benign/{i}.png", 1000 * i, "I;16")
        picture(f"scans/malignant/{i}.png", 40000 + i, "I;16")
    data = load_dataset("scans")
    (domain,) = data.domains
    assert (data.shape, data.classes, domain.name) == ((1, 4, 4), ("benign", "malignant"), "scans")
    assert np.bincount(domain.y_train).tolist() == [4, 4]
    values = np.concatenate([domain.x_train[:, 0, 0, 0], domain.x_test[:, 0, 0, 0]]) * 65535
    np.testing.assert_allclose(np.sort(values), [0, 1000, 2000, 3000, 4000, *range(40000, 40005)], atol=0.01)
    assert load_dataset("scans", size=2).shape == (1, 2, 2)
    picture("scans/benign/9.png", 9)
    with pytest.raises(HardyError, match=r"(uint8|uint16) pixels, but .*Bring all to one"):
        load_dataset("scans")
