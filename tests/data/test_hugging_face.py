"""Data sets of Hugging Face: the library itself where it is installed, its absence, and a stand-in for the rest."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Picture

from hardy.data.sources import load_dataset
from hardy.errors import HardyError


class Image:
    """Stands in for the library's feature of that name."""


class ClassLabel:
    def __init__(self, names: list[str]) -> None:
        self.names = names


class Value: ...


class Rows:
    """Stands in for a split: columns by name, and what they are."""

    def __init__(self, features: dict[str, object], columns: dict[str, list[object]]) -> None:
        self.features, self.columns, self.column_names = features, columns, list(columns)

    def __getitem__(self, name: str) -> list[object]:
        return self.columns[name]


def scans(count: int) -> Rows:
    pixels = [Picture.fromarray(np.full((4, 4), 1000 * i, np.uint16)) for i in range(count)]
    features = {"scan": Image(), "finding": ClassLabel(["benign", "malignant"])}
    return Rows(features, {"scan": pixels, "finding": [i % 2 for i in range(count)]})


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """id -> what the hub has."""
    hub: dict[str, object] = {}

    def load(name: str, subset: str | None = None) -> object:
        if name not in hub:
            raise FileNotFoundError(f"Dataset '{name}' doesn't exist on the Hub\nor is private")
        return hub[name]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    return hub


def test_images_and_names_of_classes_by_their_features(library: dict[str, object]) -> None:
    library["clinic/scans"] = {"train": scans(6), "test": scans(2)}
    data = load_dataset("hf:clinic/scans")
    (domain,) = data.domains
    assert (data.name, data.shape, data.classes) == ("scans", (1, 4, 4), ("benign", "malignant"))
    assert domain.y_train.tolist() == [0, 1, 0, 1, 0, 1]
    np.testing.assert_allclose(domain.x_test[:, 0, 0, 0], [0, 1000 / 65535], rtol=1e-6)
    assert load_dataset("hf:clinic/scans", size=2).shape == (1, 2, 2)
    with pytest.raises(HardyError, match=r"has no column 'label'; columns: scan, finding"):
        load_dataset("hf:clinic/scans", label="label")


def test_columns_of_numbers_are_vectors(library: dict[str, object]) -> None:
    columns = {"age": [20, 30, 40], "id": ["a", "b", "c"], "label": ["ill", "well", "ill"]}
    library["t"] = {"train": Rows(dict.fromkeys(columns, Value()), columns)}
    with pytest.raises(HardyError, match=r"holds 'a', which is no number .*drop = \[\"id\"\]"):
        load_dataset("hf:t")
    data = load_dataset("hf:t", drop=["id"], holdout=0)
    assert data.classes == ("ill", "well") and sorted(data.domains[0].x_train[:, 0].tolist()) == [20, 30, 40]
    library["t"] = {"train": Rows({"age": Value()}, {"age": [1]})}
    with pytest.raises(HardyError, match=r'has no column label, labels, .*label = "\.\.\."\. Columns: age'):
        load_dataset("hf:t")


def test_an_id_that_is_not_there(library: dict[str, object]) -> None:
    with pytest.raises(HardyError, match=r"data set a/b cannot be loaded \(Dataset 'a/b' doesn't exist on the Hub\)\."):
        load_dataset("hf:a/b")


def test_without_the_library_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(HardyError, match=r"a/b needs datasets, which is missing: pip install 'hardy-fl\[hf\]'"):
        load_dataset("hf:a/b")


@pytest.mark.filterwarnings("default")  # the library's own
def test_the_library_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set saved by save_to_disk, found by its folder alone."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="needs hardy-fl[hf]")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    pixels = [np.full((4, 4, 3), 10 * i, np.uint8) for i in range(6)]
    made = datasets.Dataset.from_dict({"image": pixels, "label": [0, 1] * 3}, features=features)
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "pets")
    data = load_dataset(str(tmp_path / "pets"))
    assert (data.name, data.shape, data.classes) == ("pets", (3, 4, 4), ("cat", "dog"))
    assert data.domains[0].x_train[:, 0, 0, 0].tolist() == [0, 10, 20, 30, 40, 50]
    made.save_to_disk(tmp_path / "one")
    assert len(load_dataset(str(tmp_path / "one")).domains[0].y_test) == 2
