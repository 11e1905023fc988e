"""What a run must remember, and how it is saved: safetensors and JSON, atomic, checksummed, no pickle."""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from hardy.core.tensors import Tensors, apply
from hardy.errors import HardyError

VERSION = "0.1.0"
_FORMAT = 1


def versions() -> dict[str, str]:
    """What a figure was made with."""
    return {"hardy": VERSION, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """The server between two rounds. With the clients' private tensors it is all a checkpoint needs."""

    round: int
    """rounds done"""
    shared: Tensors
    """[B, ...]"""
    reported: Tensors
    """[C, B, ...]"""
    memory: Tensors
    """the aggregator's"""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A saved moment: the server's state, the clients' private tensors, and the run's running figures."""

    server: ServerState
    store: Tensors
    figures: dict[str, Any]


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
        _write(draft, content)
        draft.replace(path)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int = 2) -> None:
    """Writes a new checkpoint beside the old ones, then removes all but the newest `keep`."""
    server = checkpoint.server
    groups = {
        "shared": server.shared,
        "reported": server.reported,
        "memory": server.memory,
        "private": checkpoint.store,
    }
    flat = {f"{group}/{n}": t.contiguous().cpu() for group, values in groups.items() for n, t in values.items()}
    content = save(flat)
    record = {
        "format": _FORMAT,
        "round": server.round,
        "figures": checkpoint.figures,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    final = folder / f"round-{server.round:06d}"
    draft = folder / ".draft"
    with disk(f"checkpoint {final.name}", " The last good checkpoint is intact; `hardy resume` goes on from it."):
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _write(draft / "tensors.safetensors", content)
        _write(draft / "record.json", json.dumps(record).encode())
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        _sync(folder)
    for old in sorted(folder.glob("round-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path) -> tuple[Checkpoint, list[str]]:
    """The newest checkpoint that is whole, and a remark about each one that is not."""
    remarks: list[str] = []
    for path in sorted(folder.glob("round-*"), reverse=True):
        try:
            return _read(path), remarks
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            remarks.append(f"checkpoint {path.name} is torn or corrupted ({error}); using the one before it.")
    raise HardyError(
        f"no usable checkpoint in {folder}. {' '.join(remarks)} Start the experiment again with `hardy run`."
    )


def _read(path: Path) -> Checkpoint:
    record = json.loads((path / "record.json").read_text())
    content = (path / "tensors.safetensors").read_bytes()
    if record["format"] != _FORMAT:
        raise ValueError(f"format {record['format']}, this version reads {_FORMAT}")
    if hashlib.sha256(content).hexdigest() != record["sha256"]:
        raise ValueError("checksum differs")
    groups: dict[str, Tensors] = {"shared": {}, "reported": {}, "memory": {}, "private": {}}
    for key, value in load(content).items():
        group, _, name = key.partition("/")
        groups[group][name] = value
    server = ServerState(
        round=record["round"], shared=groups["shared"], reported=groups["reported"], memory=groups["memory"]
    )
    return Checkpoint(server=server, store=groups["private"], figures=record["figures"])


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def to(state: ServerState, device: torch.device) -> ServerState:
    def move(values: Tensors) -> Tensors:
        return apply(lambda t: t.to(device), values)

    return ServerState(
        round=state.round, shared=move(state.shared), reported=move(state.reported), memory=move(state.memory)
    )
