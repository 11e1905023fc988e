"""A run on several ranks: the processes that are started, what the first rank hands out, and what the others do.

    torchrun has started the ranks: each makes the run as the command says; the others then `serve_first_rank`.
    --workers N: this process is the first rank, and starts N - 1 of `python -m hardy.runs.workers`.

The first rank has the run folder, callbacks and signals. A round is the same `Server.round` on every rank, on the same
state: figures and folded updates are brought together in it, so that nobody has to be sent the next state.
"""

import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from hardy import config
from hardy.config import Experiment
from hardy.core import tensors
from hardy.core.disk_store import DiskStore
from hardy.core.federation import Lazy, LazyClients
from hardy.core.files import disk, make_folder, write_atomic
from hardy.core.partition import Placement
from hardy.core.protocols import walk
from hardy.core.ranks import ALONE, Ranks
from hardy.core.server import Server
from hardy.core.store import ClientStore, MemoryStore, Slot, Snapshot
from hardy.core.tensors import Tensors
from hardy.engines.base import Engine
from hardy.engines.distributed import Distributed, OwnRows, deal, digest
from hardy.engines.process_group import ProcessGroup, RankLost
from hardy.errors import HardyError
from hardy.evaluation.measure import LocalMeasure
from hardy.evaluation.spread import SpreadMeasure, measure_here
from hardy.runs import costs
from hardy.runs.checkpoint import CLIENT_ROWS, rank_folder
from hardy.runs.prepare import prepare
from hardy.runs.run import Run
from hardy.user_code import USER, places

_GRACE = 5.0
"""seconds in which a rank that has closed its connections must have ended"""


_LOST = 3
"""exit code of a rank that misses another"""
_CROWD = 2
"""workers a core at most"""


def torchrun_ranks() -> tuple[int, int]:
    """(number of this rank, ranks) as torchrun has started them; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def with_workers(experiment: Experiment) -> Experiment:
    """The experiment for the ranks that torchrun has started, if it has."""
    choice, (_, world) = experiment.engine, torchrun_ranks()
    if choice.name == "flower" or world == 1:
        if choice.name == "distributed" and choice.workers == 1:
            raise HardyError(
                "engine distributed shares the clients among several workers, but engine.workers is 1. Take --workers "
                "2 or more, or start it by torchrun."
            )
        return experiment
    if choice.workers not in (1, world):
        raise HardyError(
            f"engine.workers is {choice.workers}, but torchrun has started {world} processes. Leave engine.workers out."
        )
    return replace(experiment, engine=replace(choice, workers=world))


def _refuse_crowd(workers: int) -> None:
    """Refuses processes that would only wait for each other, before any is started."""
    cores = os.cpu_count() or 1
    if workers > (most := max(_CROWD * cores, torch.cuda.device_count())):
        raise HardyError(
            f"engine.workers is {workers}, but this machine has {cores} cores, and the limit is {most} processes. Take "
            f"{cores} or fewer, or start them on several machines by torchrun."
        )


@contextmanager
def started_ranks(experiment: Experiment, data_folder: Path | str | None, given: Mapping[str, Any]) -> Iterator[Ranks]:
    """The ranks of an experiment; those that this process starts end with the block. `given` is what was passed from
    Python, which other processes have only under torchrun."""
    choice, (number, world) = experiment.engine, torchrun_ranks()
    if choice.workers == 1 or choice.name == "flower":
        yield ALONE
        return
    if world == 1 and (known := [name for name, value in given.items() if value is not None]):
        raise HardyError(
            f"{known[0]} is given as an object, and the {choice.workers - 1} other workers are processes that know "
            "names only. Name it (module:name), or start this script with torchrun, so that every worker runs it."
        )
    threads = torch.get_num_threads()
    _take_gpu(int(os.environ.get("LOCAL_RANK", "0")), choice.device)
    if world > 1:
        ranks = ProcessGroup(number, world, timeout=choice.timeout)
        try:
            yield ranks
        finally:
            ranks.leave()
        return
    _refuse_crowd(choice.workers)
    folder = Path(tempfile.mkdtemp(prefix="hardy-ranks-"))
    share = max(1, threads // choice.workers)
    processes = [_start(experiment, data_folder, number, folder, share) for number in range(1, choice.workers)]
    ranks = ProcessGroup(0, choice.workers, timeout=choice.timeout, meeting=f"file://{folder / 'meeting'}")
    ranks.who_died = lambda: _who_died(processes, folder)
    ranks.others_ready = lambda: _await_ready(processes, folder, choice.timeout)
    torch.set_num_threads(share)
    try:
        yield ranks
        for process in processes:  # they were told to end
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdin:
                process.stdin.close()
        ranks.leave()
        torch.set_num_threads(threads)
        shutil.rmtree(folder, ignore_errors=True)


def _take_gpu(number: int, asked: str) -> None:
    """A rank's own GPU, in turn, unless the experiment names one for all."""
    if asked in ("auto", "cuda") and torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())


def _start(
    experiment: Experiment, data_folder: Path | str | None, number: int, folder: Path, threads: int
) -> subprocess.Popen[bytes]:
    """A rank on this machine. It ends when its standard input does, so also when this process is killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hardy.runs.workers"],
        stdin=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        start_new_session=True,  # Ctrl-C is for the first rank
    )
    data = str(Path(data_folder).absolute()) if data_folder else None
    told = {"experiment": experiment.to_toml(), "data": data, "number": number, "folder": str(folder), "path": sys.path}
    assert process.stdin is not None
    process.stdin.write((json.dumps(told) + "\n").encode())
    process.stdin.flush()
    return process


def _await_ready(processes: Sequence["subprocess.Popen[bytes]"], folder: Path, patience: float) -> None:
    """Waits until all are there, as long as all live."""
    until = time.monotonic() + patience
    while not all((folder / f"ready-{number}").exists() for number in range(1, len(processes) + 1)):
        if any(process.poll() is not None for process in processes):
            raise RankLost(_who_died(processes, folder))
        if time.monotonic() > until:
            raise RankLost(f"not all {len(processes) + 1} ranks were there within {patience:g} s (engine.timeout)")
        time.sleep(0.01)


def _who_died(processes: Sequence["subprocess.Popen[bytes]"], folder: Path) -> str:
    """Which rank has ended and how, in words; empty if none has."""
    until = time.monotonic() + _GRACE
    while all(process.poll() is None for process in processes) and time.monotonic() < until:
        time.sleep(0.05)
    ended = {number: code for number, process in enumerate(processes, 1) if (code := process.poll()) is not None}
    if not ended:
        return ""
    number, code = min(ended.items(), key=lambda one: one[1] == _LOST)  # one that has missed another is not the cause
    why = folder / f"rank-{number}"
    words = f": {why.read_text('utf-8')}" if why.exists() else ""
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"rank {number} of {len(processes) + 1} {how}{words}"


def refuse_workers(run: Run) -> None:
    """Refuses what several ranks cannot do, or would do no better than one."""
    workers, method = run.experiment.engine.workers, run.engine.plan.method
    if workers == 1:
        return
    if method.pooled:
        raise HardyError(
            f"engine.workers is {workers}, but method {method.name!r} trains on all rows as one client. Leave it out."
        )
    if workers > (clients := len(run.engine.data.clients)):
        raise HardyError(
            f"engine.workers is {workers}, but there are {clients} clients to share. Take {clients} or fewer."
        )
    if run.engine.plan.synchronised:
        raise HardyError(
            f"engine.workers is {workers}, but norm synchronised needs all clients of a step in one call. Leave it "
            "out, or take norm federated."
        )
    if any(getattr(part, "entropy", "seed") == "system" for part in walk(method.aggregator)):
        raise HardyError(
            f"engine.workers is {workers}: every worker does the server's round, and with entropy = system each would "
            'draw other noise. Leave it out, or take entropy = "seed" for a simulation.'
        )


def client_owners(run: Run, ranks: int) -> Sequence[int]:
    """Client -> the rank that owns it: dealt by what a round of each is expected to cost, for every base it trains; of
    a population, whose clients nobody looks at one by one, in turn."""
    clients = run.engine.data.clients
    if isinstance(clients, LazyClients):
        return Lazy(len(clients), lambda client: client % ranks)
    found = [0.0] * len(clients)
    for slot in run.engine.plan.method.budget.assign(0, range(len(clients)), clients, run.experiment.seed):
        found[slot.client] += costs.slot_macs(run, 0, slot)
    return deal(found, ranks)


# The first rank


def hand_out(run: Run, ranks: Ranks) -> None:
    """Meets the other ranks and gives each its clients' tensors; `collect` takes them back."""
    if not isinstance(ranks, ProcessGroup):
        return
    ranks.join(run.engine.device)
    whole, before = run.needs_local("a run on several workers"), run.engine.store
    engine = _take_share(run, ranks)
    run.measures = SpreadMeasure(whole, engine)
    if run.folder is not None:
        ranks.tell("place", str(run.folder / CLIENT_ROWS / "private"))
        _place(engine, str(run.folder / CLIENT_ROWS / "private"))
    _tell_state(run, ranks)
    if before and (run.state.round or run.experiment.init):  # else all have the same first values
        first = before.first if isinstance(before, DiskStore) else None
        ranks.tell("rows", first)
        for rank in range(1, ranks.count):
            for piece in before.pieces(partial(engine.owns, rank)):
                ranks.send(piece, rank)
            ranks.send(None, rank)
        _take_rows(engine, first, before.pieces(partial(engine.owns, 0)))
    engine.shown = _RankStore(engine)


def _take_share(run: Run, ranks: ProcessGroup) -> Distributed:
    """Gives a run this rank's engine, and leaves that of all clients without their tensors."""
    whole = run.needs_local("a run on several workers")
    run.engine = engine = Distributed(whole, ranks, client_owners(run, ranks.count), partial(costs.slot_macs, run))
    clients = len(whole.data.clients)
    if isinstance(whole.store, DiskStore):
        engine.store = DiskStore(whole.store.first, clients)
    elif whole.store:
        own = [client for client, rank in enumerate(engine.owner) if rank == ranks.number]
        engine.store = OwnRows(_first_rows(whole), own, clients)
    whole.store = MemoryStore({})
    known = {field.name: getattr(run.server, field.name) for field in fields(Server)}
    run.server = Server(**{**known, "ranks": ranks})  # which waits for its replies, unlike the pipelined one
    return engine


def _first_rows(engine: Engine) -> Tensors:
    return engine.cast(engine.plan.first(Placement.PRIVATE, engine.plan.method.budget.bases))


def _tell_state(run: Run, ranks: ProcessGroup) -> None:
    """Gives the state to all ranks; each has a copy of the clients' reported tensors."""
    state, reported = run.state, run.state.reported
    if not isinstance(reported, DiskStore):
        ranks.tell("state", state)
        return
    ranks.tell("state", replace(state, reported=MemoryStore({})), reported.first)
    for piece in reported.pieces():
        ranks.tell("reported", *piece)


def _place(engine: Distributed, folder: str) -> None:
    """Rows on disk lie in a folder of each rank."""
    engine.here.store.place(Path(folder) / rank_folder(engine.ranks.number))


def _take_rows(engine: Distributed, first: Tensors | None, pieces: Iterable[tuple[list[Slot], Tensors]]) -> None:
    """Takes the tensors of this rank's clients, and on disk the first values of all."""
    store = engine.here.store
    if first is not None:
        store = engine.here.store = store.begun(tensors.apply(lambda t: t[None], first))
    for slots, rows in pieces:
        store.write(slots, rows)


def _received(ranks: ProcessGroup, rank: int) -> Iterator[tuple[list[Slot], Tensors]]:
    """Rows that another rank sends, piece by piece."""
    while (piece := ranks.receive(rank)) is not None:
        yield piece


def collect(run: Run) -> None:
    """After the rounds: the run is again one of this process, with the tensors of all clients; the other ranks measure
    on until `release`."""
    if not isinstance(engine := run.engine, Distributed):
        return
    whole = run.local_measures.engine
    whole.store = _collected(engine)
    run.engine, run.server = whole, replace(run.server, ranks=ALONE)


@contextmanager
def of_all_clients(run: Run) -> Iterator[Engine]:
    """The engine of this machine. Of several workers the clients' tensors are brought together while the block
    lasts."""
    whole = run.local_measures.engine
    if isinstance(run.engine, Distributed):
        whole.store = _collected(run.engine)
    try:
        yield whole
    finally:
        if isinstance(run.engine, Distributed):
            whole.store = MemoryStore({})


def _collected(engine: Distributed) -> ClientStore:
    """The private tensors of all clients."""
    own, ranks = engine.here.store, engine.ranks
    if not own:
        return MemoryStore({})
    ranks.tell("collect")
    found: ClientStore = MemoryStore.filled(_first_rows(engine.here), own.axes[0])
    if isinstance(own, DiskStore):
        found = DiskStore(own.first, own.axes[0])
    for pieces in (own.pieces(), *(_received(ranks, rank) for rank in range(1, ranks.count))):
        for slots, rows in pieces:
            found.write(slots, rows)
    return found


def release(run: Run) -> None:
    """Nothing is left to do for the other ranks."""
    if isinstance(run.measures, SpreadMeasure):
        run.measures.distributed.ranks.tell("end")
        run.measures = LocalMeasure(run.measures.engine)


class _RankStore(ClientStore):
    """The private tensors of all ranks, as a checkpoint sees them: each writes a file of its own."""

    def __init__(self, engine: Distributed, names: Collection[str] | None = None) -> None:
        self.engine, self.names, self.folder = engine, names, ""

    @property
    def like(self) -> Tensors:  # type: ignore[override]
        return self.engine.here.store.like

    @property
    def axes(self) -> tuple[int, int]:  # type: ignore[override]
        return self.engine.here.store.axes

    def __getitem__(self, name: str) -> Tensor:
        raise HardyError(
            f"{name} of all clients is in one place before the rounds and after them; between them each worker has "
            "those of its own clients (engine.workers)."
        )

    def place(self, folder: Path) -> None:
        self.folder = str(folder)

    def only(self, names: Collection[str]) -> "_RankStore":
        some = _RankStore(self.engine, sorted(names))
        some.folder = self.folder
        return some

    def snapshot(self) -> Snapshot:
        return Snapshot(self, lambda: None)  # in the middle of a round nobody knows who has trained

    def saved(self) -> tuple[Tensors, dict[str, Any]]:
        store, ranks = self.engine.here.store, self.engine.ranks
        if not store:
            return {}, {}
        if not isinstance(store, DiskStore):
            with disk(self.folder):
                make_folder(Path(self.folder))
        ranks.tell("save", self.folder, self.names)
        shards = ranks.gather(_saved_shard(self.engine, self.folder, self.names))
        if failed := [shard["failed"] for shard in shards if "failed" in shard]:
            raise HardyError(f"{failed[0]} The checkpoint before it is intact.")
        return store.first if isinstance(store, DiskStore) else {}, {"shards": shards}


def _saved_shard(engine: Distributed, folder: str, names: Collection[str] | None) -> dict[str, Any]:
    """Saves the private tensors of a rank's clients; what a record says of them, or why it failed."""
    store, number = engine.here.store, engine.ranks.number
    try:
        if not isinstance(store, DiskStore):
            assert isinstance(store, OwnRows)
            return _write_shard(store, number, Path(folder), names)
        found = {"rank": number, **store.saved()[1]}
        if found["records"] and not Path(folder).is_dir():
            raise HardyError(_unseen(number, folder))
        return found
    except HardyError as error:
        return {"failed": str(error)}


def _unseen(number: int, folder: object) -> str:
    return f"rank {number} does not see {folder}: all must share the run folder."


def _write_shard(store: OwnRows, number: int, folder: Path, names: Collection[str] | None) -> dict[str, Any]:
    """A file named after its content."""
    held = {name: value for name, value in store.rows.items() if names is None or name in names}
    if bad := [name for name, value in held.items() if value.is_floating_point() and not value.isfinite().all()]:
        raise HardyError(f"{min(bad)} of clients of rank {number} holds numbers that are not finite.")
    content = save(tensors.apply(lambda t: t.contiguous().cpu(), held))
    found = hashlib.sha256(content).hexdigest()
    if not folder.is_dir():
        raise HardyError(_unseen(number, folder))
    write_atomic(folder / f"{found[:24]}.safetensors", content)
    return {"file": f"{found[:24]}.safetensors", "sha256": found, "clients": store.own}


# The others


def serve_first_rank(run: Run, ranks: ProcessGroup) -> None:
    """Does what the first rank says until it has nothing left to do."""
    with _deaf():
        ranks.join(run.engine.device)
        engine = _take_share(run, ranks)
        while (order := ranks.hear())[0] != "end":
            word, *told = order
            if word == "place":
                _place(engine, *told)
            elif word == "state":
                run.state, *first = told
                if first:
                    reported = run.server.exchange.between_rounds(DiskStore(first[0], len(run.server.clients)))
                    run.state = replace(run.state, reported=reported)
            elif word == "reported":
                run.state = replace(run.state, reported=run.state.reported.written(*told))
            elif word == "rows":
                _take_rows(engine, told[0], _received(ranks, 0))
            elif word == "round":
                number, rate, bits = told
                if (number, bits) != (run.state.round, digest(run.state.shared)):
                    raise HardyError("its shared tensors are not rank 0's. All ranks need alike machines and versions.")
                run.state, _ = run.server.round(run.state, engine, rate)
            elif word == "measure":
                measure_here(engine, run.state, *told)
            elif word == "save":
                ranks.gather(_saved_shard(engine, *told))
            elif word == "collect":
                for piece in engine.here.store.pieces():
                    ranks.send(piece, 0)
                ranks.send(None, 0)


@contextmanager
def _deaf() -> Iterator[None]:
    """Signals that end a run are the first rank's to hear: it finishes the round and saves."""
    usual = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, kept in usual.items():
            signal.signal(number, kept)


def start_rank() -> int:
    """A rank that another process has started and told what to do on its standard input."""
    told = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    sys.path[:] = told["path"]
    number, folder = told["number"], Path(told["folder"])
    logging.getLogger("hardy").setLevel(logging.ERROR)  # the first rank has said it
    try:
        allow = replace(USER, listed=tuple(places(tomllib.loads(told["experiment"]))))
        experiment = config.parse(told["experiment"], where="the experiment", check=False, allow=allow)
        choice = experiment.engine
        _take_gpu(number, choice.device)
        run = prepare(experiment, data_folder=told["data"])
        ranks = ProcessGroup(number, choice.workers, timeout=choice.timeout, meeting=f"file://{folder / 'meeting'}")
        (folder / f"ready-{number}").touch()
        serve_first_rank(run, ranks)
        ranks.leave()
    except RankLost:
        return _LOST  # the first rank says what was lost, if it is there
    except HardyError as error:
        (folder / f"rank-{number}").write_text(str(error), encoding="utf-8")
        return 2
    return 0


def _end_with_input() -> None:
    while sys.stdin.read(1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(start_rank())
