"""Files, functions and parts that a page names exist: documentation does not rot in silence."""

import importlib
import re
import tomllib
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


TABLE = re.compile(r"^\| (\w[\w ]*?) \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", re.MULTILINE)
KINDS_OF_TABLES = {
    "attack": ("attack", "byzantine_attack"),
    "rule": ("aggregator", "stage"),
    "server update": ("server_update",),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_of_parts_name_parts(page):
    """The first column of a table that lists parts of a kind."""
    missing = []
    for table in TABLE.finditer(page.read_text("utf-8")):
        known = {name for kind in KINDS_OF_TABLES.get(table[1], (table[1],)) for name in PARTS.get(kind, ())}
        firsts = [re.match(r"\| (`\w+`(?:, `\w+`)*)", row) for row in table[2].splitlines()] if known else []
        missing += [name for first in firsts if first for name in re.findall(r"\w+", first[1]) if name not in known]
    assert not missing


INLINE = re.compile(r"```.*?```|`([^`]+=[^`]+)`", re.DOTALL)
ANY_PART = {name for parts in PARTS.values() for name in parts}


def names_of_parts(value) -> list[str]:
    """Every `name` of a table, and every word in a list of stages or server updates, however deep."""
    if isinstance(value, list):
        return [name for inner in value for name in names_of_parts(inner)]
    if not isinstance(value, dict):
        return []
    found = [value["name"]] if "name" in value else []
    for key, inner in value.items():
        found += [word for word in inner if isinstance(word, str)] if key in ("pre", "post", "links") else []
        found += [inner] if key in PARTS and isinstance(inner, str) else []
        found += names_of_parts(inner)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_inside_a_line_name_parts(page):
    missing, text = [], page.read_text("utf-8")
    own = {name.lower() for name in re.findall(r"^class (\w+)", text, re.MULTILINE)}  # that the page defines
    for match in INLINE.finditer(text):
        try:
            settings = tomllib.loads(" ".join((match[1] or "").split()))
        except tomllib.TOMLDecodeError:
            continue  # Python, or part of a command
        missing += [n for n in names_of_parts(settings) if n not in ANY_PART | own | set(ENGINE_NAMES) and ":" not in n]
    assert not missing
