"""The same round over a network: slots are trained on Flower's nodes, and their answers are what the server gets.

This is the server's half. It needs of Flower only a `Grid`: who is online, send messages, fetch replies. The clients'
half is hardy.flower.node.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hardy.attacks.threats import parse_threat
from hardy.config import NetworkChoice
from hardy.core import tensors
from hardy.core.engine import Branches, Question
from hardy.core.federation import Federation
from hardy.core.messages import Answer, Slot, Updates, Work
from hardy.core.method import Plan
from hardy.core.partition import Placement
from hardy.core.state import ServerState
from hardy.core.store import ClientStore, MemoryStore
from hardy.core.tensors import Tensors
from hardy.core.training import Training
from hardy.errors import HardyError
from hardy.flower import wire
from hardy.flower.membership import PAUSE, Membership

_EACH = 0.1
"""seconds between two looks for each reply that is missing: every look is a request for each"""
_LATER = 60.0
"""seconds for which Flower keeps a message beyond the deadline: we decide who was silent, not a message that is gone"""
_LOG = logging.getLogger("flwr")


class Flower:
    """Asks nodes, through a Grid, to train and to measure. Private tensors, images and labels stay with them."""

    name: Literal["flower"] = "flower"

    def __init__(
        self,
        plan: Plan,
        data: Federation,
        training: Training,
        *,
        device: torch.device,
        dtype: torch.dtype,
        roll: Membership,
        network: NetworkChoice,
        token: str,
    ) -> None:
        if plan.method.pooled:
            raise HardyError(
                f"method {plan.method.name!r} trains on all clients' rows together; over a network nobody holds them. "
                "Run it with another engine."
            )
        if plan.synchronised:
            raise HardyError(
                "norm synchronised needs all clients of a step in one call; over a network they step by themselves. "
                "Take norm federated or hybrid."
            )
        self.plan, self.data, self.training = plan, data, training
        self.device, self.dtype = device, dtype
        self.roll, self.network, self.token = roll, network, token
        plan.model.to(device, dtype)
        self.train_rows: Sequence[Any] = [client.train for client in data.clients]
        self._wire: dict[str, dict[str, int]] = {}
        self._silent: dict[tuple[int, int], str] = {}
        """(round, client) -> why it is not asked again in that round"""

    @property
    def store(self) -> ClientStore:
        """Nothing: clients keep their private tensors."""
        return MemoryStore({})

    @store.setter
    def store(self, values: Mapping[str, Tensor]) -> None:
        assert not values, "clients keep their private tensors"

    def new_store(self, first: Tensors, clients: int) -> ClientStore:
        """What holds the clients' reported tensors."""
        return MemoryStore.filled(self.cast(first), clients)

    def cast(self, values: Mapping[str, Tensor]) -> Tensors:
        """Onto the server's device, in its precision."""
        return tensors.apply(lambda t: t.to(self.device, self.dtype if t.is_floating_point() else None), values)

    def expect(self, round_number: int, slots: Sequence[Slot]) -> None:
        """Nodes are told when it is time."""

    def account(self, line: dict[str, Any]) -> dict[str, Any]:
        """The bytes of each client; refusals, which the server decides on, go to the log as well."""
        for client, why in line["lost"].items():
            if why.startswith("refused"):
                _LOG.warning("round %d: client %s %s", line["round"], client, why)
        return {"wire": self._wire}

    def train(self, work: Work) -> Iterator[Updates | Sequence[Answer] | dict[int, str]]:
        """The answers of each client, in the order of clients, then why the others will not answer."""
        slots: dict[int, list[Slot]] = {}
        for slot in work.slots:
            slots.setdefault(slot.client, []).append(slot)
        sent = {base: wire.pack(tensors.gather(work.shared, base)) for base in {slot.base for slot in work.slots}}
        self._wire = {}

        def content(client: int) -> Any:
            records = {f"shared/{slot.base}": sent[slot.base] for slot in slots[client]}
            if work.reported:
                for slot in slots[client]:
                    records[f"reported/{slot.base}"] = wire.pack(tensors.gather(work.reported.read([slot]), 0))
            return self._message(
                records, client, round=work.round, rate=work.rate, bases=[s.base for s in slots[client]]
            )

        for client, came in self._ask("train", work.round, list(slots), content, least=self.network.replies):
            if isinstance(came, str):
                yield {client: came}
            else:
                yield [self._answer(came, slot, work) for slot in slots[client]]

    def _answer(self, content: Any, slot: Slot, work: Work) -> Answer:
        said, shared = (
            wire.reply_figures(content, f"figures/{slot.base}"),
            wire.unpack_arrays(content, f"shared/{slot.base}"),
        )
        if rule := self.network.compression:
            shared = wire.expand(rule, shared, tensors.gather(work.shared, slot.base), compressed_names(self.plan))
        return Answer(
            slot=slot,
            round=said.get("round"),
            shared=shared,
            reported=wire.unpack_arrays(content, f"reported/{slot.base}"),
            examples=said.get("examples"),
            steps=said.get("steps"),
            loss=said.get("loss"),
        )

    def measure(self, state: ServerState, asked: Sequence[Question], branches: Branches) -> list[list[float | None]]:
        """Each client's figure for each question, as the nodes say; one outside a metric's bounds is not believed."""
        asked = [question._replace(threat=_threat_name(question.threat)) for question in asked]
        shared = wire.pack(self.plan.aggregator.served(state.shared, state.memory))
        settings: dict[str, Any] = {
            "parts": [question.part for question in asked],
            "threats": [question.threat for question in asked],
            "metrics": [question.metric.name if question.metric else "" for question in asked],
            **{name: getattr(branches, name) for name in ("attack", "predict") if getattr(branches, name)},
        }
        found: list[list[float | None]] = [[None] * len(self.data.clients) for _ in asked]

        def content(client: int) -> Any:
            own = {"reported": wire.pack(tensors.gather(state.reported, client))} if state.reported else {}
            return self._message({"shared": shared, **own}, client, round=state.round, **settings)

        for client, came in self._ask("evaluate", state.round - 1, range(len(self.data.clients)), content):
            if isinstance(came, str):
                continue
            said = wire.reply_figures(came, "accuracy")
            if said.get("round") != state.round:
                _LOG.warning("round %d, evaluate: client %d refused: figures of another round", state.round, client)
                continue
            for place, question in enumerate(asked):
                value = said.get(str(question))
                low, high = question.metric.bounds if question.metric else (0.0, 1.0)
                if isinstance(value, float) and math.isfinite(value) and low <= value <= high:
                    found[place][client] = value
        return found

    def _message(self, records: dict[str, Any], client: int, **settings: Any) -> Any:
        return wire.message(records, **settings, experiment=self.roll.experiment, client=client, token=self.token)

    def _ask(
        self, kind: str, round_number: int, clients: Sequence[int], content: Callable[[int], Any], *, least: int = 0
    ) -> Iterator[tuple[int, Any]]:
        """(client, reply's content or why there is none), in the order of `clients` whenever they come, since sums are
        rounded by their order. A reply waits for those before it. With fewer than `least` replies at the deadline,
        those that have not answered are asked again. Who was silent in a round is not asked again in it."""
        mute = {client: why for (at, client), why in self._silent.items() if at == round_number}
        left, held, lost, heard, turn = [c for c in clients if c not in mute], dict[int, Any](), dict(mute), 0, 0
        least, end = min(least, len(clients)), time.monotonic() + self.network.patience

        def ready() -> Iterator[tuple[int, Any]]:
            nonlocal turn
            while turn < len(clients) and (clients[turn] in held or (clients[turn] in lost and heard >= least)):
                if clients[turn] in held:
                    yield clients[turn], held.pop(clients[turn])
                turn += 1

        while left:
            earlier = dict(lost)
            for client in left:
                lost.pop(client, None)
            for client, came in self._round_trip(kind, round_number, left, content):
                if isinstance(came, str):
                    lost[client] = came
                else:
                    held[client], heard = came, heard + 1
                yield from ready()
            left = [client for client in left if client in lost]
            for client, why in lost.items() - earlier.items():
                _LOG.warning("round %d, %s: client %d %s", round_number + 1, kind, client, why)
            if heard >= least:
                break
            if time.monotonic() > end:
                raise HardyError(
                    f"round {round_number + 1}: {heard} replies within {self.network.patience:g} s, but "
                    f"network.replies is {least}. Start the missing nodes and go on with the same folder; nothing "
                    "is lost."
                )
            if lost != earlier:
                _LOG.warning("round %d: %d replies of the %d needed; asking again", round_number + 1, heard, least)
            time.sleep(5 * PAUSE)
        yield from ready()
        _LOG.info("round %d, %s: %d of %d clients answered", round_number + 1, kind, heard, len(clients))
        silent = {(round_number, c): why for c, why in lost.items() if why.startswith("silent")}
        self._silent = {key: why for key, why in self._silent.items() if key[0] == round_number} | silent
        yield from lost.items()

    def _round_trip(
        self, kind: str, round_number: int, clients: Sequence[int], content: Callable[[int], Any]
    ) -> Iterator[tuple[int, Any]]:
        """Asks each client once; (client, reply's content or why there is none) as they come, until the deadline."""
        nodes, began = self.roll.refresh(), time.monotonic()
        pending: dict[str, int] = {}
        most: dict[int, int] = {}
        asked_nodes: dict[int, int] = {}
        for client in clients:  # one by one: only one message is held at a time
            if client not in nodes:
                yield client, "away: its node is not online"
                continue
            asked = content(client)
            self._count(client, "down", asked)
            most[client] = 4 * wire.size(asked) + 2**20  # what comes back is like what was sent
            if number := self.roll.push(kind, asked, nodes[client], str(round_number), self.network.deadline + _LATER):
                pending[number], asked_nodes[client] = client, nodes[client]
            else:
                yield client, "failed: the SuperLink did not take the message"
        while pending and time.monotonic() - began < self.network.deadline:
            for number, client in list(pending.items()):
                if not self.roll.due(asked_nodes[client], number):
                    continue
                if (reply := self.roll.pull(number, most[client])) is None:
                    continue
                del pending[number]
                if not isinstance(reply, str):
                    self._count(client, "up", reply)
                yield client, reply
            if pending:
                time.sleep(PAUSE if self.roll.heard else min(3.0, max(PAUSE, _EACH * len(pending))))
        yield from ((client, f"silent: no reply within {self.network.deadline:g} s") for client in pending.values())

    def _count(self, client: int, way: str, content: Any) -> None:
        counts = self._wire.setdefault(str(client), {"down": 0, "up": 0})
        counts[way] += wire.size(content)


def _threat_name(threat: str) -> str:
    return parse_threat(threat).name if threat else ""


def compressed_names(plan: Plan) -> list[str]:
    """The tensors that compression is for: shared ones that clients train."""
    return [name for name in plan.trained if plan.placement[name] is Placement.SHARED]
