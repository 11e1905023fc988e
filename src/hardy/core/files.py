"""Files that are whole or not there, and what the figures in them were made with."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from hardy.errors import HardyError
from hardy.version import VERSION


def versions() -> dict[str, str]:
    """What a figure was made with."""
    return {"hardy": VERSION, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}


@contextmanager
def disk(what: str, also: str = "") -> Iterator[None]:
    """A failing disk ends in one clear message."""
    try:
        yield
    except OSError as error:
        raise HardyError(
            f"cannot write {what}: {error.strerror or error}. Free space or choose another folder.{also}"
        ) from error


def write_atomic(path: Path, content: bytes) -> None:
    """The file holds either its old or its new content, whatever happens in between."""
    draft = path.with_name(f".{path.name}.draft")
    with disk(str(path)):
        write_synced(draft, content)
        draft.replace(path)


def write_synced(path: Path, content: bytes) -> None:
    """Returns when the content has reached the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
