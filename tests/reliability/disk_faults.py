"""A disk that fails: every file operation under a folder is seen before it is done, can be the last one, and is written
down, so that the disk can be rebuilt as a power cut at any moment may have left it."""

import os
import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

NAMES = ("open", "write", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir")


class Killed(BaseException):
    """The process is dead: nothing of it is done any more."""


@dataclass
class Disk:
    """Passes operations under `root` on, and dies before number `last`; a write may get half of its bytes out."""

    root: Path
    last: int | None = None
    torn: bool = False
    trace: list[tuple] = field(default_factory=list)
    dead: bool = False

    @contextmanager
    def watching(self):
        self.real = {name: getattr(os, name) for name in (*NAMES, "close")}
        self.open_files: dict[int, Path] = {}
        for name in (*NAMES, "close"):
            setattr(os, name, getattr(self, f"_{name}"))
        try:
            yield self
        finally:
            for name, function in self.real.items():
                setattr(os, name, function)

    def _mine(self, path) -> Path | None:
        if isinstance(path, int):
            return self.open_files.get(path)
        found = Path(os.fspath(path))
        return found if found.is_relative_to(self.root) else None

    def _see(self, *operation) -> None:
        if self.dead or len(self.trace) == self.last:
            self.dead = True
            raise Killed(operation)
        self.trace.append(operation)

    def _open(self, path, flags, mode=0o777, **rest):
        mine = self._mine(path)
        if mine is not None and (flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or mine.is_dir()):
            if flags & os.O_CREAT:
                self._see("create", mine)
            handle = self.real["open"](path, flags, mode, **rest)
            self.open_files[handle] = mine
            return handle
        return self.real["open"](path, flags, mode, **rest)

    def _close(self, handle):
        self.open_files.pop(handle, None)
        return self.real["close"](handle)

    def _write(self, handle, content):
        if (mine := self._mine(handle)) is None:
            return self.real["write"](handle, content)
        try:
            self._see("write", mine, bytes(content))
        except Killed:
            if self.torn:
                self.real["write"](handle, bytes(content)[: len(content) // 2])
            raise
        return self.real["write"](handle, content)

    def _fsync(self, handle):
        if (mine := self._mine(handle)) is not None:
            self._see("fsync", mine)
        return self.real["fsync"](handle)

    def _replace(self, source, target, **rest):
        if self._mine(source) is not None:
            self._see("rename", Path(source), Path(target))
        return self.real["replace"](source, target, **rest)

    _rename = _replace

    def _unlink(self, path, **rest):
        if self._mine(path) is not None:
            self._see("unlink", Path(path))
        return self.real["unlink"](path, **rest)

    def _rmdir(self, path, **rest):
        if self._mine(path) is not None:
            self._see("rmdir", Path(path))
        return self.real["rmdir"](path, **rest)

    def _mkdir(self, path, mode=0o777, **rest):
        if self._mine(path) is not None:
            self._see("mkdir", Path(path))
        return self.real["mkdir"](path, mode, **rest)


class _File:
    def __init__(self) -> None:
        self.content, self.safe = bytearray(), 0
        """bytes written, and how many of them a sync has brought to the disk"""


class _Folder:
    def __init__(self) -> None:
        self.entries: dict[str, object] = {}
        self.history: list[tuple[int, dict[str, object]]] = [(-1, {})]
        self.synced = -1
        """the operation of its last sync: the names as of then are safe"""

    def change(self, at: int) -> None:
        self.history.append((at, dict(self.entries)))

    def as_of(self, at: int) -> dict[str, object]:
        return [entries for when, entries in self.history if when <= max(at, self.synced)][-1]


def power_cut(root: Path, trace: list[tuple], cut: int, target: Path, kind: str, rng: random.Random) -> None:
    """Writes to `target` what a disk may hold when the power fails after the first `cut` operations.

    POSIX promises synced bytes of a file, and the names in a folder as of its last sync. What came later may be there
    or not. "least": nothing of it is. "names": names are, bytes are not (how files become empty). "some": the names up
    to some operation, and of each file some of its later bytes.
    """
    top = _Folder()

    def folder_of(path: Path) -> _Folder:
        found = top
        for word in path.parent.relative_to(root).parts:
            found = found.entries[word]
        return found

    def item(path: Path):
        return top if path == root else folder_of(path).entries[path.name]

    for at, (operation, path, *more) in enumerate(trace[:cut]):
        if operation == "write":
            item(path).content += more[0]
        elif operation == "fsync":
            found = item(path)
            if isinstance(found, _File):
                found.safe = len(found.content)
            else:
                found.synced = at
        elif operation == "create":
            folder_of(path).entries.setdefault(path.name, _File())
            folder_of(path).change(at)
        elif operation == "mkdir":
            folder_of(path).entries[path.name] = _Folder()
            folder_of(path).change(at)
        elif operation in ("unlink", "rmdir"):
            folder_of(path).entries.pop(path.name, None)
            folder_of(path).change(at)
        elif operation == "rename":
            moved = folder_of(path).entries.pop(path.name)
            folder_of(path).change(at)
            folder_of(more[0]).entries[more[0].name] = moved
            folder_of(more[0]).change(at)
    names = {"least": -1, "names": cut, "some": rng.randint(-1, cut)}[kind]

    def write(folder: _Folder, where: Path) -> None:
        where.mkdir(parents=True, exist_ok=True)
        for name, held in folder.as_of(names).items():
            if isinstance(held, _Folder):
                write(held, where / name)
            else:
                size = held.safe if kind != "some" else rng.randint(held.safe, len(held.content))
                (where / name).write_bytes(held.content[:size])

    write(top, target)
