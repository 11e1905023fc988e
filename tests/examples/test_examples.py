"""The examples run, each is under 40 lines, and none touches the package."""

import runpy
from pathlib import Path

import pytest

import hardy

FOLDER = Path(__file__).parents[2] / "examples"
FILES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_example_runs(path, monkeypatch, capsys):
    assert len(path.read_text().splitlines()) < 40
    read = hardy.read

    def shorter(name, overrides=()):
        chosen = [o for o in overrides if not o.startswith("rounds=")]
        return read(name, [*chosen, "rounds=1", "data.limit=40", "engine.device=cpu"])

    monkeypatch.setattr(hardy, "read", shorter)
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_every_example_is_listed():
    listed = (FOLDER / "README.md").read_text()
    assert FILES and all(f"({path.name})" in listed for path in FILES)
