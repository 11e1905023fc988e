"""Run folders: what lies in them, who may write, and how often."""

import hashlib
import io
import json
import math
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hardy import config
from hardy.config import Experiment
from hardy.core.federation import LISTED, Client, Federation
from hardy.core.files import (
    append,
    disk,
    file_lock,
    make_folder,
    refuse_links,
    remove_drafts,
    sync_file,
    versions,
    write_atomic,
)
from hardy.data.shifts import Shift, device, seen
from hardy.errors import HardyError
from hardy.report.pictures import displayable, image_grid_png
from hardy.runs.run import Run

METRICS, CLIENTS, TABLES = "metrics.jsonl", "clients.json", "tables"
_LEAST_SECONDS = 1.0
_CHECKPOINT_SHARE = 0.05


def write_run_header(run: Run) -> None:
    """What a run folder holds before its first round."""
    folder, data = run.folder, run.engine.data
    assert folder is not None
    text = run.experiment.to_toml() + "\n" + config.dump({"versions": versions()}) + "\n"
    write_atomic(folder / "config.toml", text.encode())
    write_atomic(folder / CLIENTS, clients_json(run))
    if run.local is None:
        return  # there is no image here to show
    if len(data.shape) == 1:
        return  # feature vectors have no picture
    rows = {client.domain: client.train[:16] for client in reversed(data.profiles)}
    grid = [displayable(data.x_train[found]) for found in reversed(rows.values())]
    labels = [
        f"{domain}: {', '.join(data.classes[y] for y in data.y_train[found])}"
        for domain, found in reversed(rows.items())
    ]
    write_atomic(folder / "pictures" / "samples.png", image_grid_png(grid, labels))
    if run.experiment.data.shift is not None:
        shift = config.convert(run.experiment.data.shift, Shift, "data.shift")
        images = data.x_test if len(data.x_test) else data.x_train
        scene = images[:: max(1, len(images) // 16)][:16]
        taken = [
            seen(scene, shift, device(run.experiment.seed, client)) for client in range(min(12, len(data.clients)))
        ]
        labels = ["images", *(f"as client {client} takes them" for client in range(len(taken)))]
        grid = [displayable(images) for images in (scene, *taken)]
        write_atomic(folder / "pictures" / "devices.png", image_grid_png(grid, labels))


def clients_json(run: Run) -> bytes:
    """What is known of each client."""
    data = run.engine.data
    clients = [
        {
            "client": number,
            "domain": client.domain,
            "kind": client.kind,
            "capacity": client.capacity,
            "train": len(client.train),
            "validation": len(client.validation),
            "test": len(client.test),
            **({"labels": _labels(data, client)} if run.local else {}),
        }
        for number, client in ((data.measured[at], data.profiles[at]) for at in data.listed)
    ]
    return json.dumps(clients).encode()


def write_tables(folder: Path, data: Federation, done: int, found: Mapping[str, Sequence[float | None]]) -> None:
    """The figures of all measured clients, where these are too many for a line: numbers and figures, [client, 2]."""
    if data.sample is None or len(data.sample) <= LISTED:
        return
    with disk(f"{folder / TABLES}"):
        make_folder(folder / TABLES)
    for name, values in found.items():
        table = np.array([(at, math.nan if v is None else v) for at, v in zip(data.sample, values, strict=True)])
        content = io.BytesIO()
        np.save(content, table)
        write_atomic(folder / TABLES / f"round-{done:06d}-{name.replace('/', '-')}.npy", content.getvalue())


def _labels(data: Federation, client: Client) -> list[int]:
    """Training rows of each class."""
    found: list[int] = np.bincount(data.y_train[client.train], minlength=len(data.classes)).tolist()
    return found


class MetricsLog:
    """metrics.jsonl: a line a round; and the checksums of the files that a checkpoint and a summary answer for."""

    def __init__(self, folder: Path) -> None:
        self.path, self.clients = folder / METRICS, _sha256(folder / CLIENTS)
        self.digest = hashlib.sha256(self.path.read_bytes() if self.path.exists() else b"")

    def append(self, line: dict[str, Any]) -> None:
        text = (json.dumps(line) + "\n").encode()
        with disk(METRICS):
            append(self.path, text)
        self.digest.update(text)

    def sync(self) -> None:
        """All lines are on the disk, so that no checkpoint outlives them."""
        if self.path.exists():
            with disk(METRICS):
                sync_file(self.path)

    @property
    def digests(self) -> dict[str, str]:
        return {METRICS: self.digest.hexdigest(), CLIENTS: self.clients}


def mend(run: Run, digests: dict[str, str]) -> list[str]:
    """Brings the files of a resumed run in line with its checkpoint, and says what was wrong with them: lines of rounds
    that will be run again go, as do pictures of networks that will be trained on."""
    folder, done = run.folder, run.state.round
    assert folder is not None
    with disk(str(folder)):
        for picture in (folder / "pictures").glob("attack *.png") if done < run.experiment.rounds else ():
            picture.unlink()
    said = _mend_metrics(folder / METRICS, done, digests.get(METRICS))
    if done and _sha256(folder / CLIENTS) != digests.get(CLIENTS):
        write_atomic(folder / CLIENTS, clients_json(run))
        said.append(f"{CLIENTS} was missing, changed or damaged; it is written anew.")
    return said


def _mend_metrics(path: Path, done: int, digest: str | None) -> list[str]:
    text = path.read_bytes() if path.exists() else b""
    lines: dict[int, bytes] = {}
    unread = 0
    for line in text.splitlines(keepends=True):
        at = line_round(line)
        if at is None:
            unread += 1
        elif at <= done:
            lines[at] = line.rstrip(b"\n") + b"\n"
    kept = b"".join(lines.values())
    if kept != text:
        write_atomic(path, kept)
    if not done or hashlib.sha256(kept).hexdigest() == digest:
        return []  # at most the torn last line of a killed process
    missing = [str(at) for at in range(1, done + 1) if at not in lines]
    if not missing:
        return [f"{METRICS} was changed since its checkpoint was written; its figures may be wrong."]
    shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
    damaged = f" ({unread} lines cannot be read)" if unread else ""
    return [
        f"{METRICS} lacks {len(missing)} of {done} rounds{damaged}: {shown}. They cannot be brought back; the networks "
        "are not affected."
    ]


def line_round(line: bytes) -> int | None:
    """The round of a line of metrics.jsonl; None if it is none."""
    try:
        found = json.loads(line)["round"]
        return found if isinstance(found, int) and found > 0 else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def resolved(experiment: Experiment, text: str) -> dict[str, Any]:
    """Every key of an experiment, and the versions that its config.toml names."""
    return {**tomllib.loads(experiment.to_toml()), "versions": tomllib.loads(text).get("versions", {})}


_STEPS = {f"training.{key}" for key in ("rate", "schedule", "period", "milestones", "decay")}
_UNCOUNTED = {"name", "rounds", "engine", "optimiser", "evaluation", "checkpoint", "callbacks", "versions"} | _STEPS
"""keys that no privacy account hangs on"""


def refuse_changes(folder: Path, text: str, chosen: Experiment, before: dict[str, Any]) -> None:
    """An error that lists the keys in which config.toml is not the experiment of the checkpoint."""
    if not (changes := changed_keys(text, chosen, before)):
        return
    way = "go on with the change: `hardy resume --allow-change` (allow_change=True in Python)"
    if chosen.engine.name == "flower":
        way = "start a new run: nodes have agreed to the experiment as it was"
    raise HardyError(
        f"{folder / 'config.toml'} is not the experiment of its checkpoint: {_few(changes)}. Put back what was "
        f"there, or {way}."
    )


def refuse_private_changes(folder: Path, changes: Mapping[str, str]) -> None:
    """The account is worked out from config.toml for all rounds, also those before the change."""
    if counted := {key: how for key, how in changes.items() if not {key, key.partition(".")[0]} & _UNCOUNTED}:
        raise HardyError(
            f"{folder / 'config.toml'} is not the experiment of its checkpoint: {_few(counted)}. The privacy "
            "account takes all rounds to be alike. Put back what was there, or start a new run and add both ε."
        )


def _few(changes: Mapping[str, str]) -> str:
    shown = list(changes.values())
    return "; ".join(shown[:6]) + (f"; and {len(shown) - 6} more keys" if len(shown) > 6 else "")


def changed_keys(text: str, chosen: Experiment, before: dict[str, Any]) -> dict[str, str]:
    """Key -> what was and what is, of those in which config.toml is not the experiment of the checkpoint. More
    rounds are no change: that is how a run is prolonged. Nor are other workers, nor data that moved: only their name
    counts."""
    tables = before, resolved(chosen, text), tomllib.loads(text)
    beside = ("code",)  # a change of code is a warning
    old, new, written = (
        _placeless(_flat({key: value for key, value in table.items() if key not in beside})) for table in tables
    )
    # a key that the checkpoint does not know counts where config.toml names it: a newer version may have more keys
    differ = [key for key in old if new.get(key) != old[key]] + [key for key in written if key not in old]
    if "engine.workers" in differ:
        differ.remove("engine.workers")
    if "rounds" in differ and new["rounds"] > old["rounds"]:
        differ.remove("rounds")
    return {key: f"{key} was {old.get(key, 'absent')!r}, is {new.get(key, 'absent')!r}" for key in differ}


def _placeless(table: dict[str, Any]) -> dict[str, Any]:
    """Without the folders that the data are in."""
    paths: dict[str, Any] = {key: Path(table[key]).name for key in ("data.source", "data.source.name") if key in table}
    return {key: paths.get(key, value) for key, value in table.items() if key != "data.folder"}


def _flat(table: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}
    return found


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()


class CheckpointSchedule:
    """When to save: every so many rounds, or so seldom that saving stays a small share of the time."""

    def __init__(self, every: int | None) -> None:
        self.every, self.cost, self.last = every, 0.0, time.monotonic()

    def due(self, done: int) -> bool:
        if self.every is not None:
            return done % self.every == 0
        return time.monotonic() - self.last >= max(_LEAST_SECONDS, self.cost / _CHECKPOINT_SHARE)

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.last = time.monotonic()
        self.cost = self.last - began


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process a run folder, which holds no links."""
    if not folder.is_dir():
        raise HardyError(f"no run folder {str(folder)!r}. Start a run with `hardy run EXPERIMENT --out {folder}`.")
    refuse_links(folder)
    with file_lock(folder / ".lock", wait=False) as held:
        if not held:
            raise HardyError(f"another process is running in {folder}; wait for it or stop it.")
        with disk(str(folder)):
            for place in (folder, folder / "pictures", folder / "best"):
                remove_drafts(place)
        yield
