"""Starts a site's apps: a process that has loaded torch and Hardy, and forks itself for each message.

    python -m hardy.flower.fork_server SOCKET

Flower starts a process for every message, and each loads everything anew: seconds of a core. A fork has it all and
takes milliseconds; it is a process of its own as before, and it ends with its message. Nothing here starts a thread:
only a process with one thread may be forked.
"""

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import IO

from hardy.flower.processes import start_process, stop_process

AT_ONCE = 4 * (os.cpu_count() or 1)
"""apps of one machine that run at a time; orders beyond that wait, so that fifty nodes do not starve Flower"""
_LARGEST = 2**22
"""bytes of one order: arguments and an environment"""


class ForkServer:
    """The process, as whoever orders apps from it sees it."""

    def __init__(self, environment: Mapping[str, str], log: IO[bytes] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hardy-")  # 0700, and short: a socket's path has a limit
        self._path = str(Path(self._folder.name) / "apps")
        command = [sys.executable, "-m", "hardy.flower.fork_server", self._path]
        self.process: Popen[bytes] = start_process(command, environment, log)

    def order(self, arguments: Sequence[str], environment: Mapping[str, str], output: int) -> None:
        """Starts `flwr-clientapp` with arguments and an environment; what it says goes to an open file. OSError or
        ConnectionError if the process is not there (yet)."""
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(10)
            line.connect(self._path)
            socket.send_fds(line, [b"\0"], [output])
            line.sendall(json.dumps([list(arguments), dict(environment)]).encode())
            line.shutdown(socket.SHUT_WR)
            line.settimeout(None)  # others may be first
            if line.recv(1) != b"\1":
                raise ConnectionError("the process that starts apps has refused an order")

    def stop(self) -> None:
        stop_process(self.process)
        self._folder.cleanup()


def fork_apps(path: str) -> None:
    """Forks for every order, until it is killed or whoever made the folder has removed it."""
    _load()
    running = 0
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen(128)
        while True:
            running -= _ended(running, wait=running >= AT_ONCE)
            with suppress(OSError, ValueError), door.accept()[0] as line:
                line.settimeout(10)
                output = socket.recv_fds(line, 1, 1)[1]
                try:
                    (place,), (arguments, environment) = output, json.loads(_all(line))
                    if os.fork() == 0:
                        door.close()
                        _become(arguments, environment, place)
                    running += 1
                    line.sendall(b"\1")
                finally:
                    for handle in output:
                        os.close(handle)


def _ended(running: int, *, wait: bool) -> int:
    """How many apps have ended since the last look; waits for one if asked to."""
    found = 0
    while found < running and os.waitpid(-1, 0 if wait and not found else os.WNOHANG)[0]:
        found += 1
    return found


def _all(line: socket.socket) -> bytes:
    held = b""
    while len(held) < _LARGEST and (more := line.recv(2**16)):
        held += more
    return held


def _load() -> None:
    """All that an app will need, so that no fork has to."""
    import flwr.supernode.cli.flwr_clientapp
    import torch._dynamo  # which torch loads at the first step of an optimiser

    import hardy.flower.apps
    import hardy.flower.site_model
    import hardy.models
    import hardy.papers

    assert all((flwr, hardy, torch))
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page it looks at


def _become(arguments: list[str], environment: dict[str, str], output: int) -> None:
    """In the fork: the app's process, from here to its end."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the process it was forked from
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["flwr-clientapp", *arguments]
        from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

        flwr_clientapp()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    fork_apps(sys.argv[1])
