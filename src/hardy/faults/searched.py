"""Byzantine attacks that choose how far they go: as far as the honest spread hides them, or as the rule follows."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from hardy.errors import HardyError
from hardy.faults.byzantine import (
    ALittleIsEnough,
    AttackView,
    ByzantineAttack,
    FallOfEmpires,
    Trial,
    search_factor,
)
from hardy.registry import part

_HALVINGS = 20


@part("byzantine_attack")
@dataclass(frozen=True, kw_only=True)
class InnerProductManipulation(FallOfEmpires):
    """−τ·mean of the honest with the τ that takes the aggregate of the rule furthest (Xie et al., UAI 2019).

    A liar that knows the rule: the same search as that of a_little_is_enough.
    """

    def tune(self, trial: Trial) -> ByzantineAttack:
        return search_factor(self, trial)


@dataclass(frozen=True, kw_only=True)
class _Hidden(ByzantineAttack):
    """The mean of the honest minus γ times a direction, with the largest γ that their own distances hide.

    Shejwalkar & Houmansadr, Manipulating the Byzantine, NDSS 2021; γ is found by halving.
    """

    direction: Literal["deviation", "unit", "sign"] = "deviation"
    """the standard deviation of the honest, their mean at length 1, or the sign of their mean"""
    factor: float = 0.0
    """γ; 0: in each round the largest that is hidden"""

    def __post_init__(self) -> None:
        if not 0 <= self.factor < float("inf"):
            raise HardyError(f"factor (γ) of {self} is {self.factor}; it must be 0 or more, and finite.")

    def craft_reply(self, view: AttackView) -> Tensor:
        mean = view.honest.mean(0)
        if self.direction == "deviation":
            away = view.honest.std(0) if len(view.honest) > 1 else torch.zeros_like(mean)
        else:
            change = mean - view.origin[0]
            away = change.sign() if self.direction == "sign" else change / change.norm().clamp_min(1e-30)
        forged = mean - self.factor * away
        return forged.clamp_min(0.0) if view.variance else forged

    def hidden(self, forged: Tensor, honest: Tensor) -> bool:
        """Whether a reply is hidden, by its squared distances to the honest [H], and theirs to each other [H, H]."""
        raise NotImplementedError

    def tune(self, trial: Trial) -> ByzantineAttack:
        if self.factor:
            return self
        low, high = 0.0, 1.0

        def fits(factor: float) -> bool:
            return all(self.hidden(*pair) for pair in trial.distances(replace(self, factor=factor)))

        while fits(high) and high < 1e6:
            low, high = high, 2 * high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return replace(self, factor=low)


@part("byzantine_attack")
@dataclass(frozen=True, kw_only=True)
class MinMax(_Hidden):
    """No further from any honest client than two of them lie apart (Shejwalkar & Houmansadr, NDSS 2021).

    Of the honest changes 0 and 2, with deviation √2 and mean 1, γ √2 = 1: the liar sends 0, at a distance of 2.
    """

    def hidden(self, forged: Tensor, honest: Tensor) -> bool:
        return bool(forged.max() <= honest.max())


@part("byzantine_attack")
@dataclass(frozen=True, kw_only=True)
class MinSum(_Hidden):
    """With no larger sum of squared distances to the honest than one of them has (Shejwalkar & Houmansadr, NDSS 2021).

    Of the honest changes 0 and 2 the largest sum is 4, so that (1 − a)² + (1 + a)² = 4 and a = 1: the liar sends 0.
    """

    def hidden(self, forged: Tensor, honest: Tensor) -> bool:
        return bool(forged.sum() <= honest.sum(1).max())


@part("byzantine_attack")
@dataclass(frozen=True, kw_only=True)
class AdaptiveLie(ByzantineAttack):
    """Of several attacks, each tuned, the one that takes the aggregate of the rule furthest from the honest mean.

    A liar that knows the rule and tries its lies on it in every round: it costs as many aggregations as they do.
    """

    attacks: tuple[ByzantineAttack, ...] = (ALittleIsEnough(), InnerProductManipulation(), MinMax(), MinSum())
    """what it tries"""

    def __post_init__(self) -> None:
        if len(self.attacks) < 2 or not all(attack.changes_tensors for attack in self.attacks):
            raise HardyError(f"{self}: attacks must be two or more that change tensors.")

    def craft_reply(self, view: AttackView) -> Tensor:
        return self.attacks[0].craft_reply(view)

    def tune(self, trial: Trial) -> ByzantineAttack:
        tuned = [attack.tune(trial) for attack in self.attacks]
        return max(tuned, key=trial.moved)  # the first of equals


inner_product_manipulation, min_max, min_sum, adaptive_lie = InnerProductManipulation, MinMax, MinSum, AdaptiveLie
__all__ = ["adaptive_lie", "inner_product_manipulation", "min_max", "min_sum"]
