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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from hardy import config
from hardy.config import Experiment
from hardy.core import tensors
from hardy.core.disk_store import DiskStore
from hardy.core.files import make_folder, write_atomic
from hardy.core.protocols import walk
from hardy.core.ranks import ALONE, Ranks
from hardy.core.server import Server
from hardy.core.store import ClientStore, MemoryStore, Snapshot
from hardy.core.tensors import Tensors
from hardy.engines.distributed import Distributed, digest, owners
from hardy.engines.process_group import ProcessGroup, RankLost
from hardy.errors import HardyError
from hardy.evaluation.measure import LocalMeasure
from hardy.evaluation.spread import SpreadMeasure, measure_here
from hardy.runs import costs
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
    workers, method, choice = run.experiment.engine.workers, run.engine.plan.method, run.experiment.evaluation
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
    alone = {
        "evaluation.diagnosis": bool(choice.diagnosis),
        "evaluation.clients": run.engine.data.sample is not None,
        "data.held_out": bool(run.experiment.data.held_out),
        "[population]": bool(run.experiment.population.clients),
        "engine.store = disk": any(isinstance(s, DiskStore) for s in (run.engine.store, run.state.reported)),
    }
    for key in (key for key, used in alone.items() if used):
        raise HardyError(
            f"{key} asks clients whose tensors lie on {workers} workers (engine.workers). Leave one of them out."
        )


def client_costs(run: Run) -> list[float]:
    """What a round of each client is expected to cost: multiply-accumulates of its objective, by kind and capacity, on
    its rows, for every base it trains."""
    engine, change = run.engine, run.experiment.data.augmentation
    clients, classes = engine.data.clients, len(engine.data.classes)
    found = [0.0] * len(clients)
    for slot in engine.plan.method.budget.assign(0, range(len(clients)), clients, run.experiment.seed):
        objective = engine.plan.objective(clients[slot.client], 0)
        if objective not in run.counted:
            run.counted[objective] = costs.image_macs(engine.plan, objective, engine.data.shape, classes, change)
        examples = engine.training.examples(len(engine.train_rows[slot.client]), 0)
        found[slot.client] += float(examples * run.counted[objective])
    return found


# The first rank


def hand_out(run: Run, ranks: Ranks) -> None:
    """Meets the other ranks and gives each its clients' tensors; `collect` takes them back."""
    if not isinstance(ranks, ProcessGroup):
        return
    ranks.join(run.engine.device)
    whole, before = run.needs_local("a run on several workers"), run.engine.store
    engine = _take_share(run, ranks)
    run.measures = SpreadMeasure(whole, engine)
    ranks.tell("state", run.state)
    if before and (run.state.round or run.experiment.init):  # else all have the same first values
        ranks.tell("rows")
        for rank in range(1, ranks.count):
            rows = tensors.send(rank_clients(engine.owner, rank), engine.device)
            ranks.send(tensors.gather(before, rows), rank)
    engine.shown = _RankStore(engine)


def _take_share(run: Run, ranks: ProcessGroup) -> Distributed:
    """Gives a run this rank's engine, and leaves that of all clients without their tensors."""
    whole = run.needs_local("a run on several workers")
    before = whole.store
    run.engine = engine = Distributed(whole, ranks, owners(client_costs(run), ranks.count))
    engine.store = MemoryStore(tensors.gather(before, tensors.send(engine.own, engine.device)))
    whole.store = MemoryStore({})
    known = {field.name: getattr(run.server, field.name) for field in fields(Server)}
    run.server = Server(**{**known, "ranks": ranks})  # which waits for its replies, unlike the pipelined one
    return engine


def collect(run: Run) -> None:
    """After the rounds: the run is again one of this process, with the tensors of all clients; the other ranks measure
    on until `release`."""
    if not isinstance(engine := run.engine, Distributed):
        return
    assert isinstance(run.measures, SpreadMeasure)
    whole, ranks = run.measures.engine, engine.ranks
    ranks.tell("collect")
    parts = [dict(engine.here.store), *(ranks.receive(rank) for rank in range(1, ranks.count))]
    whole.store = MemoryStore(_of_all(parts, [rank_clients(engine.owner, rank) for rank in range(ranks.count)]))
    run.engine, run.server = whole, replace(run.server, ranks=ALONE)


def release(run: Run) -> None:
    """Nothing is left to do for the other ranks."""
    if isinstance(run.measures, SpreadMeasure):
        run.measures.distributed.ranks.tell("end")
        run.measures = LocalMeasure(run.measures.engine)


def rank_clients(owner: Sequence[int], rank: int) -> list[int]:
    return [client for client, at in enumerate(owner) if at == rank]


def _of_all(parts: Sequence[Mapping[str, Tensor]], clients: Sequence[Sequence[int]]) -> Tensors:
    """Tensors of all clients, [C, B, ...], out of those of the ranks."""
    found: Tensors = {}
    for name, like in parts[0].items():
        found[name] = like.new_empty(sum(map(len, clients)), *like.shape[1:])
        for part, own in zip(parts, clients, strict=True):
            found[name][torch.tensor(own, device=like.device)] = part[name].to(like.device)
    return found


class _RankStore(ClientStore):
    """The private tensors of all ranks, as a checkpoint sees them: each writes a file of its own."""

    def __init__(self, engine: Distributed, folder: Path | None = None, names: Collection[str] | None = None) -> None:
        self.engine, self.folder, self.names = engine, folder, names

    @property
    def like(self) -> Tensors:  # type: ignore[override]
        return self.engine.here.store.like

    @property
    def axes(self) -> tuple[int, int]:  # type: ignore[override]
        return len(self.engine.owner), self.engine.here.store.axes[1]

    def __getitem__(self, name: str) -> Tensor:
        raise HardyError(
            f"{name} of all clients is in one place before the rounds and after them; between them each worker has "
            "those of its own clients (engine.workers)."
        )

    def place(self, folder: Path) -> None:
        self.folder = folder

    def only(self, names: Collection[str]) -> "_RankStore":
        return _RankStore(self.engine, self.folder, sorted(names))

    def snapshot(self) -> Snapshot:
        return Snapshot(self, lambda: None)  # in the middle of a round nobody knows who has trained

    def saved(self) -> tuple[Tensors, dict[str, Any]]:
        if not self.like:
            return {}, {}
        assert self.folder is not None
        make_folder(self.folder)
        ranks = self.engine.ranks
        order = str(self.folder), self.names
        ranks.tell("save", *order)
        shards = ranks.gather(_write_shard(self.engine, *order))
        if failed := [shard["failed"] for shard in shards if "failed" in shard]:
            raise HardyError(f"{failed[0]} The checkpoint before it is intact.")
        return {}, {"shards": shards}


def _write_shard(engine: Distributed, folder: str, names: Collection[str] | None) -> dict[str, Any]:
    """A file with the private tensors of a rank's clients, named after its content, and what a record says of it."""
    held = {name: value for name, value in engine.here.store.items() if names is None or name in names}
    if bad := [name for name, value in held.items() if value.is_floating_point() and not value.isfinite().all()]:
        return {"failed": f"{min(bad)} of clients of rank {engine.ranks.number} holds numbers that are not finite."}
    content = save(tensors.apply(lambda t: t.contiguous().cpu(), held))
    found = hashlib.sha256(content).hexdigest()
    path = Path(folder) / f"{found[:24]}.safetensors"
    try:
        if not path.parent.is_dir():
            return {"failed": f"rank {engine.ranks.number} does not see {folder}: all must share the run folder."}
        write_atomic(path, content)
    except HardyError as error:
        return {"failed": str(error)}
    return {"file": path.name, "sha256": found, "clients": engine.own}


# The others


def serve_first_rank(run: Run, ranks: ProcessGroup) -> None:
    """Does what the first rank says until it has nothing left to do."""
    with _deaf():
        ranks.join(run.engine.device)
        engine = _take_share(run, ranks)
        while (order := ranks.hear())[0] != "end":
            word, *told = order
            if word == "state":
                run.state = told[0]
            elif word == "rows":
                engine.store = MemoryStore(engine.cast(ranks.receive(0)))
            elif word == "round":
                number, rate, bits = told
                if (number, bits) != (run.state.round, digest(run.state.shared)):
                    raise HardyError("its shared tensors are not rank 0's. All ranks need alike machines and versions.")
                run.state, _ = run.server.round(run.state, engine, rate)
            elif word == "measure":
                measure_here(engine, run.state, *told)
            elif word == "save":
                ranks.gather(_write_shard(engine, *told))
            elif word == "collect":
                ranks.send(dict(engine.here.store), 0)


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
