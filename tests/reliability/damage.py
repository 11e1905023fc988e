"""Damaged files of a run: bits flipped, ends cut off, pieces overwritten or shifted; and who reads each file."""

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from hardy import config
from hardy.errors import HardyError
from hardy.report.pictures import whole_png
from hardy.report.stored_run import read_run
from hardy.runs import folder as folders
from hardy.runs.checkpoint import load_tensors, saved_experiment

NEVER_READ = ("report.html", ".lock", ".evaluation.lock")
"""written for others, or empty"""


def damaged(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    """How, and the content; always another one."""
    changed, at = bytearray(content), rng.randrange(len(content))
    kind = rng.choices(("bit", "cut", "zeros", "shift", "bytes"), (14, 2, 2, 1, 1))[0]
    if kind == "bit":
        changed[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del changed[at:]
    elif kind == "zeros":
        changed[at : at + 512] = bytes(len(changed[at : at + 512]))
    elif kind == "shift":
        changed.insert(at, rng.randrange(256))
    else:
        changed[at] = (changed[at] + rng.randrange(1, 256)) % 256
    return (kind, bytes(changed)) if bytes(changed) != content else damaged(content, rng)


def _checkpoint(path: Path) -> object:
    """What is read of the newest in a folder; a damaged one is named."""
    found, remarks = load_tensors(path.parent.parent)
    if remarks:
        raise HardyError(remarks[0])
    assert found is not None
    record, values = found
    # sorted: safetensors gives them in any order, and another order is no other content
    return record, {name: (value.dtype, value.shape, value.tolist()) for name, value in sorted(values.items())}


def _stored(path: Path) -> object:
    found = read_run(path.parent)
    return [found.summary, found.rounds, found.clients, found.evaluation, found.projections, found.settings]


def _config(path: Path) -> object:
    text = path.read_bytes().decode("utf-8")
    chosen = config.parse(text, where=str(path), check=False)
    before = saved_experiment(path.parent / "checkpoint")
    assert before is not None
    folders.refuse_changes(path.parent, text, chosen, before)
    return {**folders.resolved(chosen, text), "rounds": 0}  # more rounds are no change


def _picture(path: Path) -> object:
    if not whole_png(path.read_bytes()):
        raise HardyError("damaged")
    return path.read_bytes()


def reader(path: Path) -> Callable[[Path], object]:
    """Who reads a file of a run folder, or of a node's state folder."""
    if path.parent.name.startswith("round-"):
        return _checkpoint
    return {".toml": _config, ".png": _picture}.get(path.suffix, _stored)


def damage_everything(folder: Path, scratch: Path, each: int, seed: int = 0) -> dict[str, dict[str, int]]:
    """Damages every file of a folder so often, one at a time in a copy; counts what its reader did, by file.

    refused: an error or a remark. harmless: read without a word, with the same content. silent: with another content.
    """
    shutil.copytree(folder, scratch)
    rng, counted = random.Random(seed), {}
    newest = {max(one.parent.glob("round-*")) for one in scratch.rglob("round-*")}
    for path in sorted(scratch.rglob("*")):
        older = path.parent.name.startswith("round-") and path.parent not in newest
        if not path.is_file() or path.name in NEVER_READ or older:
            continue
        whole, read = path.read_bytes(), reader(path)
        expected = read(path)
        name = str(path.relative_to(scratch))
        found = counted[name] = {"refused": 0, "harmless": 0, "silent": 0}
        for _ in range(each):
            _, content = damaged(whole, rng)
            path.write_bytes(content)
            result = "refused"
            with suppress(HardyError, UnicodeDecodeError):
                result = "harmless" if _equal(read(path), expected) else "silent"
            found[result] += 1
        path.write_bytes(whole)
    shutil.rmtree(scratch)
    return counted


def _equal(first: object, second: object) -> bool:
    return repr(first) == repr(second)  # nan is nan


def totals(counted: dict[str, dict[str, int]]) -> dict[str, int]:
    return {key: sum(found[key] for found in counted.values()) for key in ("refused", "harmless", "silent")}


def node_state(folder: Path) -> Path:
    """A node's private tensors after three rounds."""
    from hardy.flower.memory import Memory

    for number in range(3):
        Memory(str(folder), "abc", 0).keep(number, {"bn.mean": torch.arange(8.0) + number})
    return folder
