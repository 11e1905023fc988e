"""Files, functions and parts that a page names exist: documentation does not rot in silence."""

import importlib
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from hardy.engines import EngineChoice
from hardy.registry import PARTS
from hardy.runs.run import Run

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("docs/methods/*.md")]
)
CODE = re.compile(r"```.*?```|`([^`\n]+)`", re.DOTALL)
A_FILE = re.compile(r"(?:[\w-]+/)+[\w-]+\.(?:py|toml|md|txt)")
A_NAME = re.compile(r"hardy(?:\.\w+)+(?=$|\()")

ENGINE_NAMES = get_args(get_type_hints(EngineChoice)["name"])


def words(page: Path) -> list[str]:
    """What a page sets as code inside a line."""
    return [match[1] for match in CODE.finditer(page.read_text("utf-8")) if match[1]]


def resolves(name: str) -> bool:
    """Whether a dotted name leads to a module, or to something in one."""
    *path, last = name.split(".")
    try:
        return hasattr(importlib.import_module(".".join(path)), last)
    except ModuleNotFoundError:
        return resolves(".".join(path)) if len(path) > 1 else False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_exists(page):
    missing = []
    for word in words(page):
        if A_FILE.fullmatch(word) and not any(
            (root / word).exists() for root in (ROOT, ROOT / "src/hardy", page.parent)
        ):
            missing.append(word)
        if (name := A_NAME.match(word)) and not resolves(name[0]):
            missing.append(word)
        if (of_a_run := re.match(r"[Rr]un\.(\w+)", word)) and not hasattr(Run, of_a_run[1]):
            missing.append(word)
        if named := re.search(r'\bname = "(\w+)"', word):
            missing += [word] * (
                named[1] not in ENGINE_NAMES and not any(named[1] in parts for parts in PARTS.values())
            )
    assert not missing


def test_every_paper_has_a_page():
    text = "".join(page.read_text("utf-8") for page in PAGES)
    assert not [name for name in PARTS["method"] if f"`{name}`" not in text and f'"{name}"' not in text]
