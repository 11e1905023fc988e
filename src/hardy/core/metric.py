"""What is measured besides accuracy: metrics of a client's answers, and diagnoses of the training itself."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from hardy.core.net import Net
from hardy.core.protocols import Batch, Objective, Part
from hardy.core.tensors import Tensors
from hardy.registry import kind, name_of


@kind("metric")
@dataclass(frozen=True, kw_only=True)
class Metric(Part):
    """A figure of a client's rows, from its network's logits and their labels; named in `evaluation.metrics`."""

    higher_is_better: ClassVar[bool] = True
    """says who is the worst client, and which round the best"""
    bounds: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    """a figure outside them, from a node of a network, is not believed"""
    undefined_when: ClassVar[str] = "the figure is not finite"
    """why a client with rows may have no figure"""

    @property
    def name(self) -> str:
        """What its figures are called."""
        return name_of(type(self))

    def measure(self, logits: Tensor, labels: Tensor) -> float | None:
        """Of [row, class] and [row], one row or more, in float64 on the CPU. None: undefined on these rows."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DiagnosisContext:
    """What a diagnosis can ask of a federation between two rounds."""

    each: Callable[[Callable[[Net, Tensors, Batch, Tensor], Any]], Any]
    """runs a function for some clients, on each one's network, private tensors, some of its rows and a key; pure, it
    may run under vmap. Results are stacked, one row for each client"""
    objective: Objective
    shared: frozenset[str]
    """the trained tensors all clients have in common"""
    clients: int
    rate: float
    """learning rate of the round before, η"""
    steps: int
    """local steps in a round, τ"""
    branch: str
    """of the statistics that predictions are made with"""


@kind("diagnosis")
@dataclass(frozen=True, kw_only=True)
class Diagnosis(Part):
    """Figures of the training itself, from the server's state and some clients' rows in one place; named in
    `evaluation.diagnosis`."""

    rows: ClassVar[Literal["train", "validation", "test"]] = "validation"
    """which of the clients' rows it sees; never choose anything on test rows"""

    def diagnose(self, context: DiagnosisContext) -> dict[str, Any]:
        """Name -> figure, for metrics.jsonl. `broken_conditions` is a list of warnings."""
        raise NotImplementedError
