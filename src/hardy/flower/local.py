"""A whole network on one machine: a SuperLink with TLS and node authentication, and a SuperNode for each client.

Everything it starts it stops; on Linux its processes end with it even if it is killed. What it writes lies in the run
folder under `flower/`.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hardy import config
from hardy.config import Experiment
from hardy.core.files import disk
from hardy.errors import HardyError
from hardy.flower import ENVIRONMENT
from hardy.flower.apps import outcome
from hardy.flower.certificates import CONNECTION, app, certificates, require_flower
from hardy.runs import prepare as experiment
from hardy.runs.folder import locked
from hardy.runs.progress import Progress

_START = 120.0
"""seconds a process may take to come up"""
_LOOK = 20.0
"""seconds between two questions whether a run is still alive"""
_DIE = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
"""becomes the command that follows, to be killed when its parent dies (PR_SET_PDEATHSIG); Flower's own children then
miss their parent and end"""
_MORTAL = [sys.executable, "-c", _DIE] if sys.platform == "linux" else []
_MARK = "HARDY_TRIAL"
"""names the folder of the trial that a process belongs to"""


@dataclass
class Site:
    """The processes of a trial, their keys and their logs."""

    folder: Path
    """holds keys, the app, the nodes' private tensors and the logs"""
    port: int = 0
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def prepare(self, chosen: Experiment, out: Path, nodes: int, data_folder: Path | None = None) -> None:
        """Keys and the app; keys of an earlier trial in the folder are used again."""
        self.port = self.port or _free_port()
        keys = self.folder / "keys"
        if not (keys / f"node-{nodes - 1}.pub").exists():  # the last that is written
            shutil.rmtree(keys, ignore_errors=True)
            certificates(keys, hosts=["127.0.0.1", "localhost"], nodes=nodes)
        shutil.rmtree(self.folder / "app", ignore_errors=True)
        link = f"127.0.0.1:{self.port}"
        app(self.folder / "app", chosen, superlink=link, authority=keys / "ca.pem", out=out)
        own = {"FLWR_HOME": str((self.folder / "app" / ".flwr").absolute()), _MARK: str(self.folder.absolute())}
        data = {"HARDY_DATA": str(data_folder.absolute())} if data_folder else {}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self.environment = {**os.environ, **ENVIRONMENT, **own, **data, "PATH": path}

    def start(self, name: str, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """Starts a process in a group of its own, with its output in a log."""
        (self.folder / "logs").mkdir(exist_ok=True)
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            made = subprocess.Popen(
                [*_MORTAL, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self.environment, **environment},
                start_new_session=True,
            )
        self.processes[name] = made
        return made

    def superlink(self, *options: str) -> None:
        """Starts the SuperLink and waits until it listens."""
        keys = self.folder / "keys"
        files = {"--ssl-ca-certfile": "ca.pem", "--ssl-certfile": "server.pem", "--ssl-keyfile": "server.key"}
        tls = [word for option, name in files.items() for word in (option, str(keys / name))]
        place = ["--host", "127.0.0.1", "--port", str(self.port)]
        fixed = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        started = self.start("superlink", ["flower-superlink", *tls, *place, *fixed, *options])
        end = time.monotonic() + _START
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if started.poll() is not None or time.monotonic() > end:
                raise HardyError(f"the SuperLink did not start: {self.log('superlink')[-1000:]}")
            time.sleep(0.2)

    def register(self, key: Path) -> None:
        """Admits a node's public key."""
        self.flwr("supernode", "register", str(key), CONNECTION)

    def supernode(
        self, number: int, *, key: Path | None = None, authority: Path | None = None, **settings: Any
    ) -> None:
        """Starts the node of a client."""
        keys = self.folder / "keys"
        own = {"client": number, "state": str((self.folder / "state").absolute()), "threads": 1, **settings}
        self.start(
            f"node-{number}",
            [
                "flower-supernode",
                *("--superlink", f"127.0.0.1:{self.port}"),
                *("--root-certificates", str(authority or keys / "ca.pem")),
                *("--auth-supernode-private-key", str(key or keys / f"node-{number}.key")),
                *("--host", "127.0.0.1", "--port", str(_free_port())),
                *("--node-config", _toml(own)),
            ],
            OMP_NUM_THREADS="1",
        )

    def submit(self, **settings: Any) -> str:
        """Starts a run, with settings in place of the app's own; returns its number."""
        given = ["--run-config", _toml(settings)] if settings else []
        return str(self._asked("run", str(self.folder / "app"), CONNECTION, *given)["run-id"])

    def status(self, run: str) -> str:
        """Flower's word on a run, such as running or finished:failed."""
        return str(self._asked("list", CONNECTION, "--run-id", run)["runs"][0]["status"])

    def _asked(self, *words: str) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self.flwr(*words, "--format", "json"))
        if not said.get("success"):  # Flower exits with 0 all the same
            raise HardyError(f"flwr {words[0]} failed: {said.get('error-message', said)}")
        return said

    def flwr(self, *words: str) -> str:
        """Flower's command line; an error with what it said if it fails."""
        try:
            done = subprocess.run(
                ["flwr", *words], capture_output=True, text=True, env=self.environment, timeout=_START, check=False
            )
        except subprocess.TimeoutExpired:
            raise HardyError(f"flwr {words[0]} has not answered within {_START:g} s.") from None
        if done.returncode:
            raise HardyError(f"flwr {words[0]} failed: {(done.stdout + done.stderr).strip()[-500:]}")
        return done.stdout

    def log(self, name: str) -> str:
        """What a process has said so far."""
        with contextlib.suppress(OSError):
            return (self.folder / "logs" / f"{name}.log").read_text("utf-8", errors="replace")
        return ""

    def stop(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends a process with all its children. Some of Flower's are leaders of groups of their own."""
        process = self.processes.pop(name)
        family = descendants(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        for child in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, how)
        process.wait()


@contextlib.contextmanager
def site(folder: Path) -> Iterator[Site]:
    """A place for processes, all of which are ended with the block."""
    with disk(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
    place = Site(folder)
    try:
        yield place
    finally:
        for name in list(place.processes):
            place.stop(name)


@contextlib.contextmanager
def network(folder: Path, chosen: Experiment, out: Path, nodes: int, data_folder: Path | None = None) -> Iterator[Site]:
    """A SuperLink and so many SuperNodes, ready to be given the experiment."""
    with site(folder) as place, locked(folder):
        for left in members(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        place.prepare(chosen, out, nodes, data_folder)
        place.superlink()
        for number in range(nodes):
            place.register(place.folder / "keys" / f"node-{number}.pub")
            place.supernode(number)
        yield place


def trial(
    chosen: Experiment, out: Path, *, data_folder: Path | None = None, quiet: bool = False, again: bool = False
) -> Path:
    """Runs an experiment over Flower on this machine, one process per client. Returns the run folder.

    `again` goes on with the run in the folder. The nodes' private tensors are under flower/state and stay there.
    """
    require_flower()
    if config.FROM_PYTHON in (chosen.method, chosen.model, chosen.data.source):
        raise HardyError("a trial needs an experiment that is all in its TOML; with Python objects write an app.")
    if (out / "config.toml").exists() and not again:
        raise HardyError(f"{out} already holds a run. Go on with `hardy resume {out}`, or choose another folder.")
    # all clients are here, with the experiment's own rows
    chosen = replace(chosen, network=replace(chosen.network, clients=None))
    clients = len(
        chosen.faults.add_hostile_clients(experiment.federation(chosen, None, data_folder), chosen.seed).clients
    )
    with network(out / "flower", chosen, out, clients, data_folder) as place:
        watch(place, place.submit(), out, chosen.rounds, quiet=quiet)
    return out


def watch(place: Site, run: str, out: Path, rounds: int, *, quiet: bool = True) -> None:
    """Waits for a run's end, with the progress its metrics show; an error with the reason if it failed."""
    progress, done, look = Progress(rounds, quiet=quiet), 0, time.monotonic() + _LOOK
    try:
        while True:
            if place.processes["superlink"].poll() is not None:
                raise HardyError(
                    f"the SuperLink ended: {place.log('superlink')[-1000:]}\nGo on with `hardy resume {out}`."
                )
            if (ended := outcome(out, run)) is not None:
                if ended:
                    raise HardyError(ended)
                return
            with contextlib.suppress(OSError):
                done = len((out / "metrics.jsonl").read_text("utf-8").splitlines())
            progress.update(done)
            if time.monotonic() > look:  # seldom: each time is a process of some seconds
                if (status := place.status(run)).startswith("finished") and outcome(out, run) is None:
                    raise HardyError(f"the run over Flower ended as {status}; {out / 'network.log'} says more.")
                look = time.monotonic() + _LOOK
            time.sleep(0.5)
    finally:
        progress.close()


def descendants(process: int) -> list[int]:
    """Children of a process, their children, and so on; none where there is no /proc, where they end by themselves."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    found = [process]
    for one in found:
        found += parents.get(one, [])
    return found[1:]


def members(folder: Path) -> list[int]:
    """The processes of the trial in a folder, whoever their parents are; none where there is no /proc."""
    mark, found = f"{_MARK}={folder.absolute()}".encode(), []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


def _toml(settings: dict[str, Any]) -> str:
    """Settings as Flower's command line wants them."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
