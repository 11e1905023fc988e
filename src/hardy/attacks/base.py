"""What every attack is: images changed, within a budget, so that a net errs.

Images are [N, C, H, W] in [0, 1] and budgets are in these units. Every attack is pure: noise is a function of the key,
loops have a fixed length, choices are made by torch.where, so it runs under vmap over clients. It differentiates the
sum of the losses, so an image's result does not depend on the other images; only `affine` finds one change for all.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from hardy.errors import HardyError, unknown
from hardy.registry import kind

Forward = Callable[[Tensor], Tensor]
"""images [N, C, H, W] -> logits [N, K], also under vmap: attacks aim at several classes at once"""

_LEAST = {"epsilon": 0, "steps": 0, "rotation_radius": 0, "shift_radius": 0, "centre": 0, "decay": 0}
_LEAST |= {"restarts": 1, "queries": 1, "candidates": 1, "pixels": 1, "neighbourhood": 0}
_POSITIVE = {"step", "confidence", "share"}


@kind("attack")
@dataclass(frozen=True, kw_only=True)
class Attack:
    """The part that changes images so that a net errs."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise unknown(f"{name} of an attack", value, get_args(hint))
            if name in _LEAST and not (_LEAST[name] <= value and math.isfinite(value)):
                raise HardyError(f"{name} of an attack is {value}; it must be {_LEAST[name]} or more, and finite.")
            if name in _POSITIVE and not (value > 0 and math.isfinite(value)):
                raise HardyError(f"{name} of an attack is {value}; it must be above 0, and finite.")

    @property
    def points(self) -> int:
        """How many it climbs from at once, an image."""
        return 1

    common = False
    """whether it is found for the images of all clients together"""

    @property
    def joint(self) -> bool:
        """Whether one change is found for all images together, so that none may be left out or added."""
        return False

    def stages(self) -> "list[tuple[str, Attack]]":
        """The attacks it is made of, in order. A point that fell to one needs none of those after it."""
        return [("", self)]

    def perturb(self, forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        """The changed images. They are constants to whoever differentiates around the attack."""
        raise NotImplementedError


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """By how much the best wrong class leads, [N]: positive where the net errs."""
    own = torch.arange(logits.shape[-1], device=y.device) == y[:, None]
    return logits.masked_fill(own, -torch.inf).amax(-1) - (logits * own).sum(-1)


__all__ = ["Attack", "Forward", "margin"]
