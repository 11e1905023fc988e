"""The same round over a network: slots are trained on Flower's nodes, and their answers are what the server gets.

This is the server's half. It needs of Flower only a `Grid`: who is online, send messages, fetch replies. The clients'
half is hardy.flower.node.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hardy import tensors
from hardy.client import Training
from hardy.data.splits import Client, Federation
from hardy.engines.base import Engine
from hardy.errors import HardyError
from hardy.flower import wire
from hardy.messages import Answer, Slot, Work
from hardy.method import Plan
from hardy.partition import Placement
from hardy.parts.compression import Compression
from hardy.state import ServerState

_PAUSE = 0.2
"""seconds between two looks for replies; Flower's own send_and_receive takes 3"""
_AGAIN = 60.0
"""seconds until a node that could not take part is asked again who it is"""
_LOG = logging.getLogger("flwr")
KINDS = ("", "AT", "ST")


@dataclass(frozen=True, kw_only=True)
class Network:
    """`[network]`: what a run over Flower expects of its nodes."""

    clients: int | None = None
    """nodes the run is for; absent: as many as [data] makes clients"""
    deadline: float = 600.0
    """seconds a round waits for a reply"""
    replies: int = 1
    """fewest replies a round needs; with fewer the missing clients are asked again"""
    patience: float = 1800.0
    """seconds to wait for the first roll call, or for enough replies, before giving up"""
    compression: Compression | None = None
    """of what clients send up; absent: every bit travels, and the run is that of the other engines"""

    def __post_init__(self) -> None:
        for name in ("deadline", "patience"):
            if not getattr(self, name) > 0:
                raise HardyError(f"network.{name} is {getattr(self, name)}; it must be above 0 seconds.")
        if self.replies < 1:
            raise HardyError(f"network.replies is {self.replies}; it must be 1 or more.")
        if self.clients is not None and self.clients < 1:
            raise HardyError(f"network.clients is {self.clients}; it must be 1 or more, or absent.")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a node says of itself once: counts and words, no image, no label."""

    client: int
    domain: str
    kind: str
    budget: float
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
            domain, kind, budget = _line(given["domain"], 100), given["kind"], float(given["budget"])
        except Exception as error:  # whatever a hostile node puts there
            raise ValueError(f"no profile in it ({type(error).__name__}: {_line(error)})") from None
        if not 0 <= counts["client"] < clients:
            raise ValueError(f"client {counts['client']}, but they run from 0 to {clients - 1}")
        if counts["train"] < 1 or min(counts.values()) < 0 or max(counts.values()) > 10**9:
            raise ValueError(f"counts {counts}; a client holds 1 training example or more")
        if len(shape) != 3 or not 1 <= min(shape) <= max(shape) <= 10**6 or not classes:
            raise ValueError(f"images {_line(shape)} of {len(classes)} classes")
        if kind not in KINDS or not 0 < budget <= 1:
            raise ValueError(f"kind {_line(kind)!r}, must be AT, ST or empty; budget {budget}, must be in (0, 1]")
        return Profile(
            **counts, domain=domain, kind=kind, budget=budget, shape=(shape[0], shape[1], shape[2]), classes=classes
        )


@dataclass
class Roll:
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
            time.sleep(_PAUSE)

    def ledger(self) -> Federation:
        """The federation as the server knows it: who holds how many rows, and no row."""
        profiles = [self.profiles[client] for client in range(self.clients)]
        first = profiles[0]
        for profile in profiles:
            if (profile.shape, profile.classes) != (first.shape, first.classes):
                raise HardyError(
                    f"client {profile.client} holds images {profile.shape} of {len(profile.classes)} classes, client 0 "
                    f"{first.shape} of {len(first.classes)}. Bring all nodes' data to one shape and list of classes."
                )
        held = np.cumsum([0, *(p.train + p.validation for p in profiles)])
        tested = np.cumsum([0, *(p.test for p in profiles)])
        nothing = np.zeros((), np.uint8)
        return Federation(
            name="network",
            classes=first.classes,
            x_train=np.broadcast_to(nothing, (held[-1], *first.shape)),
            y_train=np.broadcast_to(np.int64(0), held[-1:]),
            x_test=np.broadcast_to(nothing, (tested[-1], *first.shape)),
            y_test=np.broadcast_to(np.int64(0), tested[-1:]),
            clients=tuple(
                Client(
                    domain=p.domain,
                    kind=p.kind,
                    budget=p.budget,
                    train=np.arange(start, start + p.train),
                    validation=np.arange(start + p.train, start + p.train + p.validation),
                    test=np.arange(first_test, first_test + p.test),
                )
                for p, start, first_test in zip(profiles, held, tested, strict=False)
            ),
        )


def without_rows(folder: Path) -> Federation:
    """The federation of a run whose rows are its nodes' own: enough to build its networks, nothing to measure on."""
    profiles = json.loads((folder / "network.json").read_text("utf-8"))["clients"]
    first, nobody = profiles[0], np.zeros(0, np.int64)
    return Federation(
        name="network",
        classes=tuple(first["classes"]),
        x_train=np.zeros((1, *first["shape"]), np.uint8),
        y_train=np.zeros(1, np.int64),
        x_test=np.zeros((0, *first["shape"]), np.uint8),
        y_test=nobody,
        clients=tuple(
            Client(
                domain=p["domain"],
                kind=p["kind"],
                budget=p["budget"],
                train=np.zeros(p["train"], np.int64),
                validation=nobody,
                test=nobody,
            )
            for p in profiles
        ),
    )


class Flower(Engine):
    """Asks nodes, through a Grid. Private tensors, images and labels stay with them."""

    name = "flower"
    remote = True

    def __init__(
        self,
        plan: Plan,
        data: Federation,
        training: Training,
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        roll: Roll,
        network: Network,
        token: str,
    ) -> None:
        if plan.method.pooled:
            raise HardyError(
                f"method {plan.method.name!r} trains on all clients' rows together; over a network nobody holds them. "
                "Run it with another engine."
            )
        self.plan, self.data, self.training, self.seed = plan, data, training, seed
        self.device, self.dtype, self.lane, self.first = device, dtype, None, 0
        self.roll, self.network, self.token = roll, network, token
        plan.model.to(device, dtype)
        self.train_rows = [client.train for client in data.clients]
        self.store = {}
        self._wire: dict[str, dict[str, int]] = {}

    def account(self, line: dict[str, Any]) -> dict[str, Any]:
        """The bytes of each client; refusals, which the server decides on, go to the log as well."""
        for client, why in line["lost"].items():
            if why.startswith("refused"):
                _LOG.warning("round %d: client %s %s", line["round"], client, why)
        return {"wire": self._wire}

    def train(self, work: Work) -> Iterator[Sequence[Answer] | dict[int, str]]:  # type: ignore[override]
        """The answers of each client as they come in, then why the others will not answer."""
        slots: dict[int, list[Slot]] = {}
        for slot in work.slots:
            slots.setdefault(slot.client, []).append(slot)
        sent = {base: wire.pack(tensors.gather(work.shared, base)) for base in {slot.base for slot in work.slots}}
        self._wire = {}

        def content(client: int) -> Any:
            records = {f"shared/{slot.base}": sent[slot.base] for slot in slots[client]}
            if work.reported:
                for slot in slots[client]:
                    records[f"reported/{slot.base}"] = wire.pack(tensors.gather(work.reported, client, slot.base))
            return self._message(
                records, client, round=work.round, rate=work.rate, bases=[s.base for s in slots[client]]
            )

        for client, came in self._ask("train", work.round, list(slots), content, least=self.network.replies):
            if isinstance(came, str):
                yield {client: came}
            else:
                yield [self._answer(came, slot, work) for slot in slots[client]]

    def _answer(self, content: Any, slot: Slot, work: Work) -> Answer:
        said, shared = wire.figures(content, f"figures/{slot.base}"), wire.unpack(content, f"shared/{slot.base}")
        if rule := self.network.compression:
            shared = wire.expand(rule, shared, tensors.gather(work.shared, slot.base), squeezed(self.plan))
        return Answer(
            slot=slot,
            round=said.get("round"),
            shared=shared,
            reported=wire.unpack(content, f"reported/{slot.base}"),
            examples=said.get("examples"),
            steps=said.get("steps"),
            loss=said.get("loss"),
        )

    def accuracies(self, state: ServerState, branch: str, threats: Sequence[str] = ()) -> list[list[float | None]]:
        """The share of validation and of test rows that each client classifies rightly, and of test rows under each
        threat, as the nodes say."""
        shared, asked = wire.pack(state.shared), {"threats": list(threats)} if threats else {}
        found: list[list[float | None]] = [[None] * len(self.data.clients) for _ in range(2 + len(threats))]

        def content(client: int) -> Any:
            own = {"reported": wire.pack(tensors.gather(state.reported, client))} if state.reported else {}
            return self._message({"shared": shared, **own}, client, round=state.round, branch=branch, **asked)

        for client, came in self._ask("evaluate", state.round - 1, range(len(self.data.clients)), content):
            if isinstance(came, str):
                continue
            said = wire.figures(came, "accuracy")
            if said.get("round") != state.round:
                _LOG.warning("round %d, evaluate: client %d refused: figures of another round", state.round, client)
                continue
            for place, part in enumerate(("validation", "test", *threats)):
                value = said.get(part)
                if isinstance(value, float) and 0 <= value <= 1:
                    found[place][client] = value
        return found

    def _message(self, records: dict[str, Any], client: int, **settings: Any) -> Any:
        return wire.message(records, **settings, experiment=self.roll.experiment, client=client, token=self.token)

    def _ask(
        self, kind: str, round: int, clients: Sequence[int], content: Callable[[int], Any], *, least: int = 0
    ) -> Iterator[tuple[int, Any]]:
        """(client, reply's content or why there is none), as they come. With fewer than `least` replies at the
        deadline, those that have not answered are asked again."""
        waiting, heard, lost = list(clients), 0, dict[int, str]()
        end = time.monotonic() + self.network.patience
        while waiting:
            began, nodes, earlier = time.monotonic(), self.roll.refresh(), lost
            lost = {client: "away: its node is not online" for client in waiting if client not in nodes}
            pending: dict[str, int] = {}
            for client in (c for c in waiting if c in nodes):  # one by one: only one message is held at a time
                asked = content(client)
                self._count(client, "down", asked)
                if number := self.roll.push(kind, asked, nodes[client], str(round), self.network.deadline):
                    pending[number] = client
                else:
                    lost[client] = "failed: the SuperLink did not take the message"
            while pending and time.monotonic() - began < self.network.deadline:
                for number, client in list(pending.items()):
                    if (reply := self.roll.pull(number)) is None:
                        continue
                    del pending[number]
                    if isinstance(reply, str):
                        lost[client] = reply
                        continue
                    heard += 1
                    waiting.remove(client)
                    self._count(client, "up", reply)
                    yield client, reply
                if pending:
                    time.sleep(min(3.0, max(_PAUSE, 0.1 * len(pending))))  # every look is a request for each
            lost |= dict.fromkeys(pending.values(), f"silent: no reply within {self.network.deadline:g} s")
            for client, why in lost.items() - earlier.items():
                _LOG.warning("round %d, %s: client %d %s", round + 1, kind, client, why)
            if heard >= min(least, len(clients)):
                break
            if time.monotonic() > end:
                raise HardyError(
                    f"round {round + 1}: {heard} replies within {self.network.patience:g} s, but network.replies is "
                    f"{least}. Start the missing nodes and go on with the same folder; nothing is lost."
                )
            if lost != earlier:
                _LOG.warning("round %d: %d replies of the %d needed; asking again", round + 1, heard, least)
            time.sleep(5 * _PAUSE)
        _LOG.info("round %d, %s: %d of %d clients answered", round + 1, kind, heard, len(clients))
        yield from ((client, lost[client]) for client in waiting)

    def _count(self, client: int, way: str, content: Any) -> None:
        counts = self._wire.setdefault(str(client), {"down": 0, "up": 0})
        counts[way] += wire.size(content)


def squeezed(plan: Plan) -> list[str]:
    """The tensors that compression is for: shared ones that clients train."""
    return [name for name in plan.trained if plan.placement[name] is Placement.SHARED]


def _line(text: object, most: int = 100) -> str:
    """Words from outside as a piece of one line of a log."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:most])
