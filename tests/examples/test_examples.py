"""The examples run, each is under 40 lines, and none touches the package."""

import re
import runpy
from pathlib import Path

import pytest

import hardy
from hardy.cli.parser import parse_arguments

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


def test_the_compose_file_says_what_the_command_line_takes(tmp_path):
    """Docker is not there to start it: its commands are parsed, and its folders are those that are written."""
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the flower extra")
    text = (FOLDER / "flower" / "compose.yaml").read_text()
    services = yaml.safe_load(text)["services"]
    for name, service in services.items():
        options = parse_arguments(service["command"])
        where = dict(reversed(volume.split(":")[:2]) for volume in service["volumes"])
        assert where["/keys"] == "./keys/" + name.replace("site", "node")
        assert str(options.state) in where and (name == "server") == ("./app" in where.values())
    assert set(services) == {"server", "site-0", "site-1"}
    for words in re.findall(r"(?:#   h|server hardy) (deploy .*)", text):
        parse_arguments(words.replace("$PWD", "/").split())
    assert hardy.read(str(FOLDER / "flower" / "experiment.toml")).network.clients == 2
