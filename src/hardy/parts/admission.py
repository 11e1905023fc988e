"""The gate before every aggregator: a reply that cannot be right is refused with its reason, and the round goes on."""

from dataclasses import dataclass

import torch

from hardy import tensors
from hardy.errors import HardyError
from hardy.messages import Updates, Work


@dataclass(frozen=True, kw_only=True)
class Admission:
    """`[admission]`: what a reply must satisfy."""

    largest_update: float = float("inf")
    """refuse a reply whose shared tensors moved further than this (L2)"""

    def __post_init__(self) -> None:
        if not self.largest_update > 0:
            raise HardyError(f"admission.largest_update is {self.largest_update}; it must be above 0.")

    def admit(self, updates: Updates, work: Work) -> tuple[Updates, dict[int, str]]:
        """The updates that may be aggregated, and why each of the others was refused."""
        reported = tensors.flatten(updates.reported, updates.loss)
        fine = torch.isfinite(updates.loss + updates.matrix.sum(1) + reported.sum(1))
        near = torch.ones_like(fine)
        if self.largest_update < float("inf"):
            sent = tensors.gather(work.shared, updates.bases)
            near = (updates.matrix - tensors.flatten(sent, updates.loss)).square().sum(1).sqrt() <= self.largest_update
        if bool((fine & near).all()):
            return updates, {}
        refused = {}
        for slot, is_fine, is_near in zip(updates.slots, fine.tolist(), near.tolist(), strict=True):
            if not is_fine:
                refused[slot.client] = "refused: not finite"
            elif not is_near:
                refused[slot.client] = f"refused: moved further than {self.largest_update:g}"
        return updates.where(fine & near), refused
