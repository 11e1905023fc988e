"""Measuring on several ranks: each asks the networks of the clients it owns. Where all clients share one network, the
calls are dealt instead, as one process would make them, so that every image meets the same noise."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hardy.attacks.base import Attack
from hardy.core.engine import Branches, DataPart
from hardy.core.state import ServerState
from hardy.core.store import MemoryStore
from hardy.engines.base import Engine
from hardy.engines.distributed import Distributed, one_network
from hardy.evaluation.checks import Flag
from hardy.evaluation.client_checks import check_clients
from hardy.evaluation.measure import LocalMeasure, ServedClients


class SpreadMeasure(LocalMeasure):
    """Measures the clients of all ranks; on the first one, which tells the others. `engine` knows all clients: their
    rows, and after the rounds their tensors."""

    def __init__(self, engine: Engine, distributed: Distributed) -> None:
        super().__init__(engine)
        self.distributed = distributed

    def served(
        self, state: ServerState, part: DataPart, branches: Branches, limit: int | None = None, **how: Any
    ) -> Any:
        return _SpreadClients(self.distributed, self.engine, state, part, branches, limit, **how)


class _SpreadClients(ServedClients):
    """The networks of all clients, asked where they are."""

    def __init__(self, distributed: Distributed, engine: Engine, state: ServerState, *what: Any, **how: Any) -> None:
        super().__init__(engine, state, *what, **how)
        self.distributed, self.state, self.what, self.how = distributed, state, what, how

    def answers(self) -> list[Tensor]:
        found: list[Tensor] = self._everywhere("answers")
        return found

    def attacked(
        self, attack: Attack, before: Sequence[Tensor], key: Tensor, *, ensemble: bool = False
    ) -> list[Tensor]:
        found: list[Tensor] = self._everywhere("attacked", attack, list(before), key, ensemble)
        return found

    def flags(self, clients: Sequence[int], key: Tensor) -> dict[int, list[Flag]]:
        """The red flags of these clients' networks."""
        found: dict[int, list[Flag]] = self._everywhere("flags", list(clients), key)
        return found

    def _everywhere(self, *asked: Any) -> Any:
        order = self.what, self.how, asked
        self.distributed.ranks.tell("measure", *order)
        return measure_here(self.distributed, self.state, *order)


def measure_here(
    engine: Distributed, state: ServerState, what: tuple[Any, ...], how: dict[str, Any], asked: tuple[Any, ...]
) -> Any:
    """A rank's part of what is asked of all; on every rank, the whole answer."""
    ranks, (word, *given) = engine.ranks, asked
    if one_network(engine.plan):
        alike = replace(state, reported=MemoryStore({}))
        return _answer(ServedClients(engine.of_everybody, alike, *what, **how, ranks=ranks), word, *given)
    served = ServedClients(engine.of_mine, state, *what, **how)
    if word == "flags":
        clients, key = given
        place = {at: number for number, at in enumerate(engine.mine)}
        found = check_clients(served, [place[at] for at in clients if at in place], key)
        parts = ranks.gather({engine.mine[number]: flags for number, flags in found.items()})
        return {client: flags for part in parts for client, flags in part.items()}
    if word == "attacked":
        attack, before, key, ensemble = given
        given = [attack, [before[at] for at in engine.mine], key, ensemble]
    answers = [iter(part) for part in ranks.gather(_answer(served, word, *given) if engine.mine else [])]
    return [next(answers[engine.owner[client]]) for client in engine.data.measured]  # each gives its own in order


def _answer(served: ServedClients, word: str, *given: Any) -> Any:
    if word == "answers":
        return served.answers()
    if word == "flags":
        return check_clients(served, *given)
    attack, before, key, ensemble = given
    return served.attacked(attack, before, key, ensemble=ensemble)


def found_flags(served: ServedClients, clients: Sequence[int], key: Tensor) -> dict[int, list[Flag]]:
    """The red flags of these clients' networks, by whoever has them."""
    return served.flags(clients, key) if isinstance(served, _SpreadClients) else check_clients(served, clients, key)
