"""A whole deployment on one machine: the server and a node for each client, closed as over a real network.

Everything it starts it stops; on Linux its processes end with it even if it is killed. What it writes lies in the run
folder under `flower/`.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from hardy import config
from hardy.config import Experiment
from hardy.core.files import disk
from hardy.errors import HardyError
from hardy.flower.app_folder import CONNECTION, build_app, write_app
from hardy.flower.apps import outcome
from hardy.flower.certificates import certificates, load_keys, require_flower
from hardy.flower.deployment import FORKS, START, start_node, start_server
from hardy.flower.fork_server import ForkServer
from hardy.flower.processes import free_port, quiet_environment, stop_process
from hardy.runs import prepare as experiment
from hardy.runs.folder import locked
from hardy.runs.progress import Progress
from hardy.user_code import places

_LOG = logging.getLogger("hardy.deploy")
_LOOK = 20.0
"""seconds between two questions whether a run is still alive"""
_DOUBTS = 3
"""questions in a row without an answer until it is taken for dead: a busy machine may take minutes for one"""
_MARK = "HARDY_TRIAL"
"""names the folder of the trial that a process belongs to"""


@dataclass
class Site:
    """The processes of a trial, their keys and their logs."""

    folder: Path
    """holds keys, the app, the nodes' private tensors and the logs"""
    control: int = 0
    """the SuperLink's port"""
    port: int = 0
    """where nodes connect"""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    proxies: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    fork_server: ForkServer | None = None
    """where the apps of all nodes are born"""

    def prepare(self, chosen: Experiment, out: Path, nodes: int, data_folder: Path | None = None) -> None:
        """Keys and the app; keys of an earlier trial in the folder are used again."""
        self.control, self.port = self.control or free_port(), self.port or free_port()
        keys = self.folder / "keys"
        if not (keys / "server" / f"node-{nodes - 1}.pem").exists():  # the last that is written
            shutil.rmtree(keys, ignore_errors=True)
            certificates(keys, hosts=["127.0.0.1", "localhost"], nodes=nodes)
        self.bring(chosen, out)
        own = {"FLWR_HOME": str((self.folder / "app" / ".flwr").absolute()), _MARK: str(self.folder.absolute())}
        data = {"HARDY_DATA": str(data_folder.absolute())} if data_folder else {}
        self.environment = quiet_environment(**own, **data)
        (self.folder / "logs").mkdir(exist_ok=True)

    def bring(self, chosen: Experiment, out: Path) -> None:
        """The app of an experiment, in place of the one before."""
        shutil.rmtree(self.folder / "app", ignore_errors=True)
        write_app(self.folder / "app", chosen, out=out, control=self.control)

    def superlink(self, *options: str) -> None:
        """Starts the server and waits until it listens."""
        keys = load_keys(self.folder / "keys" / "server", "server")
        with self._open("superlink") as log:
            try:
                made = start_server(
                    keys,
                    self.folder / "server",
                    address=("127.0.0.1", self.port),
                    control=self.control,
                    options=options,
                    environment=self.environment,
                    log=log,
                )
            except HardyError as error:
                raise HardyError(f"{error}\n{self.log('superlink')[-1000:]}") from None
        self.processes["superlink"], self.proxies["superlink"] = made.process, made.proxy

    def supernode(self, number: int, *, apps: list[str] | None = None, **settings: Any) -> None:
        """Starts the node of a client, which agrees to the app as it is now."""
        agreed = apps if apps is not None else [build_app(self.folder / "app")]
        name = f"node-{number}"
        if FORKS and (self.fork_server is None or self.fork_server.process.poll() is not None):
            with self._open("apps") as log:
                self.fork_server = ForkServer({**self.environment, "OMP_NUM_THREADS": "1"}, log)
        with self._open(name) as log:
            made = start_node(
                load_keys(self.folder / "keys" / name, "node"),
                ("127.0.0.1", self.port),
                self.folder / "state",
                apps=agreed,
                settings={"threads": 1, **settings},
                environment={**self.environment, "OMP_NUM_THREADS": "1"},
                log=log,
                fork_server=self.fork_server,
            )
        self.processes[name], self.proxies[name] = made.process, made.proxy

    def submit(self, **settings: Any) -> str:
        """Starts a run, with settings in place of the app's own; returns its number."""
        words = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
        given = ["--run-config", words] if settings else []
        return str(self._asked("run", str(self.folder / "app"), CONNECTION, *given)["run-id"])

    def status(self, run: str) -> str:
        """Flower's word on a run, such as running or finished:failed."""
        return str(self._asked("list", CONNECTION, "--run-id", run)["runs"][0]["status"])

    def _asked(self, *words: str) -> dict[str, Any]:
        return ask_flower(self.environment, *words)

    def _open(self, name: str) -> IO[bytes]:
        return (self.folder / "logs" / f"{name}.log").open("ab")

    def log(self, name: str) -> str:
        """What a process has said so far."""
        with contextlib.suppress(OSError):
            return (self.folder / "logs" / f"{name}.log").read_text("utf-8", errors="replace")
        return ""

    def stop(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends a process with all its children, and its proxy."""
        stop_process(self.processes.pop(name), how)
        if proxy := self.proxies.pop(name, None):
            proxy.shutdown()
            proxy.server_close()


def ask_flower(environment: dict[str, str], *words: str) -> dict[str, Any]:
    """What Flower's command line answers; an error with what it said if it fails."""
    try:
        done = subprocess.run(
            ["flwr", *words, "--format", "json"],
            capture_output=True,
            text=True,
            env=environment,
            timeout=START,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise HardyError(f"flwr {words[0]} has not answered within {START:g} s.") from None
    if done.returncode:
        raise HardyError(f"flwr {words[0]} failed: {(done.stdout + done.stderr).strip()[-500:]}")
    said: dict[str, Any] = json.loads(done.stdout)
    if not said.get("success"):  # Flower exits with 0 all the same
        raise HardyError(f"flwr {words[0]} failed: {said.get('error-message', said)}")
    return said


@contextlib.contextmanager
def site(folder: Path) -> Iterator[Site]:
    """A place for processes, all of which are ended with the block."""
    with disk(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
    place = Site(folder)
    said = logging.FileHandler(folder / "proxies.log", encoding="utf-8")
    _LOG.addHandler(said)
    _LOG.propagate = False
    try:
        yield place
    finally:
        for name in list(place.processes):
            place.stop(name)
        if place.fork_server is not None:
            place.fork_server.stop()
        _LOG.removeHandler(said)
        _LOG.propagate = True
        said.close()


@contextlib.contextmanager
def network(folder: Path, chosen: Experiment, out: Path, nodes: int, data_folder: Path | None = None) -> Iterator[Site]:
    """A SuperLink and so many SuperNodes, ready to be given the experiment."""
    with site(folder) as place, locked(folder):
        for left in members(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        place.prepare(chosen, out, nodes, data_folder)
        place.superlink()
        own_code = ",".join(places(config.to_table(chosen)))  # the nodes of a trial belong to whoever wrote it
        settings: dict[str, Any] = {"allow_import": own_code} if own_code else {}
        for number in range(nodes):
            place.supernode(number, **settings)
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
    chosen = experiment.with_data_place(replace(chosen, network=replace(chosen.network, clients=None)), data_folder)
    clients = len(
        chosen.faults.add_hostile_clients(experiment.federation(chosen, None, data_folder), chosen.seed).clients
    )
    with network(out / "flower", chosen, out, clients, data_folder) as place:
        watch(place, place.submit(), out, chosen.rounds, quiet=quiet)
    return out


def watch(place: Site, run: str, out: Path, rounds: int, *, quiet: bool = True) -> None:
    """Waits for a run's end, with the progress its metrics show; an error with the reason if it failed."""

    def alive() -> None:
        if place.processes["superlink"].poll() is not None:
            raise HardyError(f"the SuperLink ended: {place.log('superlink')[-1000:]}\nGo on with `hardy resume {out}`.")

    follow(out, run, rounds, status=lambda: place.status(run), alive=alive, quiet=quiet)


def submit_app(app: Path, *, quiet: bool = False) -> Path:
    """Starts the run of an app on the server of this machine and waits for its end; returns the run folder."""
    try:
        project = tomllib.loads((app / "pyproject.toml").read_text("utf-8"))
        out = Path(project["tool"]["flwr"]["app"]["config"]["out"])
        rounds = config.read(str(app / "hardy_app" / "experiment.toml"), check=False).rounds
    except (OSError, KeyError, ValueError) as error:
        raise HardyError(f"{app} holds no app ({error}); write one with `hardy deploy app`.") from None
    around = quiet_environment(FLWR_HOME=str((app / ".flwr").absolute()))
    run = str(ask_flower(around, "run", str(app), CONNECTION)["run-id"])

    def status() -> str:
        return str(ask_flower(around, "list", CONNECTION, "--run-id", run)["runs"][0]["status"])

    follow(out, run, rounds, status=status, quiet=quiet)
    return out


def follow(
    out: Path,
    run: str,
    rounds: int,
    *,
    status: Callable[[], str],
    alive: Callable[[], None] = lambda: None,
    quiet: bool = True,
) -> None:
    """Waits for the end of a run in a folder of this machine."""
    progress, done, look, doubts = Progress(rounds, quiet=quiet), 0, time.monotonic() + _LOOK, 0
    try:
        while True:
            alive()
            if (ended := outcome(out, run)) is not None:
                if ended:
                    raise HardyError(ended)
                return
            with contextlib.suppress(OSError):
                done = len((out / "metrics.jsonl").read_text("utf-8").splitlines())
            progress.update(done)
            if time.monotonic() > look:  # seldom: each time is a process of some seconds
                try:
                    word, doubts = status(), 0
                except HardyError:
                    word, doubts = "", doubts + 1
                    if doubts == _DOUBTS and outcome(out, run) is None:
                        raise
                if word.startswith("finished") and outcome(out, run) is None:
                    raise HardyError(f"the run over Flower ended as {word}; {out / 'network.log'} says more.")
                look = time.monotonic() + _LOOK
            time.sleep(0.5)
    finally:
        progress.close()


def members(folder: Path) -> list[int]:
    """The processes of the trial in a folder, whoever their parents are; none where there is no /proc."""
    mark, found = f"{_MARK}={folder.absolute()}".encode(), []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found
