"""Files that are whole or not there, and what the figures in them were made with.

All that Hardy writes into a run folder goes through here: no link is followed, and what has returned is on the disk.
"""

import errno
import os
import platform
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from hardy.errors import HardyError
from hardy.version import VERSION

_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)  # Windows has the second, not the first
_REMEDIES = {
    errno.EMFILE: "Raise the limit of open files (`ulimit -n`), or close some.",
    errno.ENFILE: "Close some files: the machine has too many open.",
    errno.EACCES: "Change the permissions or choose another folder.",
    errno.EPERM: "Change the permissions or choose another folder.",
    errno.EROFS: "Choose another folder.",
    errno.ELOOP: "It is a link: put the file itself in its place.",
    errno.ENOENT: "Check the name.",
    errno.ENOTDIR: "Check the name.",
    errno.EISDIR: "Check the name.",
    errno.ENOMEM: "Free memory, or take a smaller experiment.",
}


def versions() -> dict[str, str]:
    """What a figure was made with."""
    return {"hardy": VERSION, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}


@contextmanager
def disk(what: str, also: str = "") -> Iterator[None]:
    """A failing disk ends in one clear message."""
    try:
        yield
    except OSError as error:
        raise HardyError(f"cannot write {what}: {disk_words(error)}{also}") from error


def disk_words(error: OSError) -> str:
    """What went wrong, and what helps."""
    remedy = _REMEDIES.get(error.errno or 0, "Free space or choose another folder.")
    return f"{error.strerror or error}. {remedy}"


def write_atomic(path: Path, content: bytes) -> None:
    """The file holds either its old or its new content, whatever happens in between. Returns when the new one has
    reached the disk."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")  # two processes must not share one
    with disk(str(path)):
        try:
            write_synced(draft, content)
            os.replace(draft, path)  # noqa: PTH105
        except OSError:
            with suppress(OSError):
                os.unlink(draft)  # noqa: PTH108
            raise
        sync_folder(path.parent)


def write_synced(path: Path, content: bytes) -> None:
    """A new file; returns when the content has reached the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666)
    try:
        _write_all(handle, content)
        os.fsync(handle)
    finally:
        os.close(handle)


def append(path: Path, content: bytes) -> None:
    """Adds to the end of a file. It survives the process, but a power cut only after `sync_file`."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_LINK, 0o666)
    try:
        _write_all(handle, content)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Returns when what was appended has reached the disk, and the file's name too."""
    handle = os.open(path, os.O_WRONLY | _NO_LINK)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Returns when the names in a folder have reached the disk."""
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """The folder and those above it; returns when the new names have reached the disk."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with suppress(FileExistsError):
        os.mkdir(folder)  # noqa: PTH102
    sync_folder(folder.parent)


def remove_folder(folder: Path) -> None:
    """A folder and all in it, links themselves and not what they point to; nothing if it is not there."""
    if not folder.is_dir() or folder.is_symlink():
        with suppress(FileNotFoundError):
            os.unlink(folder)  # noqa: PTH108
        return
    for entry in sorted(folder.iterdir()):
        remove_folder(entry)
    os.rmdir(folder)  # noqa: PTH106


def remove_drafts(folder: Path) -> None:
    """What a killed process left half written."""
    for draft in folder.glob(".*.draft"):
        os.unlink(draft)  # noqa: PTH108


def refuse_links(folder: Path) -> None:
    """A run folder from somebody else may hold links to files outside; nothing is written through them."""
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            mode = os.lstat(Path(where) / name).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                kind = "a link" if stat.S_ISLNK(mode) else "no plain file"
                raise HardyError(
                    f"{Path(where) / name} is {kind}; a run folder holds plain files and folders only. Put a copy of "
                    "what you want in its place, or remove it."
                )
        if Path(where).name == "flower":  # a trial makes `app` anew, and Flower keeps its own things in it
            folders[:] = [name for name in folders if name != "app"]


@contextmanager
def file_lock(path: Path, *, wait: bool) -> Iterator[bool]:
    """Holds a lock file; False where another process holds it and we do not wait."""
    with disk(str(path)):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666)
    try:
        held = True
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # no such locks on Windows
        except BlockingIOError:
            held = False
        yield held
    finally:
        os.close(handle)


def _write_all(handle: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(handle, rest) :]
