"""What the server and a run ask of an engine, wherever its clients are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from hardy.core.federation import Federation
from hardy.core.messages import Answer, Slot, Updates, Work
from hardy.core.method import Plan
from hardy.core.metric import Metric
from hardy.core.state import ServerState
from hardy.core.store import ClientStore
from hardy.core.tensors import Tensors
from hardy.core.training import Training

DataPart = Literal["train", "validation", "test", "triggered"]
"""which of a client's rows; `triggered`: test rows with a backdoor's trigger, labelled with its target"""
EngineName = Literal["sequential", "vectorised", "flower"]


class Trains(Protocol):
    """All the server asks of an engine."""

    def train(self, work: Work) -> Iterable[Updates | Sequence[Answer] | dict[int, str]]:
        """Updates as they are ready, or answers as they come in from outside; a dict: why clients will not answer."""
        ...

    def expect(self, round_number: int, slots: Sequence[Slot]) -> None:
        """What it will be asked for next, told while it may still be at work."""
        ...

    def cast(self, values: Mapping[str, Tensor]) -> Tensors: ...


class Question(NamedTuple):
    """How good are clients on their own rows?"""

    part: DataPart
    threat: str = ""
    """the attack they are under, such as "pgd-20"; empty: none"""
    metric: Metric | None = None
    """None: the share that is classified rightly"""

    def __str__(self) -> str:
        words = (self.part, self.threat, self.metric.name if self.metric else "")
        return "/".join(filter(None, words))


@dataclass(frozen=True, kw_only=True)
class Branches:
    """Which statistics an attack climbs on, and which images are judged with; None: those of the norm's own branch."""

    attack: str | None = None
    predict: str | None = None
    robustness: float | None = None
    """λ: both take (1 − λ) of the clean branch and λ of the adversarial one at every layer"""


class Measures(Protocol):
    """What a run asks of whoever measures its clients' networks."""

    def measure(self, state: ServerState, asked: Sequence[Question], branches: Branches) -> list[list[float | None]]:
        """A figure of each client for each question; None: it has no such rows, none is defined, or no answer came."""
        ...


class RunEngine(Trains, Protocol):
    """An engine as a run holds it: what it trains, whose rows, and the tensors that clients keep on this machine."""

    plan: Plan
    data: Federation
    training: Training
    device: torch.device
    dtype: torch.dtype
    train_rows: Sequence[Any]

    @property
    def store(self) -> ClientStore: ...

    @store.setter
    def store(self, values: Mapping[str, Tensor]) -> None: ...

    def new_store(self, first: Tensors, clients: int) -> ClientStore:
        """What holds tensors of so many clients, with first values [B, ...]."""
        ...

    @property
    def name(self) -> EngineName: ...

    def account(self, line: dict[str, Any]) -> dict[str, Any]:
        """What a network has to add to a round's line."""
        ...
