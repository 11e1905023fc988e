"""Part name -> constructor. A part registers where it is written; configuration and laws read it from here. Names of
code from outside (`module:name`) lead there too."""

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

from hardy import user_code
from hardy.errors import HardyError, unknown

Factory = TypeVar("Factory", bound=Callable[..., Any])

PARTS: dict[str, dict[str, Callable[..., Any]]] = {}
_NAMES: dict[Callable[..., Any], str] = {}
_REFERENCES: dict[Callable[..., Any], str] = {}
"""constructor from outside -> the `module:name` it was found by"""
OF_FUNCTION: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {}
"""kind of part -> what makes one of a plain function of a user's own, such as a metric of (logits, labels)"""
KINDS: dict[type, str] = {}
"""Protocol class of a kind of part -> its name: an argument of that type is itself a part."""


def kind(name: str) -> Callable[[type], type]:
    """Declares the base class of a kind of part."""

    def declare(base: type) -> type:
        KINDS[base] = name
        PARTS.setdefault(name, {})
        return base

    return declare


def part(of: str, *, name: str | None = None) -> Callable[[Factory], Factory]:
    """Registers a constructor under a name, or under the lower_snake form of its own."""

    def register(factory: Factory) -> Factory:
        _NAMES[factory] = name or name_of(factory)
        PARTS.setdefault(of, {})[_NAMES[factory]] = factory
        return factory

    return register


def name_of(factory: Callable[..., Any]) -> str:
    """The name a constructor is registered under, or the lower_snake form of its own."""
    return (
        _NAMES.get(factory) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", factory.__name__).lower()
    )


def stored_name(factory: Callable[..., Any]) -> str:
    """The name by which another process finds a constructor: that of `name_of`, or `module:name`."""
    return _REFERENCES.get(factory) or name_of(factory)


def find(of: str, name: object) -> Callable[..., Any]:
    """The constructor of a part: by its name, by `module:name`, or of an installed package; or an error with the
    nearest name."""
    known = PARTS.get(of, {})
    if name in known:
        return known[str(name)]
    text = user_code.reference(name)
    found: Callable[..., Any] | None = user_code.resolve(text) if text else user_code.plugin(of, str(name))
    if found is None and str(name).endswith(".py"):
        raise HardyError(f"{of} {name!r} is a file; name what to take of it, such as {name}:mine.")
    if found is None:
        raise unknown(of, name, [*known, *(name for kind, name in user_code.plugins() if kind == of)])
    if not callable(found):
        raise HardyError(f"{name} is {found!r}; it must be a function or a class that makes a {of}.")
    if of in OF_FUNCTION and _takes_two(found):
        found = OF_FUNCTION[of](found)
    if text:
        _REFERENCES[found] = text
    return found


def _takes_two(found: Callable[..., Any]) -> bool:
    """Whether it is a function that cannot be called without two arguments by place, so it is no factory."""
    if not inspect.isfunction(found):
        return False
    given = inspect.signature(found).parameters.values()
    return sum(p.kind is not p.KEYWORD_ONLY and p.default is p.empty for p in given) == 2
