"""Who is there: what nodes say of themselves, and which of them is which client."""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hardy.core.federation import Client, Federation
from hardy.core.state import write_atomic
from hardy.errors import HardyError
from hardy.flower import wire

PAUSE = 0.2
"""seconds between two looks for replies; Flower's own send_and_receive takes 3"""
_AGAIN = 60.0
"""seconds until a node that could not take part is asked again who it is"""
_LOG = logging.getLogger("flwr")
KINDS = ("", "AT", "ST")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a node says of itself once: counts and words, no image, no label."""

    client: int
    domain: str
    kind: str
    capacity: float
    train: int
    validation: int
    test: int
    shape: tuple[int, int, int]
    classes: tuple[str, ...]

    def words(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: Any, clients: int) -> "Profile":
        """A profile from outside; ValueError with the reason if it cannot be one."""
        try:
            given = json.loads(text)
            shape, classes = tuple(map(int, given["shape"])), tuple(map(str, given["classes"]))
            counts: dict[str, Any] = {name: int(given[name]) for name in ("client", "train", "validation", "test")}
            domain, kind, capacity = _line(given["domain"], 100), given["kind"], float(given["capacity"])
        except Exception as error:  # whatever a hostile node puts there
            raise ValueError(f"no profile in it ({type(error).__name__}: {_line(error)})") from None
        if not 0 <= counts["client"] < clients:
            raise ValueError(f"client {counts['client']}, but they run from 0 to {clients - 1}")
        if counts["train"] < 1 or min(counts.values()) < 0 or max(counts.values()) > 10**9:
            raise ValueError(f"counts {counts}; a client holds 1 training example or more")
        if len(shape) != 3 or not 1 <= min(shape) <= max(shape) <= 10**6 or not classes:
            raise ValueError(f"images {_line(shape)} of {len(classes)} classes")
        if kind not in KINDS or not 0 < capacity <= 1:
            raise ValueError(f"kind {_line(kind)!r}, must be AT, ST or empty; capacity {capacity}, must be in (0, 1]")
        return Profile(
            **counts, domain=domain, kind=kind, capacity=capacity, shape=(shape[0], shape[1], shape[2]), classes=classes
        )


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
                return f"failed: {_line(reply.error.reason, 300)}" if reply.has_error() else reply.content
        except Exception as error:
            return f"refused: cannot be read ({type(error).__name__}: {_line(error)})"
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


def placeholder_federation(profiles: Sequence[Profile]) -> Federation:
    """The federation as the server knows it: who holds how many rows, and no row. All of them are one blank image."""
    first = profiles[0]
    for profile in profiles:
        if (profile.shape, profile.classes) != (first.shape, first.classes):
            raise HardyError(
                f"client {profile.client} holds images {profile.shape} of {len(profile.classes)} classes, client 0 "
                f"{first.shape} of {len(first.classes)}. Bring all nodes' data to one shape and list of classes."
            )
    blank, label = np.zeros((1, *first.shape), np.uint8), np.zeros(1, np.int64)
    return Federation(
        name="network",
        classes=first.classes,
        x_train=blank,
        y_train=label,
        x_test=blank,
        y_test=label,
        clients=tuple(
            Client(
                domain=p.domain,
                kind=p.kind,
                capacity=p.capacity,
                train=np.zeros(p.train, np.int64),
                validation=np.zeros(p.validation, np.int64),
                test=np.zeros(p.test, np.int64),
            )
            for p in profiles
        ),
    )


def remembered(folder: Path) -> tuple[str, list[Profile]]:
    """The token of a run over a network, and its clients in order, as its folder has them."""
    try:
        known = json.loads((folder / "network.json").read_text("utf-8"))
        found = [Profile.read(json.dumps(profile), len(known["clients"])) for profile in known["clients"]]
        return str(known["token"]), found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HardyError(
            f"{folder} holds a run but no network.json that can be read ({error}): it was not made over a network, or "
            "its nodes would not find their private tensors again. Choose another folder."
        ) from None


def remember(folder: Path, token: str, profiles: Sequence[Profile]) -> None:
    """What `remembered` reads."""
    known = {"token": token, "clients": [asdict(profile) for profile in profiles]}
    write_atomic(folder / "network.json", json.dumps(known, indent=1).encode())


def without_rows(folder: Path) -> Federation:
    """The federation of a run whose rows are its nodes' own: enough to build its networks, nothing to measure on."""
    return placeholder_federation([replace(profile, validation=0, test=0) for profile in remembered(folder)[1]])


def _line(text: object, most: int = 100) -> str:
    """Words from outside as a piece of one line of a log."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:most])
