"""TOML values as the arguments of a constructor, checked against its signature."""

import dataclasses
import inspect
import math
import sys
import types
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hardy.core.protocols import Optimiser
from hardy.errors import HardyError, unknown
from hardy.registry import KINDS, find, stored_name
from hardy.user_code import in_words, reference, short

Table = dict[str, Any]


def named(choice: str | Table, path: str) -> tuple[str, Table]:
    """(name, options) of a part written as a word or as a table with a name."""
    if isinstance(choice, str):
        return choice, {}
    options = dict(choice)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise HardyError(f'{path} needs a name: a word, or a table with name = "..." (got {choice!r}).')
    return name, options


def construct(factory: Callable[..., Any], table: object, path: str, **given: Any) -> Any:
    """factory(**table, **given), every value of the table checked against the signature."""
    if not isinstance(table, dict):
        raise HardyError(f"{path or 'the experiment'} is {table!r}; it must be a table.")
    parameters = {
        key: parameter
        for key, parameter in inspect.signature(factory).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    anything = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(factory).parameters.values())
    hints = argument_hints(factory)
    arguments = dict(given)
    for key, value in table.items():
        if key in given or not (anything or key in parameters):
            known = parameters.keys() - given.keys()
            raise unknown(
                f"key in {path or 'the experiment'}", key, known, elsewhere=() if path else keys_below(factory)
            )
        default = parameters[key].default if key in parameters else None
        arguments[key] = convert(value, hints.get(key, Any), f"{path}.{key}".lstrip("."), default)
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in arguments:
            raise HardyError(f"{path} needs a value for {key!r}, as in {{ name = ..., {key} = ... }}.")
    return _call(factory, arguments, path)


def keys_below(table: Callable[..., Any]) -> list[str]:
    """The keys of the tables in a table, such as training.rate."""
    tables = {
        key: hint for key, hint in argument_hints(table).items() if dataclasses.is_dataclass(hint) and hint not in KINDS
    }
    return [f"{key}.{field.name}" for key, hint in tables.items() for field in dataclasses.fields(hint)]


def argument_hints(factory: Callable[..., Any]) -> Table:
    """Argument of a constructor -> its type; nothing where the types cannot be known."""
    plain_class = inspect.isclass(factory) and not dataclasses.is_dataclass(factory)
    try:
        return get_type_hints(factory.__init__ if plain_class else factory)
    except (NameError, TypeError):  # of a user's code: names for a type checker alone
        return {}


def _call(factory: Callable[..., Any], arguments: Table, path: str) -> Any:
    """factory(**arguments); an error in a user's own code is one line with its place."""
    try:
        return factory(**arguments)
    except HardyError:
        raise
    except Exception as error:
        if factory.__module__.partition(".")[0] == "hardy":
            raise
        file = getattr(sys.modules.get(factory.__module__), "__file__", None) or ""
        raise HardyError(f"{path} {short(stored_name(factory))} failed: {in_words(error, file)}.") from error


def convert(value: Any, hint: Any, path: str, default: object = None) -> Any:
    """A TOML value as the type an argument asks for. A table without a name is the default part, with these options."""
    if isinstance(value, dict) and "name" not in value and isinstance(default, tuple(KINDS)):
        return _with_options(default, value, path)
    if hint is Any:
        return value
    if isinstance(hint, type):
        return _plain(value, hint, path)
    kinds = get_args(hint)
    origin = get_origin(hint)
    if origin is Literal:
        if value not in kinds:
            raise unknown(f"value for {path}", value, map(str, kinds))
        return value
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        errors = []
        for kind in kinds:
            if kind is not types.NoneType:
                try:
                    return convert(value, kind, path)
                except HardyError as error:
                    errors.append(error)
        raise errors[0]
    if origin is Sequence and isinstance(value, list):
        return tuple(convert(v, kinds[0], f"{path}[{i}]") for i, v in enumerate(value))
    if origin is tuple and isinstance(value, list):
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            return tuple(convert(v, kinds[0], f"{path}[{i}]") for i, v in enumerate(value))
        if len(kinds) == len(value):
            return tuple(convert(v, kind, f"{path}[{i}]") for i, (v, kind) in enumerate(zip(value, kinds, strict=True)))
        raise HardyError(f"{path} is {value!r}; it must hold {len(kinds)} values.")
    if origin is dict and isinstance(value, dict):
        return {key: convert(v, kinds[1], f"{path}.{key}") for key, v in value.items()}
    wanted = "a table" if origin is dict else f"a list, such as {[value]!r}"
    raise HardyError(f"{path} is {value!r}; it must be {wanted}.")


def _with_options(held: Any, options: Table, path: str) -> Any:
    """A part with other values for some of its options."""
    hints = argument_hints(type(held))
    if wrong := [key for key in options if key not in hints]:
        raise unknown(f"key in {path}", wrong[0], {field.name for field in dataclasses.fields(held)})
    new = {k: convert(v, hints[k], f"{path}.{k}", getattr(held, k)) for k, v in options.items()}
    return dataclasses.replace(held, **new)


def _plain(value: Any, hint: type, path: str) -> Any:
    if hint in KINDS:
        if hint is Optimiser and isinstance(value, dict) and "name" not in value:
            value = {"name": "sgd", **value}
        name, options = named(value if isinstance(value, (str, dict)) else {}, path)
        factory = find(KINDS[hint], name)
        made = construct(factory, options, path)
        if not isinstance(made, hint) or (reference(name) and type(made) is not factory):
            raise HardyError(
                f"{path} {short(name)} is no {KINDS[hint]}; it must be a frozen dataclass derived from "
                f"{hint.__module__}.{hint.__name__}."
            )
        return made
    if dataclasses.is_dataclass(hint):
        return construct(hint, value, path)
    if issubclass(hint, Enum):
        allowed = {str(member.value): member for member in hint}
        if value not in allowed:
            raise unknown(f"value for {path}", value, allowed)
        return allowed[value]
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isnan(value):
            raise HardyError(f"{path} is nan; it must be a number.")
        return float(value)
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word in quotes"}
    raise HardyError(f"{path} is {value!r}; it must be {words.get(hint, hint.__name__)}{_as_toml(value, hint)}.")


def _as_toml(value: Any, hint: type) -> str:
    """How TOML writes a number that came as a word, such as .5 or '0.5'."""
    try:
        return f", which TOML writes as {hint(value)!r}" if hint in (int, float) and isinstance(value, str) else ""
    except ValueError:
        return ""
