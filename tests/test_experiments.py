"""Every published experiment, and every row of every grid, can be read as it stands."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hardy
from hardy.attacks.threats import parse_threat as parse

FOLDER = Path(__file__).parents[1] / "experiments"
FILES = sorted(FOLDER.rglob("*.toml"))
GRIDS = [path for path in FILES if path.stem.startswith("grid")]
spec = importlib.util.spec_from_file_location("grid", FOLDER / "grid.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


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
    names = [name for name, _ in tool.every_row(grid)]
    for how in grid.get("again", {}).values():
        assert any(re.search(how["rows"], name) for name in names) and all(map(parse, how["threats"]))


def test_a_grid_runs_every_seed_fine_tunes_and_goes_on(tmp_path):
    demo = Path(hardy.__file__).parent / "bundled" / "demo.toml"
    again = '[again]\n"tuned" = { rows = "^a, seed 1", fine_tune = { steps = 1 }, threats = ["fgsm"] }\n'
    (tmp_path / "grid.toml").write_text(f'experiment = "{demo.as_posix()}"\nseeds = [0, 1]\n[rows]\n"a" = []\n{again}')
    out = tmp_path / "out.json"
    command = [sys.executable, FOLDER / "grid.py", tmp_path / "grid.toml", "--out", out]
    tiny = ["rounds=1", "evaluation.every=1", "model.width=0.25", "data.limit=60", "engine.name=sequential"]
    for only in ("seed 1", ""):
        shown = subprocess.run([*command, "--only", only, *tiny], capture_output=True, text=True, check=True).stdout
        assert shown.count(" in ") == 1, shown
    found = json.loads(out.read_text())
    assert [found[f"a, seed {n}"]["seed"] for n in (0, 1)] == [0, 1]
    assert "fgsm" in found["a, seed 1"]["again"]["tuned"]["robust_accuracy"] and not found["a, seed 0"]["again"]


def test_a_grid_goes_on_in_the_middle_of_a_row_and_keeps_its_networks(tmp_path):
    demo = Path(hardy.__file__).parent / "bundled" / "demo.toml"
    tiny = ["rounds=3", "evaluation.every=1", "model.width=0.25", "data.limit=60", "checkpoint.every=1"]
    whole = hardy.fit(hardy.read(str(demo), tiny), out=tmp_path / "a_b")
    shutil.rmtree(tmp_path / "a_b" / "checkpoint" / "round-000003")  # as if it had been killed after round 2
    name, found = tool.run_row(demo, None, tmp_path, {}, ("a, b", tiny))
    assert name == "a, b" and found["standard_accuracy"] == whole.summary()["standard_accuracy"]
    assert len(found["curve"]) == 3 and hardy.load(tmp_path / "a_b").state.round == 3
    _, found = tool.run_row(demo, None, tmp_path, {}, ("a, b", [*tiny, "seed=5"]))
    assert "other settings" in found["error"]
