"""The gate before every aggregator: a reply that cannot be right is refused with its reason, and the round goes on.

`unpack` stacks answers that came over a network, whatever is in them; `Admission.judge` looks at the values of stacked
updates, wherever they came from.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hardy.core import tensors
from hardy.core.messages import Answer, Slot, Updates, Work
from hardy.core.partition import Role
from hardy.core.tensors import Tensors
from hardy.errors import HardyError


@dataclass(frozen=True, kw_only=True)
class Admission:
    """`[admission]`: what a reply must satisfy."""

    largest_update: float = float("inf")
    """refuse a reply whose shared tensors moved further than this (L2)"""
    smallest_loss: float = -0.001
    """refuse a reply that reports a smaller loss; cross-entropy is never below 0, MART's by no more than 0.0001"""
    largest_loss: float = float("inf")
    """refuse a reply that reports a larger loss"""

    def __post_init__(self) -> None:
        if not self.largest_update > 0:
            raise HardyError(f"admission.largest_update is {self.largest_update}; it must be above 0.")
        if not self.smallest_loss < self.largest_loss:
            raise HardyError(
                f"admission.smallest_loss is {self.smallest_loss}; it must be below largest_loss, {self.largest_loss}."
            )

    def judge(self, updates: Updates, work: Work, roles: Mapping[str, Role] | None = None) -> "Verdict":
        """Looks at every reply. The host waits for the device only when the verdict is read."""
        loss = updates.loss
        # the length is finite if every number is, and its square too, as sums and distances in a rule must be
        length = torch.linalg.vector_norm(updates.matrix, dim=1)
        if updates.reported:
            length = length + torch.linalg.vector_norm(tensors.flatten(updates.reported, loss), dim=1)
        figures = {"loss": loss, "weight": updates.weights, "length": length}
        if self.largest_update < float("inf"):
            sent = tensors.flatten(tensors.gather(work.shared, updates.bases), loss)
            figures["moved"] = torch.linalg.vector_norm(updates.matrix - sent, dim=1)
        roles, held = roles or {}, {**updates.shared, **updates.reported}
        if variances := {n: t for n, t in held.items() if roles.get(n) is Role.NORM_VAR}:
            figures["variance"] = tensors.flatten(variances, loss).amin(1)
        examples = [work.examples[slot.client] if work.examples else float("inf") for slot in updates.slots]
        return Verdict(self, updates, examples, list(figures), torch.stack([f.to(loss) for f in figures.values()]))

    def refusal(
        self,
        registered: float,
        *,
        loss: float,
        weight: float,
        length: float,
        moved: float = 0.0,
        variance: float = 0.0,
    ) -> str | None:
        """Why a reply of these figures is refused, from a client that registered with so many examples."""
        if not isfinite(length):
            return f"not finite, or too large to be squared (length {length:g})"
        if not self.smallest_loss <= loss <= self.largest_loss or not isfinite(loss):
            return f"loss {loss:g}, must be a number from {self.smallest_loss:g} to {self.largest_loss:g}"
        if not moved <= self.largest_update:
            return f"moved {moved:g}, limit {self.largest_update:g}"
        if not 0 < weight <= registered:
            return f"claims {weight:g} examples, must be above 0 and up to the {registered} registered"
        return None if variance >= 0 else f"variance {variance:g}, must be 0 or more"


class Admitted(NamedTuple):
    """The updates that may be aggregated, their losses and weights as numbers, and why the others were refused."""

    updates: Updates
    loss: list[float]
    weights: list[float]
    refused: dict[int, str]


class Verdict(NamedTuple):
    """What the gate found, not read yet."""

    admission: Admission
    updates: Updates
    examples: list[float]
    """[S], as registered"""
    names: list[str]
    figures: Tensor
    """[names, S]"""

    def read(self) -> Admitted:
        replies = zip(*self.figures.tolist(), strict=True)  # the one time in a round that the host waits for the device
        found = [dict(zip(self.names, reply, strict=True)) for reply in replies]
        reasons = [self.admission.refusal(n, **reply) for n, reply in zip(self.examples, found, strict=True)]
        refused = {s.client: f"refused: {why}" for s, why in zip(self.updates.slots, reasons, strict=True) if why}
        taken = [reply for reply, why in zip(found, reasons, strict=True) if not why]
        updates = self.updates
        if refused:
            updates = updates.where(tensors.send(torch.tensor([not why for why in reasons]), updates.loss.device))
        return Admitted(updates, [reply["loss"] for reply in taken], [reply["weight"] for reply in taken], refused)


class Refusal(Exception):
    """Why an answer cannot be stacked with the others."""


def unpack(
    answers: Sequence[Answer], work: Work, *, steps: Callable[[int], int], answered: Collection[Slot] = ()
) -> tuple[Updates, dict[int, str]]:
    """Stacks answers from outside; those that cannot be what was asked for are refused, with the reason.

    A slot must have been asked in this round and not be among the `answered`; of two answers the first counts. Tensors
    must have the names, types and shapes of those sent down, so an answer cannot be larger than expected. `steps`
    gives the most local steps of a client. Values are left for `Admission.judge`.
    """
    taken: dict[Slot, Answer] = {}
    rows: list[tuple[Tensors, Tensors]] = []
    refused = {}
    for answer in answers:
        try:
            if answer.slot not in work.slots:
                raise Refusal("was not asked")
            if answer.slot in answered or answer.slot in taken:
                raise Refusal("has answered already")
            if answer.round != work.round:
                raise Refusal(f"belongs to round {_brief(answer.round)}, now is {work.round}")
            _require_figures(answer, steps(answer.slot.client))
            rows.append((_checked(answer.shared, work.shared, 1), _checked(answer.reported, work.reported, 2)))
            taken[answer.slot] = answer
        except Refusal as reason:
            refused[answer.slot.client] = f"refused: {reason}"
    sent = (*work.shared.values(), *work.reported.values())
    like = next((tensor for tensor in sent if tensor.is_floating_point()), torch.empty(0))
    shared, reported = (
        tensors.apply(lambda t: t.to(like.device), tensors.stack([row[place] for row in rows])) for place in (0, 1)
    )
    updates = Updates(
        slots=list(taken),
        shared=shared,
        reported=reported,
        weights=like.new_tensor([float(answer.examples) for answer in taken.values()]),
        steps=torch.tensor([int(answer.steps) for answer in taken.values()], device=like.device),
        loss=like.new_tensor([float(answer.loss) for answer in taken.values()]),
    )
    return updates, refused


def _require_figures(answer: Answer, steps: int) -> None:
    for name, value in (("examples", answer.examples), ("loss", answer.loss)):
        try:
            float(value if isinstance(value, Real) else "no number")
        except (ValueError, OverflowError):
            raise Refusal(f"{name} {_brief(value)}, must be a floating-point number") from None
    if not isinstance(answer.steps, Integral) or not 1 <= int(answer.steps) <= steps:
        raise Refusal(f"{_brief(answer.steps)} steps, must be a whole number from 1 to {steps}")


def _checked(given: Mapping[str, Any], sent: Tensors, axes: int) -> Tensors:
    """The tensors given, if they are like those sent, which have so many more axes."""
    missing, extra = sent.keys() - given.keys(), given.keys() - sent.keys()
    if missing or extra:
        words = [
            f"{word} {_brief(min(map(str, names)))}" for word, names in (("lacks", missing), ("adds", extra)) if names
        ]
        raise Refusal(f"{' and '.join(words)}, must hold the {len(sent)} tensors sent")
    found = {}
    for name, tensor in sent.items():
        value = given[name]
        if not isinstance(value, Tensor | np.ndarray):
            raise Refusal(f"{name!r} is a {type(value).__name__}, must be an array")
        kinds = [str(t.dtype).removeprefix("torch.") for t in (value, tensor)]
        if kinds[0] != kinds[1]:
            raise Refusal(f"{name!r} is {kinds[0]}, must be {kinds[1]}")
        if value.shape != tensor.shape[axes:]:
            raise Refusal(f"{name!r} has shape {list(value.shape)}, must have {list(tensor.shape[axes:])}")
        found[name] = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
    return found


def _brief(value: object) -> str:
    """An untrusted value in few characters."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of too many digits"
    return text if len(text) <= 60 else text[:60] + "..."


__all__ = ["Admission", "Admitted", "Verdict", "unpack"]
