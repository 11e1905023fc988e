"""Power cuts: what had not reached the disk is gone, and yet no line and no checkpoint is lost."""

import random
import shutil

import pytest
from disk_faults import Disk, power_cut
from small_run import go_on, leftovers, outcome, same, start

from hardy.runs.checkpoint import rounds_in
from hardy.runs.folder import line_round

KINDS = ("least", "names", "some")


def cut_everywhere(tmp_path, cuts, kinds=KINDS) -> dict[str, int]:
    """Cuts the power after some operations of a run; counts what was lost of rounds that have a checkpoint."""
    disk, rng = Disk(tmp_path / "disk"), random.Random(0)
    (tmp_path / "disk").mkdir()
    with disk.watching():
        start(tmp_path / "disk" / "run")
    whole = outcome(tmp_path / "disk" / "run")
    counted = {"cuts": 0, "lost_lines": 0, "damaged_checkpoints": 0, "other_bits": 0, "leftovers": 0}
    for cut in cuts(len(disk.trace)):
        for kind in kinds:
            after = tmp_path / "after"
            power_cut(disk.root, disk.trace, cut, after, kind, rng)
            folder = after / "run"
            counted["lost_lines"] += lost_lines(folder)
            said = go_on(folder)
            counted["damaged_checkpoints"] += sum("torn or corrupted" in line for line in said)
            counted["lost_lines"] += sum(line.startswith("metrics.jsonl") for line in said)
            counted["other_bits"] += not same(whole, outcome(folder))
            counted["leftovers"] += len(leftovers(folder))
            counted["cuts"] += 1
            shutil.rmtree(after)
    return counted


def lost_lines(folder) -> int:
    """Lines of rounds up to the newest checkpoint that are not in metrics.jsonl."""
    newest = max(rounds_in(folder / "checkpoint"), default=0)
    path = folder / "metrics.jsonl"
    held = {line_round(line) for line in path.read_bytes().splitlines()} if path.exists() else set()
    return len(set(range(1, newest + 1)) - held)


def clean(counted) -> bool:
    return not any(value for name, value in counted.items() if name != "cuts")


def test_some_power_cuts(tmp_path):
    counted = cut_everywhere(tmp_path, lambda operations: range(11, operations, operations // 5))
    assert clean(counted) and counted["cuts"] >= 15, counted


@pytest.mark.slow
def test_a_power_cut_after_every_operation(tmp_path):
    counted = cut_everywhere(tmp_path, lambda operations: range(operations + 1))
    assert clean(counted) and counted["cuts"] >= 150, counted


def test_the_simulated_disk_forgets_what_was_not_synced(tmp_path):
    run = tmp_path / "disk"
    trace = [
        ("create", run / "a"),
        ("write", run / "a", b"one"),
        ("fsync", run / "a"),
        ("write", run / "a", b"two"),
        ("fsync", run),
        ("create", run / "b"),
        ("rename", run / "a", run / "c"),
    ]

    def left(kind, seed=0):
        target = tmp_path / f"{kind}-{seed}"
        power_cut(run, trace, len(trace), target, kind, random.Random(seed))
        return {path.name: path.read_bytes() for path in target.iterdir()}

    assert left("least") == {"a": b"one"}
    assert left("names") == {"b": b"", "c": b"one"}
    some = [left("some", seed) for seed in range(40)]
    assert {tuple(found) for found in map(sorted, some)} == {("a",), ("a", "b"), ("b", "c")}
    assert {content for found in some for name, content in found.items() if name != "b"} == {
        b"one",
        b"onet",
        b"onetw",
        b"onetwo",
    }
