"""The two machines of a deployment: the server, and a site's node. Each starts Flower's process and its proxy."""

import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hardy.core.files import disk, write_atomic
from hardy.errors import HardyError
from hardy.flower.app_folder import CONTROL_PORT
from hardy.flower.audit import AUDIT, Audit
from hardy.flower.certificates import Keys, site_secret
from hardy.flower.fork_server import ForkServer
from hardy.flower.launcher import Launcher
from hardy.flower.processes import free_port, listens, quiet_environment, start_process, stop_process
from hardy.flower.proxy import NodeProxy, Refused, ServerProxy

NODES = "HARDY_NODES"
"""names the file in which the server's proxy says which node is which client"""
SITE = "HARDY_SITE"
"""set for everything a site's node starts: the folder of its state"""
FORKS = sys.platform == "linux"
"""whether apps are forked; elsewhere Flower starts each anew"""
START = 300.0
"""seconds a process may take to come up"""
CLOCK_OFF = 5.0
"""seconds two clocks may differ: Flower refuses what is signed later than that in its own future"""


@dataclass
class RunningServer:
    """A SuperLink on loopback, and the proxy that nodes reach it through."""

    process: subprocess.Popen[bytes]
    proxy: ServerProxy
    port: int


def start_server(
    keys: Keys,
    state: Path,
    *,
    address: tuple[str, int] = ("0.0.0.0", 9092),
    control: int = CONTROL_PORT,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    log: IO[bytes] | None = None,
) -> RunningServer:
    """Starts both. The SuperLink listens on loopback whatever is asked for."""
    nodes = (state / "nodes.json").absolute()
    with disk(str(state)):
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = ["--host", "127.0.0.1", "--port", str(control), "--insecure"]
    command = [sys.executable, "-m", "hardy.flower.loopback", "superlink", *place, *options]
    around = {**(environment or quiet_environment()), NODES: str(nodes)}
    proxy = _listen(lambda: ServerProxy(address, keys, control, nodes), address)
    process = start_process([*command, "--disable-runtime-dependency-installation"], around, log)
    if not listens(control, process, START):
        stop_process(process)
        proxy.server_close()
        raise HardyError(f"the SuperLink did not start on 127.0.0.1:{control}; is the port in use? Its log says more.")
    return RunningServer(process, proxy, proxy.start())


def _listen(make: Any, address: tuple[str, int]) -> Any:
    try:
        return make()
    except OSError as error:
        raise HardyError(f"cannot listen on {address[0]}:{address[1]}: {error.strerror or error}.") from None


@dataclass
class RunningNode:
    """A SuperNode, the proxy through which it reaches the server, and the process that its apps are forked from."""

    process: subprocess.Popen[bytes]
    proxy: NodeProxy
    fork_server: ForkServer | None


def start_node(
    keys: Keys,
    server: tuple[str, int],
    state: Path,
    *,
    apps: Sequence[str],
    settings: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    log: IO[bytes] | None = None,
    fork_server: ForkServer | None = None,
) -> RunningNode:
    """Starts all three, for the apps with these SHA-256 and no others. Nodes of one machine may share a fork server."""
    with disk(str(state)):
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    audit = Audit(state / AUDIT)
    proxy = NodeProxy(keys, server, apps, audit, site_secret(state / f"site-{keys.number}.key"))
    try:
        check_connection(proxy, server)
    except HardyError:
        proxy.server_close()
        raise
    trusted = state / f"trusted-{keys.number}.yaml"
    write_atomic(trusted, proxy.trusted().encode())
    own = {**settings, "client": keys.number, "state": str(state.absolute())}
    audit.write("start", server=f"{server[0]}:{server[1]}", client=keys.number, apps=sorted(apps))
    runtime = f"127.0.0.1:{free_port()}"
    command = [
        *(sys.executable, "-m", "hardy.flower.loopback", "supernode", "--insecure"),
        *("--superlink", f"127.0.0.1:{proxy.start()}"),
        *("--trusted-entities", str(trusted)),
        *("--host", "127.0.0.1", "--port", runtime.rpartition(":")[2]),
        *("--node-config", " ".join(f"{name}={json.dumps(value)}" for name, value in own.items())),
    ]
    home = {"FLWR_HOME": str((state / f"flwr-{keys.number}").absolute()), SITE: str(state.absolute())}
    around = {**(environment or quiet_environment()), **home}
    if fork_server is None and FORKS:
        fork_server = ForkServer(around, log)
    if fork_server is not None:
        command += ["--isolation", "process"]  # apps are started by us
    process = start_process(command, around, log)
    if fork_server is not None:
        proxy.delivered = Launcher(runtime, process, fork_server, around, log).ring
    return RunningNode(process, proxy, fork_server)


def check_connection(proxy: NodeProxy, server: tuple[str, int]) -> None:
    """The server is there, is the one whose authority we know, admits us, and its clock agrees with ours."""
    where = f"{server[0]}:{server[1]}"
    try:
        ahead = proxy.clock()
    except Refused as why:
        raise HardyError(f"{where} does not admit this node: {why}.") from None
    except OSError as error:
        raise HardyError(
            f"no connection to {where}: {error}. Is `hardy deploy server` running there, and are the keys of both "
            "sides of one set, made for this host (--hosts)?"
        ) from None
    if abs(ahead) > CLOCK_OFF:
        raise HardyError(
            f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's; at most "
            f"{CLOCK_OFF:g} s are allowed. Synchronise both (NTP)."
        )


@contextmanager
def until_stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Lives as long as the process, or until Ctrl-C or SIGTERM, and ends it."""
    stopped = threading.Event()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stopped.set())
    try:
        yield
        while process.poll() is None and not stopped.wait(0.5):
            pass
    finally:
        with suppress(ProcessLookupError):
            if process.poll() is None:
                process.terminate()  # a node that says goodbye is not waited for
                process.wait(10)
        stop_process(process)
    if not stopped.is_set():
        raise HardyError(f"Flower's process ended by itself (exit code {process.returncode}); its log above says why.")
