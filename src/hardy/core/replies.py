"""What the server takes in of a round's replies, and what it says of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from typing import Any

import torch

from hardy.core import tensors
from hardy.core.admission import Admitted
from hardy.core.messages import Slot, Updates
from hardy.core.method import Plan
from hardy.core.protocols import RoundContext
from hardy.core.ranks import Ranks
from hardy.core.store import ClientStore
from hardy.core.tensors import Tensors


@dataclass
class TakenReplies:
    """What the server has taken in of a round's replies."""

    plan: Plan
    context: RoundContext
    folded: Any = None
    reporting: list[Updates] = field(default_factory=list)
    """the replies that hold reported tensors; these are written at once, at the end"""

    def add(self, updates: Updates) -> None:
        if updates.slots:
            self.folded = self.plan.aggregator.fold(self.folded, updates, self.context)
            if updates.reported:
                self.reporting.append(updates.only(()))

    def merge(self, ranks: Ranks, reporting: list[Updates]) -> None:
        """Takes in what the other ranks have taken in, of which `reporting` is known already."""
        self.folded, self.reporting = self.plan.aggregator.merge(self.folded, ranks), reporting

    def copy(self) -> "TakenReplies":
        return replace(self, reporting=list(self.reporting))

    def write(self, reported: ClientStore) -> ClientStore:
        """The reported tensors with those of the replies in them, [C, B, ...]."""
        if not self.reporting:
            return reported
        updates = Updates.join(self.reporting)
        return reported.written(updates.slots, updates.reported)


class Tally:
    """Adds up what the admitted replies say."""

    def __init__(self, traffic: Callable[[Slot], int], held: Sequence[str] = ()) -> None:
        self.traffic, self.held = traffic, held
        """names of the tensors whose drift is measured"""
        self.replies: list[Updates] = []
        self.lengths: dict[int, float] = {}
        """of each client's longest reply"""
        self.loss = self.weight = 0.0
        self.bytes_up = 0

    def add(self, admitted: Admitted) -> None:
        weights = [reply["weight"] for reply in admitted.figures]
        self.loss += sum(map(mul, (reply["loss"] for reply in admitted.figures), weights))
        self.weight += sum(weights)
        for slot, reply in zip(admitted.updates.slots, admitted.figures, strict=True):
            self.bytes_up += self.traffic(slot)
            self.lengths[slot.client] = max(self.lengths.get(slot.client, 0.0), reply["length"])
        if self.held and admitted.updates.slots:
            self.replies.append(admitted.updates.only(self.held))

    @property
    def sums(self) -> tuple[float, float, int, dict[int, float]]:
        return self.loss, self.weight, self.bytes_up, self.lengths

    def merge(self, parts: Sequence[tuple[float, float, int, dict[int, float]]]) -> None:
        """Takes the `sums` of all ranks in place of its own."""
        losses, weights, sizes, lengths = zip(*parts, strict=True)
        self.loss, self.weight, self.bytes_up = sum(losses), sum(weights), sum(sizes)
        self.lengths = {}
        for part in lengths:  # of one client, other ranks may have trained other bases
            for client, length in part.items():
                self.lengths[client] = max(self.lengths.get(client, 0.0), length)

    def refuse_all(self) -> dict[int, str]:
        """Nothing counts after all; client -> why."""
        longest = max(self.lengths, key=self.lengths.__getitem__)
        why = f"refused: the round's result was not finite; the longest reply was client {longest}'s"
        lost = dict.fromkeys(self.lengths, f"{why} ({self.lengths[longest]:.3g})")
        self.replies, self.lengths, self.loss, self.weight, self.bytes_up = [], {}, 0.0, 0.0, 0
        return lost

    def figures(self, slots: Sequence[Slot]) -> dict[str, Any]:
        loss = self.loss / self.weight if self.weight else None
        down = sum(map(self.traffic, slots))
        return {"slots": len(slots), "loss": loss, "bytes_up": self.bytes_up, "bytes_down": down}

    def apart(self, shared: Tensors) -> dict[str, float]:
        """How far the replies lie from the next shared tensors, and how much they scatter around their own mean."""
        if not self.replies:
            return {}
        updates = Updates.join(self.replies)
        next_ones = tensors.flatten(tensors.select(shared, self.held), next(iter(shared.values())))
        centre = torch.stack([updates.matrix[updates.bases == b].mean(0) for b in range(len(next_ones))])
        drift = (updates.matrix - next_ones[updates.bases]).norm(dim=1)
        scatter = (updates.matrix - centre[updates.bases]).square().sum(1)
        return {"drift": drift.mean().item(), "variance": scatter.mean().item()}
