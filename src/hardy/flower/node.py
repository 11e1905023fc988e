"""The clients' half: what a node does with a message. It trains with hardy.client like every other engine.

A node is one client. Its number, its data and its profile stand in its own configuration; the experiment comes with
every message, since Flower starts a new process for each. Its private tensors stay in files of its own, not in Flower's
Context, which is lost with the run and with the SuperNode.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from hardy import config
from hardy.attacks.threats import parse_threat
from hardy.config import Experiment, to_table
from hardy.core import tensors
from hardy.core.engine import Branches, DataPart, Question
from hardy.core.federation import Client, Federation
from hardy.core.messages import Slot, Updates, Work
from hardy.core.method import Method
from hardy.core.partition import Placement
from hardy.core.state import ServerState
from hardy.core.store import MemoryStore
from hardy.core.tensors import Tensors
from hardy.data import sources
from hardy.data.splits import blocks, federate
from hardy.engines.device_data import DeviceData
from hardy.engines.sequential import Sequential
from hardy.errors import HardyError
from hardy.evaluation.measure import LocalMeasure
from hardy.flower import wire
from hardy.flower.memory import Memory
from hardy.flower.network_engine import compressed_names
from hardy.flower.settings import NODE_SETTINGS
from hardy.runs import prepare as experiment
from hardy.runs.networks import OwnModel
from hardy.runs.profiles import KINDS, Profile
from hardy.user_code import Allow, refused, resolve

KEYS = {*NODE_SETTINGS, "client", "state"}
"""what a node's configuration may hold"""
_LOG = logging.getLogger("flwr")


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """What an app brings as objects, in place of the names in the experiment."""

    method: Method | None = None
    model: OwnModel | None = None
    data: Federation | None = None


class Node:
    """One client of an experiment, ready to work."""

    def __init__(self, text: str, settings: tuple[tuple[str, Any], ...], given: Given) -> None:
        own = dict(settings)
        self.text, self.settings, self.figures = text, own, own.get("figures", True)
        if not isinstance(self.figures, bool):
            raise HardyError(f"figures={self.figures!r} in the node's settings; it must be true or false.")
        if unknown := own.keys() - KEYS:
            raise HardyError(f"node configuration {min(unknown)!r} is unknown. Known: {', '.join(sorted(KEYS))}.")
        if "client" not in own:
            raise HardyError("the node's configuration names no client; add client=0 (or 1, 2, ...) to --node-config.")
        if (kind := own.get("kind", "")) not in KINDS:
            raise HardyError(f"kind={kind!r} in --node-config; it must be AT or ST, or absent.")
        chosen = _read(text, own, given)
        self.chosen, self.number, self.folder = chosen, int(own["client"]), own.get("state")
        self.threats = {parse_threat(one).name for one in (*chosen.evaluation.threats, *chosen.evaluation.selecting)}
        data = _data(chosen, own, given)
        if "threads" in own:
            torch.set_num_threads(int(own["threads"]))
        device = replace(chosen.engine, device=str(own.get("device", chosen.engine.device))).find_device()
        plan = experiment.bind(chosen, data, given.method, given.model)
        if (plan.names(Placement.PRIVATE) or chosen.network.compression) and not self.folder:
            raise HardyError(
                f"clients keep tensors of their own between rounds of {plan.method.name!r}; name a folder for them: "
                'state="/data/hardy-state" in --node-config.'
            )
        self.engine = Sequential(
            plan,
            DeviceData(data, device, chosen.engine.precision, chosen.data.augmentation),
            chosen.training,
            seed=chosen.seed,
            numbers=[self.number],
        )
        client = data.clients[0]
        self.profile = Profile(
            client=self.number,
            domain=client.domain,
            kind=client.kind,
            capacity=client.capacity,
            train=len(client.train),
            validation=len(client.validation),
            test=len(client.test),
            shape=data.shape,
            classes=data.classes,
        )

    def train(self, content: Any, memory: Memory) -> Any:
        """A round's slots: what is asked for goes back, what is private stays."""
        from flwr.app import MetricRecord, RecordDict

        engine, round_number = self.engine, int(wire.settings(content)["round"])
        held = engine.cast(memory.before(round_number))
        lost = {name: value for name, value in held.items() if name not in self._own(held)}
        records: dict[str, Any] = {}
        for base, updates, received in self.local_round(content, held):
            sent = tensors.gather(updates.shared, 0)
            if (rule := self.chosen.network.compression) is not None:
                mark = f"lost:{base}:"
                earlier = {n.removeprefix(mark): t for n, t in lost.items() if n.startswith(mark)}
                sent, left = wire.compress(rule, sent, received, earlier, compressed_names(engine.plan))
                lost |= {mark + name: value for name, value in left.items()}
            records[f"shared/{base}"] = wire.pack(sent)
            records[f"reported/{base}"] = wire.pack(tensors.gather(updates.reported, 0))
            records[f"figures/{base}"] = MetricRecord(
                {
                    "round": round_number,
                    "examples": int(updates.weights[0]),
                    "steps": int(updates.steps[0]),
                    "loss": float(updates.loss[0]),
                }
            )
        memory.keep(round_number, {**engine.store, **lost})
        return RecordDict(records)

    def local_round(self, content: Any, held: Tensors) -> Iterator[tuple[int, Updates, Tensors]]:
        """Trains each base that a message asks for, from the private tensors held; (base, what came of it, the shared
        tensors it started from)."""
        asked, engine = wire.settings(content), self.engine
        engine.store = self._own(held)
        for base in (int(base) for base in asked["bases"]):
            received = self._tensors(content, f"shared/{base}")
            work = Work(
                round=int(asked["round"]),
                rate=float(asked["rate"]),
                slots=[Slot(0, base)],
                shared=_placed(received, base),
                reported=MemoryStore(_placed(self._tensors(content, f"reported/{base}"), 0, base)),
            )
            (updates,) = engine.train(work)
            yield base, updates, received

    def evaluate(self, content: Any, memory: Memory) -> Any:
        """Its accuracy, or a metric, on its own rows."""
        from flwr.app import MetricRecord, RecordDict

        asked = wire.settings(content)
        round_number = int(asked["round"])
        self.engine.store = self._own(self.engine.cast(memory.before(round_number)))
        state = ServerState(
            round=round_number,
            shared=self._tensors(content, "shared"),
            reported=MemoryStore(tensors.apply(lambda t: t[None], self._tensors(content, "reported"))),
            memory={},
        )
        said: dict[str, Any] = {"round": round_number}
        branches = Branches(attack=_word(asked, "attack"), predict=_word(asked, "predict"))
        known = {"": None, **{metric.name: metric for metric in self.chosen.evaluation.metrics}}
        alike: dict[tuple[str, str], list[Question]] = {}
        for part, threat, metric in zip(asked["parts"], asked["threats"], asked["metrics"], strict=True):
            if str(metric) not in known or (threat and threat not in self.threats):
                raise HardyError(f"the server asks about {threat or metric!r}, which the experiment does not name.")
            question = Question(cast(DataPart, str(part)), str(threat), known[str(metric)])
            alike.setdefault(question[:2], []).append(question)
        for questions in alike.values():  # those of one attack need it once
            try:
                found = LocalMeasure(self.engine).measure(state, questions, branches)
            except HardyError as error:  # what it has said of other questions holds all the same
                _LOG.warning("client %d, evaluate: %s", self.number, error)
                continue
            said |= {str(q): value for q, (value,) in zip(questions, found, strict=True) if value is not None}
        if memory.folder is not None:
            from hardy.flower.site_model import keep_network

            keep_network(memory.folder, self, state, {k: v for k, v in said.items() if k != "round"}, self.settings)
        return RecordDict({"accuracy": MetricRecord(said if self.figures else {"round": round_number})})

    def _own(self, held: Tensors) -> Tensors:
        """The private tensors held, or their first values."""
        plan = self.engine.plan
        first = self.engine.cast(plan.first(Placement.PRIVATE, 1, plan.method.budget.bases))
        return {name: held.get(name, value) for name, value in first.items()}

    def _tensors(self, content: Any, record: str) -> Tensors:
        found = wire.unpack_arrays(content, record)
        places = {name: place for place, name in enumerate(self.engine.plan.placement)}  # in order: sums are rounded
        names = sorted(found, key=lambda name: places.get(name, len(places)))
        return self.engine.cast({name: torch.tensor(found[name]) for name in names})


def allowed_code(own: Mapping[str, Any]) -> Allow:
    """What a node's own configuration lets it import: whoever writes the experiment must not run what he likes here."""
    return Allow(
        listed=tuple(word.strip() for word in str(own.get("allow_import", "")).split(",") if word.strip()),
        remedy="This node imports no code that the server's experiment names unless its own settings allow it. Get "
        "that code from whoever wrote the experiment, read it, and start the node again with allow_import=... at the "
        "end of `hardy deploy node`: the module, or the path of this site's own copy of the file.",
    )


def _read(text: str, own: dict[str, Any], given: Given) -> Experiment:
    """The server's experiment, with no code but what the node allows."""
    allow = allowed_code(own)
    chosen = config.parse(text, where="the server's experiment", check=given.method is None, allow=allow)
    unused = {"data"} if {"data", "source"} & own.keys() else set()  # a node with rows of its own deals none
    unused |= {"method"} if given.method is not None else set()
    unused |= {"model"} if given.model is not None else set()
    table = {key: value for key, value in to_table(chosen).items() if key not in unused}
    if (name := refused(table)) is not None:
        resolve(name)  # says why it is refused
    return chosen


@lru_cache(maxsize=16)
def node(text: str, settings: tuple[tuple[str, Any], ...], given: Given) -> Node:
    """The node of an experiment and a configuration. Under Flower a process sees one message; elsewhere many."""
    return Node(text, settings, given)


def _word(asked: dict[str, Any], name: str) -> str | None:
    return str(asked[name]) if name in asked else None


def _placed(values: Tensors, *at: int) -> Tensors:
    """Tensors as the row `at` of leading axes just long enough for it; the other rows are not looked at."""
    axes = tuple(place + 1 for place in at)
    return tensors.apply(lambda t: t.expand(*axes, *t.shape), values)


def _data(chosen: Experiment, own: dict[str, Any], given: Given) -> Federation:
    """The node's own rows: of its folder, or its client's part of the experiment's own data for a trial."""
    if "data" in own or "source" in own:
        federation = _own(chosen, own)
        client = federation.clients[0]
    else:
        federation = given.data or experiment.federation(chosen)
        federation = chosen.faults.add_hostile_clients(federation, chosen.seed)
        number = int(own["client"])
        if number >= len(federation.clients):
            raise HardyError(
                f"client={number} in --node-config; the experiment makes {len(federation.clients)} clients."
            )
        client = federation.clients[number]
    rows = np.concatenate([client.train, client.validation])
    tests = np.concatenate([client.test, client.triggered])
    ends = len(client.train), len(rows)
    return replace(
        federation,
        x_train=federation.x_train[rows],
        y_train=federation.y_train[rows],
        x_test=federation.x_test[tests],
        y_test=federation.y_test[tests],
        clients=(
            Client(
                domain=str(own.get("domain", client.domain)),
                kind=str(own.get("kind", client.kind)),
                capacity=float(own.get("capacity", client.capacity)),
                train=np.arange(ends[0]),
                validation=np.arange(*ends),
                test=np.arange(len(client.test)),
                triggered=np.arange(len(client.test), len(tests)),
            ),
        ),
    )


def _classes(given: Any) -> int | list[str]:
    """Their number, or their names with commas between them."""
    text = str(given)
    return int(text) if text.isdecimal() else [name.strip() for name in text.split(",")]


def _own(chosen: Experiment, own: dict[str, Any]) -> Federation:
    """One client of a data set of the node: own files by their path, or a named source in the folder `data`. Options of
    the experiment's source hold for own files too, so that all nodes read theirs alike."""
    path = Path(str(own["data"])) if "data" in own else None
    if path is not None and not path.exists() and not str(path).startswith("hf:"):
        raise HardyError(f"data={str(path)!r} in --node-config; there is no such file or folder on this node.")
    if "source" in own:
        dataset = sources.load_dataset(str(own["source"]), path)
    else:
        name, options = config.named(chosen.data.source, "data.source")
        options = {} if name in sources.SOURCES else options
        if "classes" in own:
            options["classes"] = _classes(own["classes"])
        dataset = sources.load_dataset(str(path), value_range=chosen.data.range, **options)
    return federate(
        dataset,
        blocks(),
        clients=1,
        pooled=True,
        validation=chosen.data.validation,
        limit=chosen.data.limit,
        seed=chosen.seed,
    )
