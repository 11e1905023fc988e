"""Part name -> constructor. A part registers where it is written; configuration and laws read it from here."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

from hardy.errors import unknown

Factory = TypeVar("Factory", bound=Callable[..., Any])

PARTS: dict[str, dict[str, Callable[..., Any]]] = {}
_NAMES: dict[Callable[..., Any], str] = {}
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


def find(of: str, name: object) -> Callable[..., Any]:
    """The constructor of a part, or an error with the nearest name."""
    known = PARTS.get(of, {})
    if name not in known:
        raise unknown(of, name, known)
    return known[str(name)]
