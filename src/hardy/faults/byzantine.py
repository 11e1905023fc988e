"""Clients that lie: what a hostile client sends in place of its honest reply.

A liar knows the whole round: what was sent down, what every honest client answers, and its own honest answer. Of
weights (affine and control tensors too) it speaks in changes, θ_k − θ with θ as sent down; of BatchNorm's running
statistics in values, as Federated BatchNorm does (Guerraoui et al. 2024, §5: sign flipping "only modifies the mean by
sending its opposite"). A lie that turns signs therefore leaves running variances honest: a negative one cannot be.
Replies are compared within a base. Lies keep no state, so a resumed run tells the same ones.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardy.core import tensors
from hardy.core.messages import Updates, Work
from hardy.core.partition import Role
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.registry import kind, part

On = Literal["weights", "statistics", "both"]
_STATISTICS = {Role.NORM_MEAN, Role.NORM_VAR}
_EVALUATIONS = 16


class AttackView(NamedTuple):
    """One tensor of one base, as the liars see it."""

    own: Tensor
    """[L, ...], what the L liars would have sent"""
    honest: Tensor
    """[H, ...], what the honest send, in the order of their numbers; the liars' own where nobody is honest"""
    sent: Tensor
    """[L, ...], what each liar was sent"""
    origin: Tensor
    """[L, ...], where changes are counted from: what was sent for weights, 0 for statistics"""


@kind("lie")
@dataclass(frozen=True, kw_only=True)
class ByzantineAttack:
    """The part that says what hostile clients send. What it leaves alone stays as honest training made it."""

    turns_signs: ClassVar[bool] = False
    """then running variances stay honest"""

    def craft_reply(self, view: AttackView) -> Tensor:
        """The values the liars send, [L, ...] or one for all."""
        return view.own

    def figures(self, updates: Updates, liars: Tensor) -> Updates:
        """The updates with the sample counts and losses that the liars, marked true, report."""
        return updates

    def labels(self, labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
        """The labels the liars train on."""
        return labels

    def tune(self, moved: Callable[["ByzantineAttack"], float]) -> "ByzantineAttack":
        """The lie with what it leaves open chosen; `moved` says how far one takes the aggregate from the honest."""
        return self


@part("lie")
@dataclass(frozen=True, kw_only=True)
class SignFlipping(ByzantineAttack):
    """The opposite of its own honest change, of its own running mean (Allen-Zhu et al., ICLR 2021). ByzFL's, the
    opposite of the honest mean, is fall_of_empires with factor 1."""

    turns_signs = True

    def craft_reply(self, view: AttackView) -> Tensor:
        return view.origin - (view.own - view.origin)


@part("lie")
@dataclass(frozen=True, kw_only=True)
class FallOfEmpires(ByzantineAttack):
    """The mean of the honest, turned round and stretched: −τ·mean (Xie et al., UAI 2019)."""

    factor: float = 2.0
    """τ"""
    turns_signs = True

    def __post_init__(self) -> None:
        _require_factor(self.factor, "fall_of_empires factor (τ)")

    def craft_reply(self, view: AttackView) -> Tensor:
        return view.origin - self.factor * (view.honest.mean(0) - view.origin)


@part("lie")
@dataclass(frozen=True, kw_only=True)
class ALittleIsEnough(ByzantineAttack):
    """The mean of the honest plus τ of their standard deviations, variances too (Baruch et al., NeurIPS 2019)."""

    factor: float | None = None
    """τ; absent: in each round the one that takes the aggregate furthest from the honest mean, by a line search"""

    def __post_init__(self) -> None:
        if self.factor is not None:
            _require_factor(self.factor, "a_little_is_enough factor (τ)")

    def craft_reply(self, view: AttackView) -> Tensor:
        honest, factor = view.honest, self.factor or 0.0
        return honest.mean(0) + factor * honest.std(0) if len(honest) > 1 else honest[0]

    def tune(self, moved: Callable[[ByzantineAttack], float]) -> ByzantineAttack:
        """Half of the trials double τ from 1/8 on, the others go on around the best of them with ever smaller steps."""
        if self.factor is not None:
            return self
        factor, furthest, ratio = 1.0, 0.0, 2.0**0.5
        for number in range(_EVALUATIONS):
            coarse = number < _EVALUATIONS // 2
            trial = 2.0 ** (number - 3) if coarse else factor * ratio
            reached = moved(replace(self, factor=trial))
            if reached > furthest * (1 + 1e-6):  # where the rule leaves liars out all is level, but for rounding
                factor, furthest = trial, reached
            elif not coarse:
                ratio **= -0.5
        return replace(self, factor=factor)


@part("lie")
@dataclass(frozen=True, kw_only=True)
class Mimic(ByzantineAttack):
    """A copy of the first honest client's reply, so that it counts for many (Karimireddy et al., ICLR 2022)."""

    def craft_reply(self, view: AttackView) -> Tensor:
        return view.honest[0]


@part("lie")
@dataclass(frozen=True, kw_only=True)
class LabelFlipping(ByzantineAttack):
    """Honest training on labels turned round, y → classes − 1 − y (Allen-Zhu et al., ICLR 2021)."""

    def labels(self, labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
        return classes - 1 - labels


@part("lie")
@dataclass(frozen=True, kw_only=True)
class NotFinite(ByzantineAttack):
    """NaN or infinity in every place, variances too."""

    value: Literal["nan", "inf", "-inf"] = "nan"

    def craft_reply(self, view: AttackView) -> Tensor:
        return torch.full_like(view.own, float(self.value))


@part("lie")
@dataclass(frozen=True, kw_only=True)
class TinyLoss(ByzantineAttack):
    """An honest reply with a loss near 0, which rules that favour small losses (SFAT) would reward."""

    loss: float = 1e-6

    def figures(self, updates: Updates, liars: Tensor) -> Updates:
        return replace(updates, loss=torch.where(liars, self.loss, updates.loss))


@part("lie")
@dataclass(frozen=True, kw_only=True)
class Stale(ByzantineAttack):
    """What it was sent, as the result of the rounds before, with nothing learnt since; variances too."""

    def craft_reply(self, view: AttackView) -> Tensor:
        return view.sent


@part("lie")
@dataclass(frozen=True, kw_only=True)
class InflatedCount(ByzantineAttack):
    """An honest reply that claims many times the examples it was trained on."""

    factor: float = 1000.0

    def __post_init__(self) -> None:
        _require_factor(self.factor, "inflated_count factor")

    def figures(self, updates: Updates, liars: Tensor) -> Updates:
        return replace(updates, weights=torch.where(liars, self.factor * updates.weights, updates.weights))


def _require_factor(factor: float, what: str) -> None:
    if not 0 < factor < float("inf"):
        raise HardyError(f"{what} is {factor}; it must be above 0, and finite.")


def affected_tensors(on: On, roles: Mapping[str, Role]) -> dict[str, Role]:
    """The tensors lies are about."""
    return {n: role for n, role in roles.items() if on == "both" or (role in _STATISTICS) == (on == "statistics")}


def corrupt(
    lie: ByzantineAttack,
    updates: Updates,
    work: Work,
    *,
    liars: Collection[int],
    roles: Mapping[str, Role],
    aggregate: Callable[[Updates], Tensors],
) -> Updates:
    """The round's updates with the replies of the clients `liars` changed into lies about the tensors in `roles`.

    `aggregate` says what the server would make of them.
    """
    groups = list(_bases(updates, liars))
    if not groups:
        return updates
    device = updates.weights.device
    clients = tensors.send([slot.client for slot in updates.slots], device)
    lying = tensors.send([slot.client in liars for slot in updates.slots], device)
    shared, reported = tensors.gather(work.shared, updates.bases), tensors.gather(work.reported, clients, updates.bases)

    def told(lie: ByzantineAttack) -> Updates:
        def change(name: str, value: Tensor, sent: Tensor) -> Tensor:
            role = roles.get(name)
            if role is None or not value.is_floating_point() or (lie.turns_signs and role is Role.NORM_VAR):
                return value
            origin = torch.zeros_like(sent) if role in _STATISTICS else sent
            said = value.clone()
            for _, own, honest in groups:
                said[own] = lie.craft_reply(AttackView(value[own], value[honest], sent[own], origin[own]))
            return said

        said = replace(
            updates,
            shared={name: change(name, value, shared[name]) for name, value in updates.shared.items()},
            reported={name: change(name, value, reported[name]) for name, value in updates.reported.items()},
        )
        return lie.figures(said, lying)

    def moved(lie: ByzantineAttack) -> float:
        outcome = aggregate(told(lie))
        far = [
            (outcome[name][base] - value[honest].mean(0)).flatten()
            for name, value in updates.shared.items()
            for base, _, honest in groups
            if name in roles and value.is_floating_point()
        ]
        return float(torch.linalg.vector_norm(torch.cat(far))) if far else 0.0

    return told(lie.tune(moved))


def _bases(updates: Updates, liars: Collection[int]) -> Iterator[tuple[int, list[int], list[int]]]:
    """(base, its slots of liars, its slots they look at) for each base that liars were given."""
    order = sorted(range(len(updates.slots)), key=lambda i: updates.slots[i].client)
    for base in sorted({slot.base for slot in updates.slots}):
        here = [i for i in order if updates.slots[i].base == base]
        own = [i for i in here if updates.slots[i].client in liars]
        if own:
            yield base, own, [i for i in here if i not in own] or own


sign_flipping, fall_of_empires, a_little_is_enough = SignFlipping, FallOfEmpires, ALittleIsEnough
inflated_count, label_flipping, mimic, not_finite = InflatedCount, LabelFlipping, Mimic, NotFinite
stale, tiny_loss = Stale, TinyLoss
__all__ = [
    "AttackView",
    "ByzantineAttack",
    "On",
    "a_little_is_enough",
    "affected_tensors",
    "corrupt",
    "fall_of_empires",
    "inflated_count",
    "label_flipping",
    "mimic",
    "not_finite",
    "sign_flipping",
    "stale",
    "tiny_loss",
]
