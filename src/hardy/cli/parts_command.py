"""`hardy parts`: what a method can be made of."""

import inspect
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from textwrap import fill
from typing import Any

from hardy.cli.command import Command, import_option
from hardy.errors import HardyError, unknown

_WIDTH, _COLUMN = 110, 34
"""columns of a text, and of the names and defaults before it"""


def _declare(parser: ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="such as fedrbn, trimmed_mean or my_method.py:mine")
    import_option(parser)


def _parts(options: Any) -> None:
    from hardy.attacks.threats import PRESETS
    from hardy.config import PARTS

    if options.name is not None:
        print("\n\n".join(_part(options.name)))
        return
    for kind, parts in PARTS.items():
        print(f"{kind}")
        for name, factory in sorted(parts.items()):
            print(f"  {name:<20} {_first_words(factory)}")
    print("threat")
    for name, words in PRESETS.items():
        print(f"  {name:<20} {words}")


def _first_words(factory: Callable[..., Any]) -> str:
    from hardy.config.documentation import description

    return description(factory).partition("\n")[0]


def _part(name: str) -> list[str]:
    """What a part is and takes; of each, where several kinds have one of this name."""
    from hardy.attacks.threats import PRESETS
    from hardy.config import PARTS
    from hardy.config.documentation import description
    from hardy.user_code import named_by_user, reference, resolve, short

    if reference(name):
        made = resolve(named_by_user(name))
        if not callable(made):
            raise HardyError(f"{name} is {made!r}; a part is a function or a class.")
        words = _wrapped(description(made))
        return [short(name) + (f"\n\n{words}" if words else "") + _options(_kind(made), made)]
    found = [(kind, parts[name]) for kind, parts in PARTS.items() if name in parts]
    texts = [f"{kind} {name}\n\n{_wrapped(description(factory))}{_options(kind, factory)}" for kind, factory in found]
    texts += [f"threat {name}\n\n{PRESETS[name]}"] if name in PRESETS else []
    if not texts:
        names = {*PRESETS, *(known for parts in PARTS.values() for known in parts)}
        raise unknown("part", name, names, listed_by="hardy parts")
    return texts


def _kind(factory: Callable[..., Any]) -> str:
    """Of a part from a user's own code; empty: nobody knows, as with a function without a type."""
    from hardy.registry import KINDS

    return next((name for base, name in KINDS.items() if isinstance(factory, type) and issubclass(factory, base)), "")


def _wrapped(text: str) -> str:
    return "\n\n".join(fill(block, _WIDTH) for block in text.split("\n\n"))


def _options(kind: str, factory: Callable[..., Any]) -> str:
    """A line for each option: its default and what it means."""
    from hardy.config.documentation import GIVEN, argument_docs

    words, given = argument_docs(factory), GIVEN.get(kind, frozenset())
    shown = {name: _shown(one) for name, one in inspect.signature(factory).parameters.items() if name not in given}
    if not shown:
        return "\n\nno options"
    wide = min(_COLUMN, max(map(len, shown.values())))
    lines = []
    for name, option in shown.items():
        text = fill(words.get(name, ""), _WIDTH, initial_indent=" " * (wide + 4), subsequent_indent=" " * (wide + 4))
        head = f"  {option:<{wide}}"
        lines.append(head + text[len(head) :] if len(head) <= wide + 2 else f"{head}\n{text}")
    return "\n\noptions\n" + "\n".join(lines)


def _shown(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return f"{parameter.name} (needed)"
    return f"{parameter.name} = {_default(parameter.default)}"


def _default(value: Any) -> str:
    """A default as TOML has it; of a part, its name and the options that are not its own defaults."""
    from hardy.registry import name_of

    if value is None:
        return "absent"
    if is_dataclass(value) and not isinstance(value, type):
        changed = [f for f in fields(value) if getattr(value, f.name) != f.default]
        inner = ", ".join(f"{f.name} = {_default(getattr(value, f.name))}" for f in changed)
        return name_of(type(value)) + (f" ({inner})" if inner else "")
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_default, value))}]"
    if isinstance(value, float):
        levels = value * 255
        return f"{round(levels)}/255" if 0 < levels < 255 and abs(levels - round(levels)) < 1e-9 else f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


COMMAND = Command(
    name="parts",
    words="list the parts a method can be made of, or say what one of them takes",
    declare=_declare,
    call=_parts,
)
