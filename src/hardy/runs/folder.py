"""Run folders: what lies in them, who may write, and how often."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hardy import config
from hardy.core.federation import Client, Federation
from hardy.core.files import disk, versions, write_atomic
from hardy.data.shifts import Shift, device, seen
from hardy.errors import HardyError
from hardy.report.pictures import image_grid_png
from hardy.runs.run import Run

_LEAST_SECONDS = 1.0
_CHECKPOINT_SHARE = 0.05


def write_run_header(run: Run) -> None:
    """What a run folder holds before its first round."""
    folder, data = run.folder, run.engine.data
    assert folder is not None
    text = run.experiment.to_toml() + "\n" + config.dump({"versions": versions()}) + "\n"
    write_atomic(folder / "config.toml", text.encode())
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
        for number, client in enumerate(data.clients)
    ]
    write_atomic(folder / "clients.json", json.dumps(clients).encode())
    if run.local is None:
        return  # there is no image here to show
    rows = {client.domain: client.train[:16] for client in reversed(data.clients)}
    grid = [data.x_train[found].transpose(0, 2, 3, 1) for found in reversed(rows.values())]
    write_atomic(folder / "pictures" / "samples.png", image_grid_png(grid, list(reversed(rows))))
    if run.experiment.data.shift is not None:
        shift = config.convert(run.experiment.data.shift, Shift, "data.shift")
        scene = data.x_test[:: max(1, len(data.x_test) // 16)][:16]
        taken = [seen(scene, shift, device(run.experiment.seed, client)) for client in range(min(12, len(clients)))]
        labels = ["test images", *(f"as client {client} takes them" for client in range(len(taken)))]
        grid = [images.transpose(0, 2, 3, 1) for images in (scene, *taken)]
        write_atomic(folder / "pictures" / "devices.png", image_grid_png(grid, labels))


def _labels(data: Federation, client: Client) -> list[int]:
    """Training rows of each class."""
    found: list[int] = np.bincount(data.y_train[client.train], minlength=len(data.classes)).tolist()
    return found


def drop_stale(folder: Path, done: int, rounds: int) -> None:
    """Drops the lines of rounds that will be run again, and pictures of networks that will be trained on."""
    _truncate(folder / "metrics.jsonl", done)
    for picture in (folder / "pictures").glob("attack *.png") if done < rounds else ():
        picture.unlink()


def _truncate(path: Path, rounds: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["round"] > rounds:
                break
        except (ValueError, KeyError, TypeError):
            break  # a torn last line
        kept.append(line + "\n")
    write_atomic(path, "".join(kept).encode())


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
    """One process a run folder."""
    if not folder.is_dir():
        raise HardyError(f"no run folder {str(folder)!r}. Start a run with `hardy run EXPERIMENT --out {folder}`.")
    with disk("the run folder"):
        file = (folder / ".lock").open("w")
    with file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # no such locks on Windows
        except BlockingIOError as error:
            raise HardyError(f"another process is running in {folder}; wait for it or stop it.") from error
        yield
