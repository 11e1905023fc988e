"""What users see when something they gave cannot work."""

from collections.abc import Iterable
from difflib import get_close_matches


class HardyError(Exception):
    """A mistake the user can mend: one message with the value, the limit and the remedy. The CLI exits with 2."""


def unknown(kind: str, value: object, allowed: Iterable[str]) -> HardyError:
    """An unknown name, with the nearest known one."""
    names = sorted(allowed)
    near = get_close_matches(str(value), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return HardyError(f"unknown {kind} {value!r}.{hint} Known: {', '.join(names) or 'none'}.")
