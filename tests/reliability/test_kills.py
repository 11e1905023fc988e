"""A process that dies before any of its file operations loses nothing: resumed, the run ends with the same bits."""

import pytest
from disk_faults import Disk, Killed
from small_run import go_on, leftovers, outcome, same, start


def kill(folder, last: int, *, torn: bool = False) -> tuple:
    """Dies before an operation; what it was."""
    disk = Disk(folder.parent, last=last, torn=torn)
    with disk.watching(), pytest.raises(Killed) as dead:
        start(folder)
    return dead.value.args[0]


def kill_everywhere(tmp_path, places) -> dict[str, int]:
    """Counts by operation; every one must end like the undisturbed run."""
    counted: dict[str, int] = {}
    whole = outcome(tmp_path / "whole")
    for last in places:
        operation = ""
        for torn in (False, True):
            if torn and operation != "write":
                break
            folder = tmp_path / f"killed-{last}-{torn}"
            operation = kill(folder, last, torn=torn)[0]
            go_on(folder)
            assert same(whole, outcome(folder)), (last, operation)
            assert not leftovers(folder), (last, operation)
            counted[operation] = counted.get(operation, 0) + 1
    return counted


@pytest.fixture
def operations(tmp_path) -> int:
    """How many there are in a run."""
    disk = Disk(tmp_path)
    with disk.watching():
        start(tmp_path / "whole")
    kinds = {operation[0] for operation in disk.trace}
    assert kinds == {"create", "write", "fsync", "rename", "unlink", "mkdir", "rmdir"}
    return len(disk.trace)


def test_every_file_is_written_through_the_watched_operations(tmp_path):
    disk = Disk(tmp_path)
    with disk.watching():
        start(tmp_path / "whole")
    written = {path for operation, path, *_ in disk.trace if operation == "create"}
    written |= {more[0] for operation, _, *more in disk.trace if operation == "rename"}
    moved = {path.parent for path in written if path.name.startswith("round-")}
    for path in (tmp_path / "whole").rglob("*"):
        assert path in written or path.parent.parent in moved or path.is_dir(), path


def test_killed_before_some_operations(tmp_path, operations):
    counted = kill_everywhere(tmp_path, range(7, operations, operations // 8))
    assert sum(counted.values()) >= 8


@pytest.mark.slow
def test_killed_before_every_operation(tmp_path, operations):
    counted = kill_everywhere(tmp_path, range(operations))
    assert sum(counted.values()) >= operations
