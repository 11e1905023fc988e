"""Apps are forked from a process that has loaded everything, and are processes of their own."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="the flower extra is not installed")

from flwr.proto.runtime_pb2 import AcquireTaskResponse
from flwr.proto.task_pb2 import Task

from hardy.flower import launcher as launchers
from hardy.flower.fork_server import ForkServer
from hardy.flower.launcher import Launcher
from hardy.flower.processes import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="apps are forked on Linux only")
APP = """
import json, os, sys
import hardy.flower.fork_server as fork_server
from types import SimpleNamespace

def app():
    print(json.dumps([sys.argv, os.environ.get("OF"), os.getpid(), os.getppid()]), flush=True)
    print("error", file=sys.stderr)
    sys.exit(3)

sys.modules["flwr.supernode.cli.flwr_clientapp"] = SimpleNamespace(flwr_clientapp=app)
fork_server._load = lambda: None
fork_server.fork_apps(sys.argv[1])
"""


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def fork_server(tmp_path, monkeypatch):
    """With an app that says who it is in place of Flower's."""
    real = subprocess.Popen

    def started(command, environment, log=None):
        return real([sys.executable, "-c", APP, command[-1]], env=dict(environment), start_new_session=True)

    monkeypatch.setattr("hardy.flower.fork_server.start_process", started)
    made = ForkServer(dict(os.environ))
    yield made
    made.stop()


def order(fork_server, words, environment, output):
    def come():
        try:
            fork_server.order(words, environment, output)
        except OSError:
            return False
        return True

    until(come)


def test_an_app_has_its_own_words_environment_and_output(fork_server, tmp_path):
    said = []
    for number in range(2):
        with (tmp_path / str(number)).open("wb") as log:
            order(fork_server, ["--token", str(number)], {"OF": f"node-{number}"}, log.fileno())
        until(lambda at=tmp_path / str(number): at.read_text().count("\n") == 2)
        first, second = (tmp_path / str(number)).read_text().splitlines()
        assert second == "error"
        said.append(json.loads(first))
    assert [one[:2] for one in said] == [[["flwr-clientapp", "--token", str(n)], f"node-{n}"] for n in range(2)]
    assert all(parent == fork_server.process.pid for *_, parent in said) and said[0][2] != said[1][2]
    with (tmp_path / "last").open("wb") as log:
        order(fork_server, [], {}, log.fileno())  # which buries the dead
    until(lambda: not any(os.path.exists(f"/proc/{one[2]}") for one in said))  # noqa: PTH110


def test_no_more_apps_run_at_once_than_may(tmp_path, monkeypatch):
    slow = APP.replace("sys.exit(3)", "import time; time.sleep(1)").replace(
        "fork_server._load", "fork_server.AT_ONCE = 2; fork_server._load"
    )
    monkeypatch.setattr(
        "hardy.flower.fork_server.start_process",
        lambda command, environment, log=None: subprocess.Popen(
            [sys.executable, "-c", slow, command[-1]], env=dict(environment), start_new_session=True
        ),
    )
    made, began = ForkServer(dict(os.environ)), None
    try:
        with (tmp_path / "log").open("wb") as log:
            for _ in range(5):
                order(made, [], {}, log.fileno())
                began = began or time.monotonic()
        assert time.monotonic() - began >= 1.9  # the third and the fifth waited for another's end
    finally:
        made.stop()


def test_apps_end_with_the_process_they_were_forked_from(tmp_path, monkeypatch):
    slow = APP.replace("sys.exit(3)", "import time; time.sleep(600)")
    monkeypatch.setattr(
        "hardy.flower.fork_server.start_process",
        lambda command, environment, log=None: subprocess.Popen(
            [sys.executable, "-c", slow, command[-1]], env=dict(environment), start_new_session=True
        ),
    )
    made = ForkServer(dict(os.environ))
    with (tmp_path / "log").open("wb") as log:
        order(made, [], {}, log.fileno())
    until(lambda: (tmp_path / "log").read_text().count("\n") == 2)
    app = json.loads((tmp_path / "log").read_text().splitlines()[0])[2]
    made.process.kill()
    made.process.wait()
    until(lambda: not Path(f"/proc/{app}").exists() or " Z " in Path(f"/proc/{app}/stat").read_text())
    made.stop()


def test_a_bad_order_harms_nobody(fork_server, tmp_path):
    import socket

    with (tmp_path / "log").open("wb") as log:
        order(fork_server, [], {}, log.fileno())
        for rubbish in (b"", b"\0", b"\0{]", b"\0" + b"9" * 10**6):
            with socket.socket(socket.AF_UNIX) as line, suppress(BrokenPipeError):
                line.connect(fork_server._path)
                line.sendall(rubbish)
        order(fork_server, [], {}, log.fileno())
    assert fork_server.process.poll() is None


def test_a_task_is_fetched_when_a_message_has_passed(monkeypatch, tmp_path):
    """And an order waits until the process that takes it has loaded."""
    tasks, orders, refused = [], [], iter([True, False])

    class Runtime:
        def AcquireTask(self, request):
            return tasks.pop() if tasks else AcquireTaskResponse()

    def ordered(words, environment, output):
        if next(refused, False):
            raise ConnectionRefusedError
        orders.append((words, environment))

    monkeypatch.setattr(launchers, "_runtime_client", lambda address: Runtime())
    monkeypatch.setattr(launchers, "_SELDOM", 60.0)
    node = SimpleNamespace(pid=42, ended=None, poll=lambda: node.ended, terminate=lambda: setattr(node, "ended", 1))
    process = SimpleNamespace(ended=None, poll=lambda: process.ended)
    shelter = SimpleNamespace(order=ordered, process=process)
    with (tmp_path / "log").open("wb") as log:
        made = Launcher("127.0.0.1:1", node, shelter, {"A": "b"}, log)
    tasks.append(AcquireTaskResponse(token="abc", task=Task(task_id=1)))
    time.sleep(0.3)
    assert tasks  # nobody has said so
    made.ring()
    until(lambda: orders)
    words = ["--runtime-api-address", "127.0.0.1:1", "--token", "abc", "--insecure", "--parent-pid", "42"]
    assert orders == [(words, {"A": "b"})]
    process.ended, shelter.order = 1, lambda *_: (_ for _ in ()).throw(FileNotFoundError())
    tasks.append(AcquireTaskResponse(token="abc", task=Task(task_id=2)))
    made.ring()
    until(lambda: node.ended)  # without it the node could do nothing: whoever watches it starts it again


def test_a_port_is_given_once_and_never_one_of_a_connection():
    """A SuperNode takes its port seconds later, and fifty nodes make thousands of connections meanwhile."""
    given = [free_port() for _ in range(200)]
    assert len(set(given)) == 200 and max(given) < 32_000
