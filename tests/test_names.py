"""Two things never have one name. That no builtin is hidden is ruff's to say (A001, A002)."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hardy

ROOT = Path(hardy.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
FOLDERS = {path.parent.name for path in FILES}
ONE_A_FOLDER = {"__init__", "base"}
"""what every folder may have: itself, and what its modules are built on"""


def public(name: str) -> bool:
    return not name.startswith("_")


def where(path: Path, node: ast.AST | None = None) -> str:
    return f"{path.relative_to(ROOT.parent)}{f':{node.lineno}' if node else ''}"


def twice(found: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that more than one place has."""
    places = defaultdict(list)
    for name, place in found:
        places[name].append(place)
    return {name: at for name, at in sorted(places.items()) if len(at) > 1}


def definitions() -> Iterator[tuple[str, str]]:
    """Public classes and functions of the modules, and other names for things, as in pgd = PGD. Constants are left
    out."""
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            else:
                continue
            yield from ((name, where(path, node)) for name in names if public(name) and not name.isupper())


def test_modules_have_names_of_their_own():
    modules = ((path.stem, where(path)) for path in FILES if path.stem not in ONE_A_FOLDER and public(path.stem))
    assert not twice(modules)
    assert not [where(path) for path in FILES if path.stem in FOLDERS]


def test_classes_functions_and_aliases_have_names_of_their_own():
    assert not twice(definitions())
