"""What README and documentation show works: Python runs, sessions print what they say, TOML is read.

The Python blocks of a page are one script, run in an empty folder. A block that cannot run says so in a comment on the
line before it, `<!-- not run: why -->`. A block inside a comment runs too: it prepares what the page takes as given.
"""

import doctest
import re
import runpy
from pathlib import Path

import pytest

from hardy import config
from hardy.registry import PARTS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/methods").glob("*.md"))]
BLOCK = re.compile(r"(<!-- not run: [^\n]+ -->\n)?^```(python|pycon|toml)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of a page that must work; lines stand where they stand in the page."""
    text, found = page.read_text("utf-8"), []
    for match in BLOCK.finditer(text):
        skipped, written, code = match.groups()
        if written == language and not skipped:
            found.append("\n" * text.count("\n", 0, match.start(3)) + code)
    return found


def having(*languages: str) -> list:
    return [pytest.param(page, id=page.stem) for page in PAGES if any(blocks(page, one) for one in languages)]


@pytest.fixture
def registry():
    """Parts that a page registers are gone afterwards."""
    before = {kind: dict(parts) for kind, parts in PARTS.items()}
    yield
    PARTS.clear()
    PARTS.update(before)


@pytest.mark.parametrize("page", having("python", "pycon"))
def test_python_runs(page, tmp_path, monkeypatch, registry, capsys):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / f"{page.stem}_page.py"
    lines = [""] * len(page.read_text("utf-8").splitlines())
    for block in blocks(page, "python"):
        for number, line in enumerate(block.splitlines()):
            lines[number] = line or lines[number]
    script.write_text("\n".join(lines), "utf-8")
    names = runpy.run_path(str(script), run_name="page")
    capsys.readouterr()
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for block in blocks(page, "pycon"):
        runner.run(doctest.DocTestParser().get_doctest(block, names, page.name, str(page), 0), clear_globs=False)
    assert not runner.failures, capsys.readouterr().out


@pytest.mark.parametrize("page", having("toml"))
def test_toml_is_an_experiment(page):
    for block in blocks(page, "toml"):
        config.parse(block, where=page.name)
