"""Tables as TOML."""

import dataclasses
import tomllib
from collections.abc import Iterator
from typing import Any

from hardy.config.values import Table
from hardy.registry import KINDS, stored_name


def to_table(value: Any) -> Any:
    """A tree of dataclasses as tables; a part among them gets its name."""
    if isinstance(value, tuple):
        return tuple(to_table(one) for one in value)
    if not dataclasses.is_dataclass(value):
        return value
    named = {"name": stored_name(type(value))} if isinstance(value, tuple(KINDS)) else {}
    return named | {f.name: to_table(getattr(value, f.name)) for f in dataclasses.fields(value)}


def dump(table: Table, path: str = "") -> str:
    """TOML of nested tables; None means absent."""
    lines = [f"{_key(k)} = {_value(v)}" for k, v in table.items() if v is not None and not isinstance(v, dict)]
    if path and (lines or not table):
        lines.insert(0, f"\n[{path}]")
    for key, value in table.items():
        if isinstance(value, dict):
            lines.append(dump(value, f"{path}.{_key(key)}".lstrip(".")))
    return "\n".join(lines)


def _key(key: str) -> str:
    return key if key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key) else _value(key)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(v) for v in value)}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(k)} = {_value(v)}' for k, v in value.items() if v is not None)} }}"
    escaped = "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in str(value).replace("\\", "\\\\"))
    return '"' + escaped.replace('"', '\\"') + '"'


def differing_keys(was: str, now: str) -> list[str]:
    """In words, the keys in which two experiments in TOML differ. Nothing they name is looked up or imported."""
    old, new = (dict(_flat(tomllib.loads(text))) for text in (was, now))
    return [
        f"{key} is {new.get(key, 'absent')!r}, not {old.get(key, 'absent')!r}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and not key.startswith(("versions.", "code."))
    ]


def _flat(table: Table, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
