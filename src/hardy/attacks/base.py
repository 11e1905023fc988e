"""What every attack is: images changed, within a budget, so that a net errs.

Images are [N, C, H, W] in [0, 1] and budgets are in these units; most attacks take feature vectors [N, F] too. Every
attack is pure: noise is a function of the key, loops have a fixed length, choices are made by torch.where, so it runs
under vmap over clients. It differentiates the sum of the losses, so an image's result does not depend on the other
images; only `affine` finds one change for all.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from hardy.core import random
from hardy.errors import HardyError, unknown
from hardy.registry import kind

Forward = Callable[[Tensor], Tensor]
"""images [N, C, H, W] -> logits [N, K], also under vmap: attacks aim at several classes at once"""

USUAL_RADIUS = 8 / 255
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

    images_only = False
    """whether it needs images, and cannot change feature vectors"""
    needs_gradient = True
    """whether it differentiates the network; otherwise it only looks at logits"""
    needs_box = False
    """whether it needs to know the range of the inputs"""
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


@dataclass(frozen=True, kw_only=True)
class Ensemble(Attack):
    """Several attacks, its stages, one after another. An image that fell to one stays fallen."""

    @torch.no_grad()
    def perturb(self, forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        """Per image the first success, or what the last stage left."""
        found = x
        for name, attack in self.stages():
            fallen = forward(found).argmax(1) != y
            found = pick(fallen, found, attack.perturb(forward, x, y, random.fold(key, name)))
        return found


def pick(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Of two changes of the same images, image by image; the mask is [N]."""
    return torch.where(mask.view(-1, *[1] * (a.dim() - 1)), a, b)


def refuse_inputs(attack: Attack, shape: Sequence[int], *, bounded: bool) -> None:
    """Refuses an attack that cannot work on inputs of this shape, or whose radius means nothing for them."""
    stages = {name or type(stage).__name__.lower(): stage for name, stage in attack.stages()}
    if len(shape) == 1 and (found := [name for name, stage in stages.items() if stage.images_only]):
        raise HardyError(
            f"attack {found[0]} changes images, but the data are vectors of {shape[0]} features. Take fgsm, pgd, mim, "
            "cw or apgd-ce."
        )
    if not bounded and (found := [name for name, stage in stages.items() if stage.needs_box]):
        raise HardyError(f"attack {found[0]} needs inputs of a known range. Give data.range = [low, high].")
    refuse_usual_radius(attack, bounded=bounded)
    for name, stage in stages.items():
        radius = getattr(stage, "epsilon", 0.0)
        if bounded and radius > 1 and getattr(stage, "ball", "linf") == "linf":
            raise HardyError(
                f"the radius of {name} is {radius:g}, but inputs are in [0, 1]: a radius above 1 bounds nothing. Did "
                f"you mean {radius:g}/255?"
            )


def refuse_usual_radius(attacker: object, *, bounded: bool) -> None:
    """8/255 is meant for pixels; where inputs have no range, a radius must be chosen for them."""
    if not bounded and getattr(attacker, "epsilon", None) == USUAL_RADIUS:
        raise HardyError(
            f"the radius of {type(attacker).__name__.lower()} is 8/255, the usual one for pixels in [0, 1], but these "
            "data have no range. Give a radius in the units of the features, such as pgd-20@0.5, or "
            "data.range = [low, high]."
        )


def for_each(function: Callable[..., Any], forward: Forward, x: Tensor, *rows: Tensor) -> Any:
    """function(row, ...) for each row, stacked: all at once where the network runs under vmap, else one by one."""
    some = x[:2]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about speed
            torch.vmap(torch.func.grad(lambda z: forward(z).sum()))(torch.stack([some, some]))
    except HardyError:
        raise
    except Exception:  # torch raises anything there
        results = [function(*row) for row in zip(*rows, strict=True)]
        return tuple(map(torch.stack, zip(*results, strict=True)))
    return torch.vmap(function)(*rows)


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """By how much the best wrong class leads, [N]: positive where the net errs."""
    own = torch.arange(logits.shape[-1], device=y.device) == y[:, None]
    return logits.masked_fill(own, -torch.inf).amax(-1) - (logits * own).sum(-1)


__all__ = ["Attack", "Ensemble", "Forward", "for_each", "margin", "pick", "refuse_inputs", "refuse_usual_radius"]
