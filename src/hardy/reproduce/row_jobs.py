"""Several rows at once, each in a process of its own: one that is killed takes no other with it."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import FrameType

from hardy.reproduce.definition import find_table, same_row
from hardy.reproduce.records import Record
from hardy.reproduce.row_runs import RowJob, try_row

_Ended = tuple[RowJob, Record | str]
_Runs = tuple[str, str, int, tuple[str, ...] | None]
_STOPPED = "stopped. The same command goes on where it was."


def run_jobs(
    jobs: Sequence[RowJob], processes: int = 1, *, quiet: bool = True, minutes: float | None = None
) -> Iterator[_Ended]:
    """Each job with its record, or the words of what went wrong. After so many minutes those that are under way are
    stopped, each after its round, and nothing is yielded for them and for those that were not begun."""
    if processes == 1 and minutes is None:
        for job in jobs:
            yield job, try_row(job, quiet=quiet)
        return
    waiting = [(job, _runs_of(job)) for job in jobs]
    running: dict[Connection, tuple[RowJob, _Runs, SpawnProcess]] = {}
    end = None if minutes is None else time.monotonic() + 60 * minutes
    with _ended_by_sigterm():
        try:
            while (waiting or running) and (end is None or time.monotonic() < end):
                busy = {key for _, key, _ in running.values()}
                free = [pair for pair in waiting if pair[1] not in busy]  # two rows of one run: one after the other
                if free and len(running) < processes:
                    waiting.remove(free[0])
                    running |= _started(*free[0])
                    continue
                left = None if end is None else max(0.0, end - time.monotonic())
                for ended in connection.wait(list(running), left):
                    assert isinstance(ended, Connection)
                    job, _, process = running.pop(ended)
                    yield job, _answer(ended, process)
        finally:
            for _, _, process in running.values():
                process.terminate()
            for _, _, process in running.values():
                process.join()


def _runs_of(job: RowJob) -> _Runs:
    """What tells the run of a job from others."""
    home, row = same_row(find_table(job.folder, job.table), job.row)
    return home.path, row, job.seed, job.setting


def _started(job: RowJob, key: _Runs) -> dict[Connection, tuple[RowJob, _Runs, SpawnProcess]]:
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_in_process, args=(job, theirs))
    process.start()
    theirs.close()
    return {ours: (job, key, process)}


def _in_process(job: RowJob, answer: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to all; the first process ends the others
    answer.send(try_row(job, quiet=True))


def _answer(ended: Connection, process: SpawnProcess) -> Record | str:
    try:
        found: Record | str = ended.recv()
    except EOFError:
        process.join()
        return f"its process ended with code {process.exitcode}; -9 is often a lack of memory: take fewer --jobs"
    process.join()
    return found


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the other processes too, each after its round."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(_STOPPED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
