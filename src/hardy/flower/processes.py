"""Flower's processes: started with their look-ups off, and ended with all their children."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from hardy.flower import ENVIRONMENT

_DIE = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
"""becomes the command that follows, to be killed when its parent dies (PR_SET_PDEATHSIG); Flower's own children then
miss their parent and end"""
_PORTS = range(20_000, 32_000)
_GIVEN: set[int] = set()
_MORTAL = [sys.executable, "-c", _DIE] if sys.platform == "linux" else []


def quiet_environment(**more: str) -> dict[str, str]:
    """This process's environment with Flower's telemetry and look-ups off, and its commands on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **ENVIRONMENT, "PATH": path, **more}


def start_process(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a process in a group of its own."""
    return subprocess.Popen(
        [*_MORTAL, *command],
        stdout=log,
        stderr=subprocess.STDOUT if log else None,
        stdin=subprocess.DEVNULL,
        env=dict(environment),
        start_new_session=True,
    )


def stop_process(process: subprocess.Popen[bytes], how: signal.Signals = signal.SIGKILL) -> None:
    """Ends a process with all its children. Some of Flower's are leaders of groups of their own."""
    family = descendants(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, how)
    for child in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, how)
    process.wait()


def listens(port: int, process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits until the process listens on a port of this machine; False if it ended or took too long."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        if process.poll() is not None or time.monotonic() > end:
            return False
        time.sleep(0.2)


def free_port() -> int:
    """A port of this machine for a process that is slow to take it: below those that systems give to connections, and
    never the same twice."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as found, contextlib.suppress(OSError):
            if port not in _GIVEN:
                found.bind(("127.0.0.1", port))
                _GIVEN.add(port)
                return port


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
