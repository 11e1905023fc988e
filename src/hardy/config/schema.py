"""A JSON schema (draft 2020-12) of experiments in TOML, made from the tables' dataclasses and the registry of parts.

It asks for what `construct` and `convert` ask for. What a part checks itself (limits, combinations) is not in it.
`#/$defs/KIND` is a part of a kind: a word, or a table with the options of one part.
"""

import dataclasses
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

from hardy.attacks.threats import PRESETS
from hardy.config.documentation import GIVEN, SHARED, argument_docs, description
from hardy.config.experiment import FROM_PYTHON, Experiment
from hardy.config.reading import REPLACEABLE
from hardy.config.values import Table, argument_hints
from hardy.core.method import Method
from hardy.data.sources import SOURCES
from hardy.registry import KINDS, PARTS, find
from hardy.user_code import plugins
from hardy.version import VERSION

_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string"}
_REFERENCE = {"$ref": "#/$defs/reference"}
_OWN = {
    "type": "string",
    "pattern": r"^([^:\n]+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):[^\W\d]\w*$",
    "description": "of your own: module:name or file.py:name",
}
_OPTIONS = {
    "type": "object",
    "not": {"required": ["name"]},
    "description": "without a name: the method's own part, with other values for some of its options",
}
_HIDDEN = {"x-taplo": {"hidden": True}}
"""allowed, but no editor proposes it"""
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
_WRITTEN = {
    "code": {
        "description": "written by a run: files of your own code and their hashes",
        "type": "object",
        "additionalProperties": _STRINGS,
        **_HIDDEN,
    },
    "versions": {"description": "written by a run: of Hardy, Python and packages", **_STRINGS, **_HIDDEN},
}
_ARMS = {
    "arms": {
        "description": "what hardy run runs beside the experiment: its name and the keys in which it differs",
        "type": "object",
        "additionalProperties": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    },
    "measure": {
        "description": "overrides of the experiment and its arms where hardy run runs them side by side",
        "type": "array",
        "items": {"type": "string"},
    },
    "look": {"description": "what to look at in the figures of the arms, one line", "type": "string"},
}
_THREATS = ("threats", "select")
"""keys of [evaluation] that hold threats"""


def experiment_schema() -> Table:
    """The schema of an experiment's file, and of a run folder's config.toml."""
    top = _table(Experiment)
    top["properties"] |= _ARMS | _WRITTEN
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Hardy {VERSION}: an experiment",
        **top,
        "$defs": {kind: _kind(kind) for kind in PARTS} | {"source": _source(), "threat": _threat(), "reference": _OWN},
    }


# Tables


def _table(factory: Callable[..., Any], name: str | None = None, kind: str = "") -> Table:
    """The arguments of a constructor as the keys of a table; of a part, with its name."""
    parameters = inspect.signature(factory).parameters
    hints = argument_hints(factory)
    docs = argument_docs(factory)
    left_out = GIVEN.get(kind, frozenset()) | ({"optimiser"} if kind == "method" else frozenset())
    taken = {key: one for key, one in parameters.items() if key not in left_out and one.kind is not one.VAR_KEYWORD}
    keys = {key: _key(key, hints.get(key, Any), one.default, docs.get(key)) for key, one in taken.items()}
    if kind == "method":
        parts = argument_hints(Method)
        replaced = {key: _key(key, parts[key], None, SHARED.get(key)) for key in REPLACEABLE if key not in taken}
        keys |= {key: {"anyOf": [value, _OPTIONS]} for key, value in replaced.items()}
    needed = [key for key, one in taken.items() if one.default is one.empty]
    if name is not None:
        keys = {"name": {"const": name}} | keys
        needed = needed if (kind, name) == ("optimiser", "sgd") else ["name", *needed]
    anything = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {
        "description": description(factory),
        "type": "object",
        "properties": keys,
        **({"required": needed} if needed else {}),
        **({} if anything else {"additionalProperties": False}),
    }


def _key(key: str, hint: Any, default: Any, words: str | None) -> Table:
    """The value of a key. A key that takes a word or any table is a part of the kind that it is named after."""
    if Table in get_args(hint):
        value: Table = {"$ref": f"#/$defs/{key}"}
    elif key in _THREATS and hint in (str | None, tuple[str, ...]):
        threat = {"$ref": "#/$defs/threat"}
        value = threat if key == "select" else {"type": "array", "items": threat}
    else:
        value = _value(hint)
    if hint in KINDS and isinstance(default, hint):
        value = {"anyOf": [value, _OPTIONS]}
    usual = _default(default)
    said = {"description": words} if words else {}
    return {**value, **said} | ({} if usual is None else {"default": usual})


def _default(value: Any) -> Any:
    """A default as JSON; None for one that has no short form."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        inner = [_default(one) for one in value]
        return None if None in inner else inner
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str) else None


# Values


def _value(hint: Any) -> Table:
    """What `convert` takes for a type."""
    if isinstance(hint, type):
        return _plain(hint)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        choices = [_value(one) for one in inner if one is not types.NoneType]
        return choices[0] if len(choices) == 1 else {"anyOf": choices}
    if origin is Sequence or (origin is tuple and inner[1:] == (Ellipsis,)):
        return {"type": "array", "items": _value(inner[0])}
    if origin is tuple:
        exact = {"minItems": len(inner), "maxItems": len(inner)}
        return {"type": "array", "prefixItems": [_value(one) for one in inner], **exact}
    if origin is dict:
        return {"type": "object", "additionalProperties": _value(inner[1])}
    return {}


def _plain(hint: type) -> Table:
    if hint in KINDS:
        return {"$ref": f"#/$defs/{KINDS[hint]}"}
    if dataclasses.is_dataclass(hint):
        return _table(hint)
    if issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    return {"type": _PLAIN[hint]} if hint in _PLAIN else {}


# Parts


def _kind(kind: str) -> Table:
    """A part of a kind: one of the registry or of an installed package, or one of the user's own."""
    parts = PARTS[kind] | {name: find(kind, name) for of, name in plugins() if of == kind}
    tables = {name: _table(factory, name, kind) for name, factory in sorted(parts.items())}
    words = {
        name: table["description"] for name, table in tables.items() if table.get("required", []) in ([], ["name"])
    }
    own = [_REFERENCE, *([{"const": FROM_PYTHON, **_HIDDEN}] if kind in ("model", "method") else [])]
    base = next((base for base, name in KINDS.items() if name == kind), None)
    return {
        **({"description": description(base)} if base else {}),
        "anyOf": [*([_words(words)] if words else []), *own, *tables.values(), _free(_REFERENCE)],
    }


def _source() -> Table:
    """Data: a source by name; any other word is the path of files, a Hugging Face id or code."""
    tables = []
    for name, source in SOURCES.items():
        _, *options = inspect.signature(source.read).parameters.values()
        hints = argument_hints(source.read)
        keys = {one.name: _key(one.name, hints[one.name], one.default, None) for one in options}
        about = {"description": description(source.read), "type": "object", "required": ["name"]}
        tables.append({**about, "properties": {"name": {"const": name}, **keys}, "additionalProperties": False})
    other = {"type": "string", "not": {"enum": list(SOURCES)}}
    names = _words({name: source.about for name, source in SOURCES.items()})
    return {"anyOf": [names, {"type": "string"}, *tables, _free(other)]}


def _threat() -> Table:
    return {"anyOf": [_words(PRESETS), {"type": "string"}]}


def _words(described: Mapping[str, str]) -> Table:
    """One of some words, with what editors on Taplo show beside each."""
    shown = [words.partition("\n")[0] for words in described.values()]
    return {"enum": list(described), "x-taplo": {"docs": {"enumValues": shown}}}


def _free(name: Table) -> Table:
    """A table with such a name and any options."""
    return {"type": "object", "required": ["name"], "properties": {"name": name}}
