"""Every published experiment, and every row of every grid, can be read as it stands."""

import re
import tomllib
from pathlib import Path

import pytest

import hardy
from hardy.robustness.threats import parse

FOLDER = Path(__file__).parents[1] / "experiments"
FILES = sorted(FOLDER.rglob("*.toml"))
GRIDS = [path for path in FILES if path.stem.startswith("grid")]


def test_there_are_experiments():
    assert FILES and GRIDS


@pytest.mark.parametrize("path", [p for p in FILES if p not in GRIDS], ids=lambda p: str(p.relative_to(FOLDER)))
def test_an_experiment_is_read(path):
    assert hardy.read(str(path)).rounds > 0


@pytest.mark.parametrize("path", GRIDS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_rows_of_a_grid_are_read_and_differ(path):
    grid = tomllib.loads(path.read_text())
    read = [hardy.read(str(path.parent / grid["experiment"]), row).to_toml() for row in grid["rows"].values()]
    assert len(set(read)) == len(read)
    for how in grid.get("again", {}).values():
        assert any(re.search(how["rows"], row) for row in grid["rows"]) and all(map(parse, how["threats"]))
