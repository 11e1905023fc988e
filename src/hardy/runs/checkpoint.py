"""A run as it is saved: safetensors and JSON, atomic, checksummed, no pickle."""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from hardy.core.files import disk, write_synced
from hardy.core.state import ServerState
from hardy.core.tensors import Tensors, apply
from hardy.errors import HardyError

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A saved moment: the server's state, the clients' private tensors, and the run's totals."""

    server: ServerState
    store: Tensors
    figures: dict[str, Any]


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
        write_synced(draft / "tensors.safetensors", content)
        write_synced(draft / "record.json", json.dumps(record).encode())
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        _sync(folder)
    for old in sorted(folder.glob("round-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path, device: torch.device | None = None) -> tuple[Checkpoint, list[str]]:
    """The newest checkpoint that is whole, its server's tensors on a device, and a remark about each that is not."""
    remarks: list[str] = []
    for path in sorted(folder.glob("round-*"), reverse=True):
        try:
            return _read(path, device), remarks
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            remarks.append(f"checkpoint {path.name} is torn or corrupted ({error}); using the one before it.")
    raise HardyError(
        f"no usable checkpoint in {folder}. {' '.join(remarks)} Start the experiment again with `hardy run`."
    )


def _read(path: Path, device: torch.device | None) -> Checkpoint:
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
    private = groups.pop("private")
    server = {group: apply(lambda t: t.to(device), values) for group, values in groups.items()}
    return Checkpoint(server=ServerState(round=record["round"], **server), store=private, figures=record["figures"])


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
