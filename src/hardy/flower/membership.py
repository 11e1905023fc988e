"""Who is there: what nodes say of themselves, and which of them is which client."""

import logging
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from hardy.errors import HardyError
from hardy.flower import wire
from hardy.runs.profiles import Profile, printable

PAUSE = 0.2
"""seconds between two looks for replies; Flower's own send_and_receive takes 3"""
_AGAIN = 60.0
"""seconds until a node that could not take part is asked again who it is"""
_LOG = logging.getLogger("flwr")


@dataclass
class Membership:
    """Which node is which client, by the nodes' own profiles: the first to claim a number has it while it is online."""

    grid: Any
    experiment: str
    clients: int
    profiles: dict[int, Profile] = field(default_factory=dict)
    """as first registered; a node that comes back must still have the same"""
    nodes: dict[int, int] = field(default_factory=dict)
    """client -> node id"""
    _asked: dict[int, str] = field(default_factory=dict)
    """node id -> number of the message that asks who it is"""
    _greeted: dict[int, float] = field(default_factory=dict)
    """node id -> when it was sent"""

    def refresh(self) -> dict[int, int]:
        """Client -> node id of those online now. Nodes not seen before are greeted; their answer counts next time."""
        online = set(self.grid.get_node_ids())
        self.nodes = {client: node for client, node in self.nodes.items() if node in online}
        self._asked = {node: number for node, number in self._asked.items() if node in online}
        self._greeted = {node: when for node, when in self._greeted.items() if node in online}
        for node, number in list(self._asked.items()):
            if (reply := self.pull(number)) is not None:
                del self._asked[node]
                self._register(node, reply)
        now = time.monotonic()
        for node in sorted(online - self._asked.keys() - set(self.nodes.values())):
            if now - self._greeted.get(node, -_AGAIN) >= _AGAIN:
                self._greeted[node] = now
                if question := self.push("query", wire.message({}, experiment=self.experiment), node, "roll"):
                    self._asked[node] = question
        return self.nodes

    def push(self, kind: str, content: Any, node: int, group: str, ttl: float | None = None) -> str | None:
        """Sends a message; returns its number, or None if the SuperLink did not take it."""
        from flwr.app import Message

        (number,) = self.grid.push_messages([Message(content, node, kind, group_id=group, ttl=ttl)]) or (None,)
        return number or None

    def pull(self, number: str) -> Any:
        """The content of the reply to a message, or in words why there will be none; None: not yet.

        One at a time: a reply made to break its reader takes no other with it, and only one is in memory.
        """
        try:
            for reply in self.grid.pull_messages([number]):
                return f"failed: {printable(reply.error.reason, 300)}" if reply.has_error() else reply.content
        except Exception as error:
            return f"refused: cannot be read ({type(error).__name__}: {printable(error)})"
        return None

    def _register(self, node: int, reply: Any) -> None:
        if isinstance(reply, str):
            _LOG.warning("node %s cannot take part: %s", node, reply)
            return
        try:
            profile = Profile.read(wire.settings(reply).get("profile"), self.clients)
        except ValueError as error:
            _LOG.warning("node %s is refused: %s.", node, error)
            return
        taken, first = self.nodes.get(profile.client), self.profiles.get(profile.client)
        if taken is not None and taken != node:
            _LOG.warning("node %s is refused: node %s is client %d already.", node, taken, profile.client)
        elif first is not None and first != profile:
            differ = [name for name, value in asdict(first).items() if value != asdict(profile)[name]]
            _LOG.warning(
                "node %s is refused: client %d registered with another %s.", node, profile.client, ", ".join(differ)
            )
        else:
            _LOG.info("client %d is node %s: %s, %d examples", profile.client, node, profile.domain, profile.train)
            self.nodes[profile.client], self.profiles[profile.client] = node, profile

    def wait(self, patience: float, grace: float) -> None:
        """Until every client is there; those that registered before are waited for only so long."""
        began = time.monotonic()
        while len(self.refresh()) < self.clients:
            waited = time.monotonic() - began
            if len(self.profiles) == self.clients and self.nodes and waited > grace:
                return
            if waited > patience:
                missing = sorted(set(range(self.clients)) - self.nodes.keys())
                raise HardyError(
                    f"clients {missing} did not register within {patience:g} s (network.patience). Start their nodes, "
                    "or ask for fewer (network.clients)."
                )
            time.sleep(PAUSE)
