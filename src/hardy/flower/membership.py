"""Who is there: what nodes say of themselves, and which of them is which client."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hardy.errors import HardyError, printable
from hardy.flower import wire
from hardy.flower.limits import ReplyMeter, ReplyTooLarge
from hardy.runs.profiles import Profile

PAUSE = 0.2
"""seconds between two looks for replies; Flower's own send_and_receive takes 3"""
_SELDOM = 5.0
"""seconds between two looks for the reply of a node that has sent nothing; Flower may have an error of its own"""
_AGAIN = 60.0
"""seconds until a node that could not take part is asked again who it is"""
_LOG = logging.getLogger("flwr")


@dataclass
class Membership:
    """Which node is which client, by the nodes' own profiles: the first to claim a number has it while it is online."""

    grid: Any
    experiment: str
    clients: int
    certified: Callable[[], dict[int, int]] | None = None
    """client -> node id, by the certificates that nodes have shown; None where nobody checks them"""
    ring: Callable[[int], None] = lambda node: None
    """says that there is a message for a node"""
    heard: Callable[[int], int] | None = None
    """when a node has last sent something; None where nobody knows"""
    profiles: dict[int, Profile] = field(default_factory=dict)
    """as first registered; a node that comes back must still have the same"""
    nodes: dict[int, int] = field(default_factory=dict)
    """client -> node id"""
    _asked: dict[int, str] = field(default_factory=dict)
    """node id -> number of the message that asks who it is"""
    _greeted: dict[int, float] = field(default_factory=dict)
    """node id -> when it was sent"""
    _looks: dict[int, tuple[str, int, float]] = field(default_factory=dict)
    """node id -> the message whose reply was last looked for, what had been heard then, and when that was"""
    most_rows: int = 10**7
    """rows that a client may say it holds"""
    refused: dict[int, str] = field(default_factory=dict)
    """client -> why its last profile was refused"""

    def __post_init__(self) -> None:
        self._meter = ReplyMeter(self.grid)

    def refresh(self) -> dict[int, int]:
        """Client -> node id of those online now. Nodes not seen before are greeted; their answer counts next time."""
        online = set(self.grid.get_node_ids())
        if self.certified is not None:  # a node that was started again has another id; others are not even greeted
            known = self.certified()
            online &= set(known.values())
            self.nodes = {client: node for client, node in self.nodes.items() if known.get(client) == node}
        self.nodes = {client: node for client, node in self.nodes.items() if node in online}
        self._asked = {node: number for node, number in self._asked.items() if node in online}
        self._greeted = {node: when for node, when in self._greeted.items() if node in online}
        for node, number in list(self._asked.items()):
            if self.due(node, number) and (reply := self.pull(number)) is not None:
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
        self.ring(node)
        return number or None

    def due(self, node: int, number: str) -> bool:
        """Whether to look for the reply to a message: each look is a request, and with many nodes most find nothing. It
        is if the node has sent something since the last look, or a while has passed."""
        if self.heard is None:
            return True
        now, last = time.monotonic(), self._looks.get(node)
        sent = self.heard(node)
        if last is not None and last[:2] == (number, sent) and now - last[2] < _SELDOM:
            return False
        self._looks[node] = number, sent, now
        return True

    def pull(self, number: str, most: int = 2**20) -> Any:
        """The content of the reply to a message, or in words why there will be none; None: not yet.

        One at a time: a reply made to break its reader takes no other with it. One of more than `most` bytes is refused
        while it is fetched, and in any case before it is decoded.
        """
        try:
            with self._meter.limit(2 * most):
                found = self.grid.pull_messages([number])
            for reply in found:
                if reply.has_error():
                    return f"failed: {printable(reply.error.reason, 300)}"
                if (size := wire.size(reply.content)) > most:
                    return f"refused: a reply of {size} bytes, limit {most}"
                return reply.content
        except ReplyTooLarge as error:
            return f"refused: a reply of {error}"
        except Exception as error:
            return f"refused: cannot be read ({type(error).__name__}: {printable(error)})"
        return None

    def _register(self, node: int, reply: Any) -> None:
        if isinstance(reply, str):
            _LOG.warning("node %s cannot take part: %s", node, reply)
            return
        try:
            profile = Profile.read(wire.settings(reply).get("profile"), self.clients, self.most_rows)
        except ValueError as error:
            _LOG.warning("node %s is refused: %s.", node, error)
            certified = self.certified() if self.certified else {}
            self.refused |= {client: str(error) for client, known in certified.items() if known == node}
            return
        if self.certified is not None and self.certified().get(profile.client) != node:
            _LOG.warning("node %s is refused: its certificate is not that of client %d.", node, profile.client)
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
        """Until every client is there. Those that registered before, and those that were refused, are waited for only
        so long: then the run goes on without them."""
        began = time.monotonic()
        while True:
            self.refresh()
            self._refuse_odd()
            missing = sorted(set(range(self.clients)) - self.nodes.keys())
            if not missing:
                return
            waited = time.monotonic() - began
            known = self.profiles.keys() | self.refused.keys()
            if self.nodes and known.issuperset(missing) and waited > min(grace, patience):
                self._do_without([client for client in missing if client not in self.profiles])
                return
            if waited > patience:
                why = "".join(f" Client {c} was refused: {self.refused[c]}." for c in missing if c in self.refused)
                raise HardyError(
                    f"clients {missing} did not register within {patience:g} s (network.patience).{why} Start their "
                    "nodes, or ask for fewer (network.clients)."
                )
            time.sleep(PAUSE)

    def _refuse_odd(self) -> None:
        """Refuses clients whose inputs or classes are not those of most. With as many of one kind as of another nobody
        is refused, and placeholder_federation says so."""
        kinds = Counter((profile.shape, profile.classes) for profile in self.profiles.values()).most_common()
        if len(kinds) < 2 or kinds[0][1] == kinds[1][1]:
            return
        (shape, classes), _ = kinds[0]
        for client, profile in list(self.profiles.items()):
            if (profile.shape, profile.classes) != (shape, classes):
                self.refused[client] = (
                    f"it holds inputs {profile.shape} of {len(profile.classes)} classes, most clients {shape} of "
                    f"{len(classes)}"
                )
                _LOG.warning("node %s is refused: %s.", self.nodes.get(client), self.refused[client])
                self.nodes.pop(client, None)
                del self.profiles[client]

    def _do_without(self, clients: list[int]) -> None:
        """One refused node must not end everybody's run: its number stays, as a client of one row that is never there.
        It stays out until the end, since the federation is fixed from here on."""
        like = next(iter(self.profiles.values()))
        for client in clients:
            _LOG.warning("the run goes on without client %d, which was refused: %s.", client, self.refused[client])
            self.profiles[client] = replace(
                like,
                client=client,
                domain="refused",
                kind="ST" if like.kind else "",
                train=1,
                validation=0,
                test=0,
            )
