"""One client's round: begin, then for every step slope and move, finish. The only trainer in the project.

`slope` works on the tensors of one slot, and an engine runs it in a loop or under vmap; the others on those of one slot
or of a stack of them. All are pure but `move`, which moves tensors in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad_and_value

from hardy.core import random, tensors
from hardy.core.federation import Rows
from hardy.core.layers import forcing
from hardy.core.messages import Slot
from hardy.core.method import Plan
from hardy.core.net import Net
from hardy.core.partition import Placement
from hardy.core.tensors import Tensors, select
from hardy.errors import HardyError
from hardy.parts.objectives import Batch, Objective, Outcome


@dataclass(frozen=True, kw_only=True)
class Training:
    """`[training]`: how a client trains in a round."""

    rate: float = 0.01
    """learning rate η of plain SGD"""
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch: int = 32
    epochs: int = 1
    epochs_decay: float = 1.0
    """γ of FedDynAT: E_t = E₀ γ^(t/F) local epochs in round t, rounded, at least 1; 1 keeps them constant"""
    epochs_every: int = 1
    """F of FedDynAT: rounds in which the local epochs shrink by γ"""
    steps: int | None = None
    """local steps a round instead of epochs"""
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

    def __post_init__(self) -> None:
        limits = {
            "rate": (0 <= self.rate < float("inf"), "0 or more"),
            "momentum": (0 <= self.momentum < 1, "in [0, 1)"),
            "weight_decay": (self.weight_decay >= 0, "0 or more"),
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

    def rate_at(self, round: int, rounds: int) -> float:
        """The learning rate of a round (counted from 0)."""
        rate = self.rate * self.decay ** sum(round >= m for m in self.milestones)
        if self.schedule == "harmonic":
            return rate / (1 + round // self.period)
        return rate * (1 + np.cos(np.pi * round / rounds)) / 2 if self.schedule == "cosine" else rate

    def epochs_at(self, round: int) -> int:
        """The local epochs of a round (counted from 0)."""
        return max(1, int(self.epochs * self.epochs_decay ** (round / self.epochs_every) + 0.5))

    def batches(self, rows: Rows, rng: np.random.Generator, round: int) -> list[Rows]:
        """The rows of each local step of a round."""
        size = min(self.batch, len(rows))
        if self.steps is not None:
            needed = self.steps * size
            if needed <= len(rows):
                drawn = rng.choice(rows, needed, replace=False)
            else:
                drawn = np.concatenate([rng.permutation(rows) for _ in range(-(-needed // len(rows)))])[:needed]
            batches = list(drawn.reshape(self.steps, size))
        else:
            epochs = range(self.epochs_at(round))
            batches = [batch for _ in epochs for batch in self._epoch(rng.permutation(rows), size)]
        return [batch for batch in batches for _ in range(self.replays)]

    def examples(self, count: int, round: int) -> int:
        """Examples that pass through the network in a round of a client that holds `count`."""
        size = min(self.batch, count)
        if self.steps is not None:
            return self.replays * self.steps * size
        left = count % size
        added = {"drop": -left, "keep": -(left == 1), "wrap": -left % size}[self.remainder]
        return self.replays * self.epochs_at(round) * (count + added)

    def _epoch(self, order: Rows, size: int) -> list[Rows]:
        full = len(order) // size * size
        batches = list(order[:full].reshape(-1, size))
        left = len(order) - full
        if self.remainder == "wrap" and left:
            batches.append(np.concatenate([order[full:], order[: size - left]]))
        elif self.remainder == "keep" and left > 1:  # one example alone has no batch statistics
            batches.append(order[full:])
        return batches


class State(NamedTuple):
    """A client in the middle of its round."""

    trained: Tensors
    kept: Tensors
    private: Tensors


class StepResult(NamedTuple):
    """What a client found out in one step: where the weights go down and their opponent up, what moves otherwise, and
    the loss."""

    gradient: Tensors
    ascent: Tensors
    """of the private tensors, where the objective plays them against the weights"""
    kept: Tensors
    private: Tensors
    loss: Tensor


class Reply(NamedTuple):
    """What a client sends (shared, reported) and keeps (private)."""

    shared: Tensors
    reported: Tensors
    private: Tensors


def keys(seed: int, round: int, slots: Sequence[Slot], steps: int) -> NDArray[np.int64]:
    """The random key of every step of every slot, [steps, S]."""
    key = random.fold(np.array([seed]), "client", round)
    key = random.fold(key, np.array([slot.client for slot in slots]), np.array([slot.base for slot in slots]))
    return random.fold(key, np.arange(steps)[:, None])


def begin(plan: Plan, received: Tensors, own: Tensors) -> State:
    """The state a client starts from: what it received and what it has."""
    held = {**received, **own}
    private = {name: value for name, value in own.items() if name not in plan.model_names}
    return State(select(held, plan.trained), select(held, plan.kept), private)


def compute_gradients(
    plan: Plan,
    objective: Objective,
    received: Tensors,
    state: State,
    batch: Batch,
    key: Tensor,
    *,
    frozen: bool = False,
) -> StepResult:
    """The gradients of one batch."""
    sent = {copy: received[name] for copy, name in plan.sent.items()}

    def total(trained: Tensors, private: Tensors) -> tuple[Tensor, tuple[Tensor, Tensors]]:
        net = Net(plan.model, trained, {**state.kept, **sent})
        with forcing("running" if frozen else None):
            loss = objective.loss(net, private, batch, key)
        return loss + objective.penalty(trained, received), (loss, select(net.kept, state.kept))

    wanted = (0, 1) if objective.has_adversary else (0,)
    (gradient, *ascent), (_, (loss, kept)) = grad_and_value(total, wanted, has_aux=True)(state.trained, state.private)
    gradient, private = objective.correct(gradient, state.private, received)
    return StepResult(gradient, ascent[0] if ascent else {}, kept, private, loss)


def move(
    training: Training, objective: Objective, state: State, momentum: Tensors, found: StepResult, rate: Tensor
) -> State:
    """One step from the same point for both players: SGD on the weights and the objective's ascent on what it plays
    against them. Weights, momentum (or none) and private tensors lie in memory without gaps and move in place."""
    tensors.descend(
        state.trained,
        found.gradient,
        rate,
        decay=training.weight_decay,
        velocity=momentum,
        momentum=training.momentum,
    )
    if objective.has_adversary:
        objective.step_adversary(found.private, found.ascent)
    return state._replace(kept=found.kept, private=found.private)


def finish(
    plan: Plan,
    objective: Objective,
    received: Tensors,
    state: State,
    start: Tensors,
    steps: Tensor,
    rate: Tensor,
) -> Reply:
    """Splits what a client, or a stack of clients, has now into what it sends and what it keeps."""
    private, added = objective.finish(
        Outcome(start=start, end=state.trained, received=received, private=state.private, steps=steps, rate=rate)
    )
    held = {**state.trained, **state.kept, **private, **added}
    return Reply(*(select(held, plan.names(where)) for where in Placement))
