"""The generated pages: every key of an experiment and every part, with types, defaults and the docs beside the code.

The doc of a field is the string literal under it, so it is read from the source.
"""

import dataclasses
import inspect
import math
import types
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hardy.attacks.threats import PRESETS
from hardy.config import Experiment
from hardy.config.documentation import GIVEN, argument_docs, description
from hardy.registry import KINDS, PARTS, name_of

WORDS = {int: "integer", float: "number", str: "word", bool: "true or false", dict: "table", types.NoneType: "absent"}
ORDER = ["method", "norm", "objective", "optimiser", "budget", "aggregator", "stage", "server_update", "attack"]
"""kinds in the order a reader meets them; others follow"""


def write(folder: Path) -> None:
    """Writes the generated pages into a folder."""
    folder.mkdir(exist_ok=True)
    for name, text in (("configuration", configuration()), ("parts", parts())):
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def configuration() -> str:
    """A table of keys for the top level and for each table of an experiment."""
    hints = get_type_hints(Experiment)
    tables = [name for name in hints if dataclasses.is_dataclass(hints[name]) and hints[name] not in KINDS]
    blocks = [section("Top level", Experiment, skip=tables)]
    blocks += [section(f"`[{name}]`", hints[name]) for name in tables]
    return "\n\n".join(blocks) + "\n"


def section(head: str, table: type, skip: Iterable[str] = ()) -> str:
    words = paragraph(table.__doc__ or "").removeprefix(f"{head}: ")
    return f"### {head}\n\n{words[:1].upper() + words[1:]}\n\n{rows('key', table, set(skip))}"


def parts() -> str:
    """Every kind of part, and every part of it."""
    kinds = sorted(PARTS, key=lambda kind: (ORDER.index(kind) if kind in ORDER else len(ORDER), kind))
    blocks = []
    for kind in kinds:
        base = next((base for base, name in KINDS.items() if name == kind), None)
        blocks.append(f"## {title(kind)}" + (f"\n\n{paragraph(base.__doc__)}" if base else ""))
        for name, factory in sorted(PARTS[kind].items()):
            table = rows("option", factory, GIVEN.get(kind, frozenset()))
            blocks.append(f"### {kind} `{name}`\n\n{description(factory)}" + (f"\n\n{table}" if table else ""))
    threats = "\n".join(f"| `{name}` | {words} |" for name, words in PRESETS.items())
    blocks.append("## Threats\n\n`evaluation.threats` and `hardy evaluate --threats` take these names; see ")
    blocks[-1] += f"[runs](runs.md#evaluating-under-attack) for their options.\n\n| threat | |\n|---|---|\n{threats}"
    return "\n\n".join(blocks) + "\n"


def title(kind: str) -> str:
    """The heading of a kind of parts."""
    words = kind.replace("_", " ").capitalize()
    return f"{words[:-1]}ies" if words.endswith("y") else f"{words}s"


def rows(head: str, factory: Callable[..., Any], skip: frozenset[str]) -> str:
    """A table of a constructor's arguments; nothing if there are none. Without any docs there is no such column."""
    hints, docs = get_type_hints(factory), argument_docs(factory)
    lines = [[head, "type", "default", "meaning"], ["---"] * 4]
    for name, argument in inspect.signature(factory).parameters.items():
        if name not in skip:
            shown = "needed" if argument.default is argument.empty else default(field_default(factory, argument))
            lines.append([f"`{name}`", type_words(hints[name]), shown, docs.get(name, "")])
    wide = 4 if any(line[3] for line in lines[2:]) else 3
    return "\n".join(f"| {' | '.join(map(cell, line[:wide]))} |" for line in lines) if len(lines) > 2 else ""


def field_default(factory: Callable[..., Any], argument: inspect.Parameter) -> Any:
    """The default of an argument; of a field with a factory, what the factory gives."""
    fields = {f.name: f for f in dataclasses.fields(factory)} if dataclasses.is_dataclass(factory) else {}
    made = fields[argument.name].default_factory if argument.name in fields else dataclasses.MISSING
    return argument.default if made is dataclasses.MISSING else made()


def type_words(hint: Any) -> str:
    """A type in a reader's words."""
    if hint in KINDS:
        return f"[{KINDS[hint].replace('_', ' ')}](parts.md#{title(KINDS[hint]).lower().replace(' ', '-')})"
    if hint in WORDS:
        return WORDS[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f'`"{value}"`' if isinstance(value, str) else f"`{value}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_words(kind) for kind in inner if kind is not types.NoneType))
    if origin is dict:
        return "table"
    if origin is not None and inner:
        each = dict.fromkeys(type_words(kind) for kind in inner if kind is not Ellipsis)
        return f"list of {' and '.join(word if ' of ' in word else plural(word) for word in each)}"
    if inspect.isclass(hint) and issubclass(hint, Enum):
        return ", ".join(f'`"{member.value}"`' for member in hint)
    return "table" if dataclasses.is_dataclass(hint) else getattr(hint, "__name__", str(hint))


def plural(words: str) -> str:
    return " or ".join(f"{word}s" for word in words.split(" or "))


def default(value: Any) -> str:
    """A default as TOML would have it."""
    if value is None:
        return "absent"
    if dataclasses.is_dataclass(value):
        changed = [f for f in dataclasses.fields(value) if getattr(value, f.name) != f.default]
        if not changed:
            return f"`{name_of(type(value))}`"
        options = ", ".join(f"{f.name} = {toml(getattr(value, f.name))}" for f in changed)
        return f'`{{ name = "{name_of(type(value))}", {options} }}`'
    return f"`{toml(value)}`"


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return f'"{value.value}"'
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, float):
        levels = value * 255
        return f"{levels:g}/255" if 0 < levels < 255 and math.isclose(levels, round(levels)) else f"{value:g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    return name_of(type(value)) if dataclasses.is_dataclass(value) else str(value)


def paragraph(text: str | None) -> str:
    """A docstring as paragraphs of one line each."""
    blocks = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(" ".join(block.split()) for block in blocks)


def cell(text: str) -> str:
    return text.replace("\n\n", " ").replace("|", "\\|")
