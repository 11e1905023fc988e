"""How a client trains in a round: steps, batches and the learning rate."""

from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np

from hardy.core.federation import Rows
from hardy.errors import HardyError


@dataclass(frozen=True, kw_only=True)
class Training:
    """`[training]`: how a client trains in a round. Its optimiser is `[optimiser]`."""

    rate: float = 0.01
    """learning rate η"""
    batch: int = 32
    """examples in a step"""
    epochs: int = 1
    """passes over a client's rows in a round"""
    epochs_decay: float = 1.0
    """γ of FedDynAT: E_t = E₀ γ^(t/F) local epochs in round t, rounded, at least 1; 1 keeps them constant"""
    epochs_every: int = 1
    """F of FedDynAT: rounds in which the local epochs shrink by γ"""
    steps: int | None = None
    """local steps in a round, instead of epochs"""
    independent: bool = False
    """each step draws its rows anew from all that the client has, as privacy accounts want it; needs steps. Otherwise
    rows are dealt out until all had their turn"""
    replays: int = 1
    """times each batch is shown in a row (free adversarial training)"""
    remainder: Literal["keep", "drop", "wrap"] = "keep"
    """the examples left over by the last full batch: a smaller batch, left out, or filled up from the start"""
    schedule: Literal["constant", "cosine", "harmonic"] = "constant"
    """cosine: down to 0 at the last round; harmonic: rate / (1 + round // period)"""
    period: int = 1000
    """rounds between two steps of the harmonic schedule"""
    milestones: tuple[int, ...] = ()
    """rounds after which the rate is multiplied by `decay`"""
    decay: float = 0.1
    """factor of the rate at each milestone"""

    def __post_init__(self) -> None:
        limits = {
            "rate": (0 <= self.rate < float("inf"), "0 or more"),
            "batch": (self.batch >= 1, "1 or more"),
            "epochs": (self.epochs >= 1, "1 or more"),
            "epochs_decay": (0 < self.epochs_decay <= 1, "in (0, 1]"),
            "epochs_every": (self.epochs_every >= 1, "1 or more"),
            "period": (self.period >= 1, "1 or more"),
            "replays": (self.replays >= 1, "1 or more"),
            "steps": (self.steps is None or self.steps >= 1, "1 or more, or absent"),
            "decay": (self.decay > 0, "above 0"),
        }
        for name, (holds, limit) in limits.items():
            if not holds:
                raise HardyError(f"training.{name} is {getattr(self, name)}; it must be {limit}.")
        usual = {field.name: field.default for field in fields(self)}
        needs = {
            "epochs": (self.steps is None, "training.steps takes the place of epochs"),
            "epochs_decay": (self.steps is None, "training.steps takes the place of epochs"),
            "epochs_every": (self.epochs_decay < 1, "training.epochs_decay is 1"),
            "remainder": (self.steps is None, "with training.steps every batch is full"),
            "independent": (self.steps is not None, "it needs training.steps"),
            "period": (self.schedule == "harmonic", f"training.schedule is {self.schedule!r}, not 'harmonic'"),
            "decay": (bool(self.milestones), "there are no training.milestones"),
        }
        for name, (used, why) in needs.items():
            if not used and getattr(self, name) != usual[name]:
                raise HardyError(
                    f"training.{name} is {getattr(self, name)!r}, but it has no effect: {why}. Leave one of them out."
                )

    def with_steps(self, steps: int, rate: float | None = None) -> "Training":
        """The same with so many local steps in place of epochs, and another rate if one is given."""
        plain = Training(batch=self.batch)
        return replace(
            self,
            steps=steps,
            rate=self.rate if rate is None else rate,
            epochs=plain.epochs,
            epochs_decay=plain.epochs_decay,
            epochs_every=plain.epochs_every,
            remainder=plain.remainder,
        )

    def rate_at(self, round_number: int, rounds: int) -> float:
        """The learning rate of a round (counted from 0)."""
        rate = self.rate * self.decay ** sum(round_number >= m for m in self.milestones)
        if self.schedule == "harmonic":
            return rate / (1 + round_number // self.period)
        return rate * (1 + np.cos(np.pi * round_number / rounds)) / 2 if self.schedule == "cosine" else rate

    def epochs_at(self, round_number: int) -> int:
        """The local epochs of a round (counted from 0)."""
        return max(1, int(self.epochs * self.epochs_decay ** (round_number / self.epochs_every) + 0.5))

    def batches(self, rows: Rows, rng: np.random.Generator, round_number: int) -> list[Rows]:
        """The rows of each local step of a round. A single row is shown twice: alone it has no batch statistics, and
        its gradient stays the same."""
        if len(rows) == 1 and self.batch > 1:
            rows = np.repeat(rows, 2)
        size = min(self.batch, len(rows))
        if self.steps is not None:
            if self.independent:
                return [
                    batch
                    for batch in (rng.choice(rows, size, replace=False) for _ in range(self.steps))
                    for _ in range(self.replays)
                ]
            needed = self.steps * size
            if needed <= len(rows):
                drawn = rng.choice(rows, needed, replace=False)
            else:
                drawn = np.concatenate([rng.permutation(rows) for _ in range(-(-needed // len(rows)))])[:needed]
            batches = list(drawn.reshape(self.steps, size))
        else:
            epochs = range(self.epochs_at(round_number))
            batches = [batch for _ in epochs for batch in self._epoch(rng.permutation(rows), size)]
        return [batch for batch in batches for _ in range(self.replays)]

    def local_steps(self, count: int, round_number: int) -> int:
        """The steps of a round of a client that holds `count` examples."""
        if self.steps is not None:
            return self.replays * self.steps
        full, left = divmod(count, min(self.batch, count))
        more = {"drop": False, "keep": left > 1, "wrap": left > 0}[self.remainder]
        return self.replays * self.epochs_at(round_number) * (full + more)

    def examples(self, count: int, round_number: int) -> int:
        """Examples that pass through the network in a round of a client that holds `count`."""
        if count == 1 and self.batch > 1:
            count = 2
        size = min(self.batch, count)
        if self.steps is not None:
            return self.replays * self.steps * size
        left = count % size
        added = {"drop": -left, "keep": -(left == 1), "wrap": -left % size}[self.remainder]
        return self.replays * self.epochs_at(round_number) * (count + added)

    def _epoch(self, order: Rows, size: int) -> list[Rows]:
        full = len(order) // size * size
        batches = list(order[:full].reshape(-1, size))
        left = len(order) - full
        if self.remainder == "wrap" and left:
            batches.append(np.concatenate([order[full:], order[: size - left]]))
        elif self.remainder == "keep" and left > 1:  # one example alone has no batch statistics
            batches.append(order[full:])
        return batches
