"""Starts a node's apps: fetches the task of each message that has come from the SuperNode, and orders a process for it.

It takes the place of Flower's `flower-superexec`, which asks the SuperNode all the time whether there is work. Here the
node's end of the network, which has seen the message pass, says so.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping
from subprocess import Popen
from typing import IO, Any

from hardy.flower.fork_server import ForkServer

_SELDOM = 3.0
"""seconds between two questions if nobody has said that there is work"""
_OFTEN = 0.05
_FOR = 5.0
"""seconds of asking often, once a message has passed"""
_LOG = logging.getLogger("hardy.deploy")


class Launcher:
    """A thread that ends with the node's process."""

    def __init__(
        self,
        runtime: str,
        node: Popen[bytes],
        fork_server: ForkServer,
        environment: Mapping[str, str],
        log: IO[bytes] | None = None,
    ) -> None:
        self.runtime, self.node, self.fork_server = runtime, node, fork_server
        self.environment, self._output = dict(environment), os.dup(log.fileno() if log else 2)
        self._come = threading.Event()
        threading.Thread(target=self._work, daemon=True).start()

    def ring(self) -> None:
        """A message has come."""
        self._come.set()

    def _work(self) -> None:
        client = _runtime_client(self.runtime)
        while self.node.poll() is None:
            rung = self._come.wait(_SELDOM)
            self._come.clear()
            end = time.monotonic() + (_FOR if rung else 0)
            while not self._launch(client) and time.monotonic() < end and self.node.poll() is None:
                time.sleep(_OFTEN)
        os.close(self._output)

    def _launch(self, client: Any) -> bool:
        """Whether there was a task."""
        from flwr.proto.runtime_pb2 import AcquireTaskRequest

        try:
            found = client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-clientapp"]))
        except Exception:  # Flower's client has a class of its own for each mistake; the SuperNode may not be up yet
            return False
        if not (found.HasField("task") and found.token):
            return False
        words = ["--runtime-api-address", self.runtime, "--token", found.token, "--insecure"]
        words += ["--parent-pid", str(self.node.pid)]
        while self.node.poll() is None:
            try:
                self.fork_server.order(words, self.environment, self._output)
                return True
            except OSError as error:
                if self.fork_server.process.poll() is not None:
                    _LOG.warning("no app can be started, so the node ends: %s", error)
                    self.node.terminate()
                time.sleep(_OFTEN)  # it is loading
        return True


def _runtime_client(address: str) -> Any:
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
    )
