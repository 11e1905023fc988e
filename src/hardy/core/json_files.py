"""JSON files with a checksum inside: read as they were written, or refused in one line."""

import hashlib
import json
from pathlib import Path
from typing import Any

from hardy.core.files import write_atomic
from hardy.errors import HardyError, printable

_LARGEST = 2**28
"""bytes; a file of a run is far below"""
_SEAL = "sha256"


def sealed(value: dict[str, Any], indent: int | None = None) -> bytes:
    """A JSON object with the checksum of the rest as its last key."""
    plain = json.loads(json.dumps(value))  # keys and tuples as a reader will see them
    return json.dumps({**plain, _SEAL: _digest(plain)}, indent=indent).encode()


def write_sealed(path: Path, value: dict[str, Any], indent: int | None = None) -> None:
    write_atomic(path, sealed(value, indent))


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """What `write_sealed` wrote, without its checksum. A changed or damaged file is an error that ends in `remedy`."""
    value: dict[str, Any] = _load(path, dict, remedy)
    if value.pop(_SEAL, None) != _digest(value):
        raise HardyError(f"{path} was changed or damaged: its checksum does not fit. {remedy}")
    cleaned: dict[str, Any] = _clean(value)
    return cleaned


def read_json(path: Path, kind: type, remedy: str) -> Any:
    """A JSON file that may come from anybody. Control characters in its words are taken out: they could steer the
    terminal they are printed on."""
    return _clean(_load(path, kind, remedy))


def _load(path: Path, kind: type, remedy: str) -> Any:
    try:
        if (size := path.stat().st_size) > _LARGEST:
            raise ValueError(f"{size:,} bytes, the largest allowed is {_LARGEST:,}")
        value = json.loads(path.read_bytes().decode("utf-8"))
        _clean(value)  # nested too deeply to be walked: refused here
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else printable(error)
        raise HardyError(f"{path} is not valid JSON ({why}). {remedy}") from None
    if not isinstance(value, kind):
        raise HardyError(f"{path} holds a JSON {type(value).__name__}, not a {kind.__name__}. {remedy}")
    return value


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isprintable() else printable(value, len(value))
    if isinstance(value, list):
        return [_clean(one) for one in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(one) for key, one in value.items()}
    return value


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
