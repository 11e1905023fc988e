"""The gate before every aggregator: a reply that cannot be right is refused with its reason, and the round goes on.

`unpack` stacks answers that came over a network, whatever is in them; a `Gate` looks at the values of a round's stacked
updates, wherever they came from.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hardy.core import tensors
from hardy.core.lengths import GROUPS, lengths, median_lengths, remembered_lengths, too_long, usual_lengths
from hardy.core.messages import Answer, Slot, Updates, Work
from hardy.core.partition import Role
from hardy.core.ranks import ALONE, Ranks
from hardy.core.tensors import Tensors
from hardy.errors import HardyError

_ENOUGH = 32
"""replies of a first round that wait for each other, so that it is known how long they usually are"""


@dataclass(frozen=True, kw_only=True)
class Admission:
    """`[admission]`: what a reply must satisfy."""

    largest_ratio: float = 100.0
    """refuse a reply whose weights changed so many times as far as is usual, or whose statistics are so many times as
    long; usual is the running median over replies"""
    largest_share: float | None = None
    """the most that one client may count, as a share of all clients' training rows; what it holds beyond that has no
    weight. Absent: no limit on this machine; over a network half, or 2/3 of three clients', and no limit for two"""
    most_rows: int = 10_000_000
    """refuse a client that says it holds more training, validation or test rows than this; over a network only"""
    largest_update: float = float("inf")
    """refuse a reply whose shared tensors moved further than this (L2)"""
    smallest_loss: float = -0.001
    """refuse a reply that reports a smaller loss; cross-entropy is never below 0, MART's by no more than 0.0001"""
    largest_loss: float = float("inf")
    """refuse a reply that reports a larger loss"""

    def __post_init__(self) -> None:
        if not self.largest_ratio > 1:
            raise HardyError(f"admission.largest_ratio is {self.largest_ratio}; it must be above 1, or inf.")
        if self.largest_share is not None and not 0 < self.largest_share <= 1:
            raise HardyError(f"admission.largest_share is {self.largest_share}; it must be in (0, 1].")
        if self.most_rows < 1:
            raise HardyError(f"admission.most_rows is {self.most_rows}; it must be 1 or more.")
        if not self.largest_update > 0:
            raise HardyError(f"admission.largest_update is {self.largest_update}; it must be above 0.")
        if not self.smallest_loss < self.largest_loss:
            raise HardyError(
                f"admission.smallest_loss is {self.smallest_loss}; it must be below largest_loss, {self.largest_loss}."
            )

    def for_network(self, clients: int) -> "Admission":
        """The same for clients whose rows nobody but they have counted."""
        return self if self.largest_share is not None else replace(self, largest_share=min(1.0, max(0.5, 2 / clients)))

    def largest_weight(self, examples: Sequence[int]) -> float:
        """The weight above which a client would have more than `largest_share` of all; ∞ if nobody has."""
        if self.largest_share is None:
            return float("inf")
        share, counts, left = self.largest_share, sorted(examples, reverse=True), sum(examples)
        if share * len(counts) < 1:
            raise HardyError(
                f"admission.largest_share is {share}, but there are {len(counts)} clients, so that one has "
                f"{1 / len(counts):.3g} or more. Set it to that or more."
            )
        if counts[0] <= share * left:
            return float("inf")
        for cut in range(1, len(counts)):  # the largest `cut` clients weigh the same
            left -= counts[cut - 1]
            weight = share * left / (1 - share * cut)
            if weight >= counts[cut]:
                return weight
        return float(counts[-1])

    def judge(
        self,
        updates: Updates,
        work: Work,
        roles: Mapping[str, Role] | None = None,
        usual: Mapping[str, float] | None = None,
    ) -> "Verdict":
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
        roles, usual, held = roles or {}, usual or {}, {**updates.shared, **updates.reported}
        if self.largest_ratio < float("inf"):
            figures |= lengths(updates, work, roles)
        if variances := {n: t for n, t in held.items() if roles.get(n) is Role.NORM_VAR}:
            figures["variance"] = tensors.flatten(variances, loss).amin(1)
        examples = [work.examples[slot.client] if work.examples else float("inf") for slot in updates.slots]
        if work.largest_weight < float("inf"):
            updates = replace(updates, weights=updates.weights.clamp(max=work.largest_weight))
        found = torch.stack([f.to(loss) for f in figures.values()])
        return Verdict(self, updates, examples, usual, work, list(figures), found)

    def refusal(
        self,
        registered: float,
        *,
        loss: float,
        weight: float,
        length: float,
        moved: float = 0.0,
        variance: float = 0.0,
        unusual: str | None = None,
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
        return unusual if variance >= 0 else f"variance {variance:g}, must be 0 or more"


class Admitted(NamedTuple):
    """The updates that may be aggregated, their figures, and why the others were refused."""

    updates: Updates
    figures: list[dict[str, float]]
    refused: dict[int, str]
    refused_figures: list[dict[str, float]]


class Verdict(NamedTuple):
    """What the gate found, not read yet."""

    admission: Admission
    updates: Updates
    examples: list[float]
    """[S], as registered"""
    usual: Mapping[str, float]
    work: Work
    names: list[str]
    figures: Tensor
    """[names, S]"""

    def read(self) -> Admitted:
        replies = zip(*self.figures.tolist(), strict=True)  # the one time in a round that the host waits for the device
        found = [dict(zip(self.names, reply, strict=True)) for reply in replies]
        reasons = [self._refusal(n, reply) for n, reply in zip(self.examples, found, strict=True)]
        refused = {s.client: f"refused: {why}" for s, why in zip(self.updates.slots, reasons, strict=True) if why}
        updates = self.updates
        if refused:
            updates = updates.where(tensors.send(torch.tensor([not why for why in reasons]), updates.loss.device))
        taken, others = (
            [reply for reply, why in zip(found, reasons, strict=True) if bool(why) is bad] for bad in (False, True)
        )
        return Admitted(updates, taken, refused, others)

    def _refusal(self, registered: float, reply: dict[str, float]) -> str | None:
        known = {name: reply[name] for name in ("loss", "weight", "length", "moved", "variance") if name in reply}
        unusual = too_long(reply, self.usual, self.admission.largest_ratio, self.work.rate)
        why = self.admission.refusal(registered, **known, unusual=unusual)
        reply["weight"] = min(reply["weight"], self.work.largest_weight)
        return why


class Gate:
    """The gate of one round. It knows how long replies usually are, and learns it from those it admits."""

    def __init__(
        self, admission: Admission, work: Work, roles: Mapping[str, Role], history: Tensors, ranks: Ranks = ALONE
    ) -> None:
        self.admission, self.work, self.roles, self.history, self.ranks = admission, work, roles, history, ranks
        self.usual = usual_lengths(history)
        self.taken: list[dict[str, float]] = []
        self.refused: list[dict[str, float]] = []

    def hold(self, arriving: Iterable[Updates]) -> Iterator[Updates]:
        """As they come. Where nothing is known of how long replies usually are, the first ones wait for each other and
        are measured by their own median, that of all ranks' first ones."""
        coming = iter(arriving)
        if not self.usual and self.admission.largest_ratio < float("inf"):
            first: list[Updates] = []
            while sum(len(some.slots) for some in first) < _ENOUGH and (updates := next(coming, None)) is not None:
                first.append(updates)
            self.usual = self.usual_of(first)
            yield from first
        yield from coming

    def usual_of(self, updates: Sequence[Updates]) -> dict[str, float]:
        """The usual lengths, or, where nothing is known yet, those of some replies."""
        if self.usual or self.admission.largest_ratio == float("inf"):
            return self.usual
        here = [
            (group, each.tolist())
            for some in updates
            for group, each in lengths(some, self.work, self.roles).items()
            if group != "near"
        ]
        found: dict[str, list[float]] = {}
        for group, each in (one for part in self.ranks.gather(here) for one in part):
            found.setdefault(group, []).extend(each)
        return median_lengths(found)

    def judge(self, updates: Updates) -> Verdict:
        return self.admission.judge(updates, self.work, self.roles, self.usual)

    def read(self, verdict: Verdict) -> Admitted:
        admitted = verdict.read()
        self.taken += admitted.figures
        self.refused += admitted.refused_figures
        return admitted

    def remember(self) -> Tensors:
        """The history after the round. Refused replies count only where there is no other, so that no limit can hold
        for good what all clients do."""
        replies = self.taken or self.refused
        found = {group: [reply[group] for reply in replies if group in reply] for group in set(GROUPS.values())}
        return remembered_lengths(self.history, median_lengths(found))


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
            if answer.slot not in work.asked:
                raise Refusal("was not asked")
            if answer.slot in answered or answer.slot in taken:
                raise Refusal("has answered already")
            if answer.round != work.round:
                raise Refusal(f"belongs to round {_brief(answer.round)}, now is {work.round}")
            _require_figures(answer, steps(answer.slot.client))
            rows.append((_checked(answer.shared, work.shared, 1), _checked(answer.reported, work.reported.like, 0)))
            taken[answer.slot] = answer
        except Refusal as reason:
            refused[answer.slot.client] = f"refused: {reason}"
    sent = (*work.shared.values(), *work.reported.like.values())
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


__all__ = ["Admission", "Admitted", "Gate", "Verdict", "unpack"]
