"""A run as it is saved: safetensors and JSON, atomic, checksummed, no pickle.

A checkpoint is a folder with two files. tensors.safetensors holds the tensors. record.json holds their SHA-256, the
round, the run's totals, the experiment with all its keys, the SHA-256 of metrics.jsonl so far, and last its own.
Where clients' tensors lie on disk (core/disk_store.py), it names their files in `clients`, with number and SHA-256 of
the rows that count; of a run on several workers, the file (a shard) of each, with its SHA-256.
A checkpoint in which any of it does not fit, or a tensor is not finite, is never used.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from hardy.core.disk_store import DiskStore
from hardy.core.files import disk, make_folder, remove_folder, sync_folder, write_synced
from hardy.core.json_files import read_sealed, sealed
from hardy.core.state import ServerState
from hardy.core.store import ClientStore, MemoryStore, as_store
from hardy.core.tensors import Tensors, apply
from hardy.errors import HardyError, printable

Contents = tuple[dict[str, Any], Tensors]
"""record and tensors of a checkpoint"""
CLIENT_ROWS = "clients"
"""the folder of a run that holds clients' tensors where they lie on disk"""


def rank_folder(number: int) -> str:
    """The folder in which a rank keeps the rows of its clients on disk."""
    return f"rank-{number}"


_FORMAT = 2
_DRAFT = ".draft"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A saved moment: the server's state, the clients' private tensors, the run's totals, and of which experiment."""

    server: ServerState
    store: ClientStore
    figures: dict[str, Any]
    experiment: dict[str, Any] = field(default_factory=dict)
    """every key of the experiment"""
    digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 of metrics.jsonl up to this round, and of clients.json"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "store", as_store(self.store))


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int = 2) -> None:
    """Writes a new checkpoint beside the old ones, then removes all but the newest `keep`."""
    server = checkpoint.server
    reported, private = server.reported.saved(), checkpoint.store.saved()
    groups = {
        "shared": server.shared,
        "reported": reported[0],
        "memory": server.memory,
        "lengths": server.lengths,
        "private": private[0],
    }
    flat = {f"{group}/{n}": t for group, values in groups.items() for n, t in values.items()}
    record = {
        "figures": checkpoint.figures,
        "experiment": checkpoint.experiment,
        "files_sha256": checkpoint.digests,
    }
    if beyond := {name: told for name, (_, told) in (("reported", reported), ("private", private)) if told}:
        record["clients"] = beyond
    save_tensors(folder, server.round, flat, record, keep=keep, also=_intact(folder))
    if beyond:
        _remove_unnamed(folder.parent)


def load_checkpoint(folder: Path, device: torch.device | None = None) -> tuple[Checkpoint, list[str]]:
    """The newest checkpoint that is whole, its server's tensors on a device, and a remark about each that is not."""
    found, remarks = load_tensors(folder, _complete)
    if found is None:
        raise HardyError(
            f"no usable checkpoint in {folder}. {' '.join(remarks)} Start the experiment again with `hardy run`."
        )
    record, flat = found
    groups, (reported, private) = _groups(flat), map(_joined_rows, _stores(folder.parent, found))

    def here(values: Mapping[str, Tensor]) -> Tensors:
        return apply(lambda t: t.to(device), values)

    made = Checkpoint(
        server=ServerState(
            round=record["round"],
            shared=here(groups["shared"]),
            reported=reported.cast(here),
            memory=here(groups["memory"]),
            lengths=groups["lengths"],
        ),
        store=private,
        figures=record["figures"],
        experiment=record["experiment"],
        digests=record["files_sha256"],
    )
    return made, remarks


def _groups(flat: Tensors) -> dict[str, Tensors]:
    groups: dict[str, Tensors] = {"shared": {}, "reported": {}, "memory": {}, "lengths": {}, "private": {}}
    for key, value in flat.items():
        group, _, name = key.partition("/")
        groups[group][name] = value
    return groups


def _stores(run: Path, found: Contents) -> tuple[list[ClientStore], list[ClientStore]]:
    """The reported and the private tensors of a checkpoint of a run folder; those on disk of each rank that wrote
    some."""
    record, flat = found
    beyond, groups = record.get("clients", {}), _groups(flat)

    def made(name: str) -> list[ClientStore]:
        told, folder = beyond.get(name), run / CLIENT_ROWS / name
        if told is None:
            return [MemoryStore(groups[name])]
        shards = told.get("shards", [told])
        if "file" in shards[0]:
            return [_joined_shards(folder, shards)]
        places = [folder / rank_folder(int(shard["rank"])) if "rank" in shard else folder for shard in shards]
        return [DiskStore.opened(at, groups[name], shard) for at, shard in zip(places, shards, strict=True)]

    return made("reported"), made("private")


def _joined_rows(stores: Sequence[ClientStore]) -> ClientStore:
    """One store of what several ranks have on disk, each of clients of its own; a temporary file until it is placed."""
    found, *others = stores
    if others:
        assert isinstance(found, DiskStore)
        found = DiskStore(found.first, found.axes[0])
        for store in stores:
            for slots, rows in store.pieces():
                found.write(slots, rows)
    return found


def _joined_shards(folder: Path, shards: Sequence[dict[str, Any]]) -> MemoryStore:
    """The tensors of all clients, of which each rank of a run wrote those of its own."""
    everybody = sorted(client for shard in shards for client in shard["clients"])
    if everybody != list(range(len(everybody))):
        raise ValueError("its shards do not hold each client once")
    found: Tensors = {}
    for shard in shards:
        content = (folder / Path(shard["file"]).name).read_bytes()
        if hashlib.sha256(content).hexdigest() != shard["sha256"]:
            raise ValueError(f"checksum of shard {printable(shard['file'])} differs")
        rows = torch.tensor(shard["clients"])
        for name, value in load(content).items():
            if not _finite(value):
                raise ValueError(f"{printable(name)} holds numbers that are not finite")
            found.setdefault(name, value.new_empty(len(everybody), *value.shape[1:]))[rows] = value
    return MemoryStore(found)


def _complete(path: Path, found: Contents) -> None:
    """An error if rows of clients that a checkpoint names are not whole."""
    _stores(path.parent.parent, found)


def _remove_unnamed(run: Path) -> None:
    """Removes files of clients' rows that no checkpoint of a run folder names."""
    named = set()
    for path in (*rounds_in(run / "checkpoint").values(), *rounds_in(run / "best").values()):
        try:
            beyond = _record(path).get("clients", {})
        except (HardyError, ValueError, KeyError):
            return  # a damaged record may name any of them
        for name, told in beyond.items():
            named |= {Path(name, _file_of(shard)) for shard in told.get("shards", [told])}
    for path in (run / CLIENT_ROWS).rglob("*"):
        if path.suffix in (".rows", ".safetensors") and path.relative_to(run / CLIENT_ROWS) not in named:
            with suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108


def _file_of(shard: dict[str, Any]) -> Path:
    """What a record names, in the folder of its kind of tensors."""
    if "file" in shard:
        return Path(shard["file"])
    name = f"{shard['number']:06d}.rows"
    return Path(rank_folder(int(shard["rank"])), name) if "rank" in shard else Path(name)


def saved_experiment(folder: Path) -> dict[str, Any] | None:
    """The experiment of the newest checkpoint whose record is whole; None where there is none."""
    for path in reversed(rounds_in(folder).values()):
        try:
            found: dict[str, Any] = _record(path)["experiment"]
            return found
        except (HardyError, ValueError, KeyError):
            continue  # named when its tensors are read
    return None


def save_tensors(
    folder: Path, round_number: int, values: Tensors, record: dict[str, Any], *, keep: int, also: str = ""
) -> None:
    """A new folder round-NNNNNN, then removes older ones but the newest `keep`, and those of a course that was left.
    `also` ends the message if it fails."""
    if bad := [name for name, value in values.items() if not _finite(value)]:
        raise HardyError(
            f"round {round_number} left {_whose(min(bad), values)} with numbers that are not finite; it is not saved. "
            f"Lower training.rate or tighten [admission].{also}"
        )
    content = save({name: value.contiguous().cpu() for name, value in values.items()})
    digest = hashlib.sha256(content).hexdigest()
    whole = {"format": _FORMAT, "round": round_number, **record, "tensors_sha256": digest}
    final, draft = folder / f"round-{round_number:06d}", folder / _DRAFT
    with disk(f"checkpoint {final.name}", also):
        make_folder(folder)
        remove_folder(draft)
        make_folder(draft)
        write_synced(draft / "tensors.safetensors", content)
        write_synced(draft / "record.json", sealed(whole))
        sync_folder(draft)
        remove_folder(final)
        os.rename(draft, final)  # noqa: PTH104
        sync_folder(folder)
        held = rounds_in(folder)
        later = [path for at, path in held.items() if at > round_number]
        for old in (*later, *[path for at, path in held.items() if at <= round_number][:-keep]):
            remove_folder(old)


def load_tensors(
    folder: Path,
    complete: Callable[[Path, Contents], None] | None = None,
    *,
    fits: Callable[[int], bool] = lambda _: True,
) -> tuple[Contents | None, list[str]]:
    """The newest that is whole among those whose round `fits`: record and tensors, and a remark about each that is
    not. `complete` raises an error where something else is missing."""
    remarks: list[str] = []
    held = [path for at, path in rounds_in(folder).items() if fits(at)]
    for number, path in enumerate(reversed(held), 1):
        try:
            found = _read(path)
            if complete:
                complete(path, found)
            return found, remarks
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError, HardyError) as error:
            then = "; using the one before it." if number < len(held) else "."
            remarks.append(f"checkpoint {path.name} is torn or corrupted ({printable(error, 300)}){then}")
    return None, remarks


def rounds_in(folder: Path) -> dict[int, Path]:
    """Round -> its folder, in the order of rounds."""
    found = {path.name.removeprefix("round-"): path for path in folder.glob("round-*")}
    return dict(sorted((int(word), path) for word, path in found.items() if word.isascii() and word.isdigit()))


def _record(path: Path) -> dict[str, Any]:
    record = read_sealed(path / "record.json", "")
    if record["format"] != _FORMAT:
        raise ValueError(f"format {record['format']}, this version reads {_FORMAT}")
    if path.name != f"round-{record['round']:06d}":
        raise ValueError(f"it is of round {record['round']}")
    return record


def _read(path: Path) -> tuple[dict[str, Any], Tensors]:
    record = _record(path)
    content = (path / "tensors.safetensors").read_bytes()
    if hashlib.sha256(content).hexdigest() != record["tensors_sha256"]:
        raise ValueError("checksum of its tensors differs")
    values: Tensors = load(content)
    if bad := [name for name, value in values.items() if not _finite(value)]:
        raise ValueError(f"{min(bad)} holds numbers that are not finite")
    return record, values


def _finite(value: torch.Tensor) -> bool:
    return not value.is_floating_point() or bool(value.isfinite().all())


def _whose(name: str, values: Tensors) -> str:
    """A tensor that is not finite, and of which clients where each has its own."""
    if not name.startswith(("private/", "reported/")):
        return printable(name)
    clients = [str(client) for client, own in enumerate(values[name]) if not _finite(own)]
    more = ", ..." if len(clients) > 8 else ""
    return f"{printable(name)} of client {', '.join(clients[:8])}{more}"


def _intact(folder: Path) -> str:
    """What a user can rely on after a failure to save."""
    if not rounds_in(folder):
        return " There is no earlier checkpoint: start the experiment again."
    return " The last good checkpoint is intact; `hardy resume` goes on from it."
