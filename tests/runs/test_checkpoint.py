"""Checkpoints: atomic, checksummed, and whole or refused."""

import errno
import json

import pytest
import torch

from hardy.core import files
from hardy.core.state import ServerState
from hardy.errors import HardyError
from hardy.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint


def checkpoint(round: int) -> Checkpoint:
    server = ServerState(
        round=round, shared={"a.b": torch.full((1, 3), float(round))}, reported={}, memory={"m": torch.ones(1)}
    )
    return Checkpoint(server=server, store={"c_i.x": torch.arange(4).view(2, 2)}, figures={"seconds": 1.5})


def saved(tmp_path, *rounds):
    for round in rounds:
        save_checkpoint(tmp_path, checkpoint(round))
    return tmp_path


def test_round_trip_keeps_everything_and_the_newest_two(tmp_path):
    loaded, remarks = load_checkpoint(saved(tmp_path, 1, 2, 3))
    assert loaded.server.round == 3 and not remarks
    assert torch.equal(loaded.server.shared["a.b"], checkpoint(3).server.shared["a.b"])
    assert torch.equal(loaded.store["c_i.x"], checkpoint(3).store["c_i.x"])
    assert loaded.figures == {"seconds": 1.5}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round-000002", "round-000003"]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: flip(p / "tensors.safetensors"),
        lambda p: (p / "tensors.safetensors").write_bytes(b""),
        lambda p: (p / "tensors.safetensors").unlink(),
        lambda p: (p / "record.json").write_text('{"format": 1'),
        lambda p: (p / "record.json").write_text("[]"),
        lambda p: (p / "record.json").write_text(json.dumps({"format": 99, "round": 2, "sha256": "", "figures": {}})),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_previous_one_used(tmp_path, damage):
    damage(saved(tmp_path, 1, 2) / "round-000002")
    loaded, remarks = load_checkpoint(tmp_path)
    assert loaded.server.round == 1
    assert "round-000002 is torn or corrupted" in remarks[0]


def test_no_good_checkpoint_is_an_error(tmp_path):
    flip(saved(tmp_path, 1) / "round-000001" / "tensors.safetensors")
    with pytest.raises(HardyError, match="no usable checkpoint"):
        load_checkpoint(tmp_path)


def test_a_full_disk_is_one_clear_error_and_the_last_checkpoint_stays(tmp_path, monkeypatch):
    saved(tmp_path, 1)

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(HardyError, match=r"No space left on device.*hardy resume"):
        save_checkpoint(tmp_path, checkpoint(2))
    monkeypatch.undo()
    assert load_checkpoint(tmp_path)[0].server.round == 1
    assert load_checkpoint(saved(tmp_path, 3))[0].server.round == 3
