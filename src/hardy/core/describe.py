"""Short words for large objects."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_LONGEST = 60
"""characters of a value"""


def non_defaults(value: Any) -> str:
    """A dataclass by the fields that are not as they are by default, such as Training(rate=0.1)."""
    if isinstance(value, tuple | list):
        inner = ", ".join(map(non_defaults, value))
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
    return f"{type(value).__name__}({', '.join(f'{n}={non_defaults(v)}' for n, v in _changed(value))})"


def _changed(value: Any) -> list[tuple[str, Any]]:
    found = []
    for field in dataclasses.fields(value):
        usual, now = field.default, getattr(value, field.name)
        if field.default_factory is not dataclasses.MISSING:
            usual = field.default_factory()
        if field.repr and (usual is dataclasses.MISSING or bool(now != usual)):
            found.append((field.name, now))
    return found


def count(values: Mapping[str, Tensor], what: str = "tensors") -> str:
    """12 tensors, 4,522 numbers"""
    return f"{len(values)} {what}, {sum(value.numel() for value in values.values()):,} numbers"
