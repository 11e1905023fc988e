"""Byzantine attacks: what a hostile client sends in place of its honest reply.

A hostile client knows the whole round: what was sent down, what every honest client answers, and its own honest answer.
Of weights (affine and control tensors too) it sends changes, θ_k − θ with θ as sent down; of BatchNorm's running
statistics it sends values, as Federated BatchNorm does (Guerraoui et al. 2024, §5: sign flipping "only modifies the
mean by sending its opposite"). An attack that flips signs therefore leaves running variances honest: they cannot be
negative. Replies are compared within a base. Attacks keep no state, so a resumed run makes the same ones.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hardy.core import tensors
from hardy.core.federation import Federation, Labels, Pixels
from hardy.core.messages import Updates, Work
from hardy.core.partition import Role
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.registry import kind, part

Affects = Literal["weights", "statistics", "both"]
"""the tensors an attack changes: weights (with affine and control tensors), running statistics, or both"""
_STATISTICS = {Role.NORM_MEAN, Role.NORM_VAR}
_EVALUATIONS = 16


class AttackView(NamedTuple):
    """One tensor of one base, as the L hostile clients see it."""

    own: Tensor
    """[L, ...], what they would have sent"""
    honest: Tensor
    """[H, ...], what the honest clients send, in the order of their numbers; `own` where nobody is honest"""
    sent: Tensor
    """[L, ...], what each was sent"""
    origin: Tensor
    """[L, ...], where changes are counted from: what was sent for weights, 0 for statistics"""
    statistic: bool = False
    """whether it is a running mean or variance"""
    variance: bool = False
    """whether it is a running variance, which cannot be negative"""


class Trial(NamedTuple):
    """What hostile clients can find out about an attack before they send it."""

    moved: Callable[["ByzantineAttack"], float]
    """how far it takes what the server would make of the round from the mean of the honest"""
    distances: Callable[["ByzantineAttack"], list[tuple[Tensor, Tensor]]]
    """for each base: squared distances of the forged reply to the honest ones [H], and of these to each other [H, H]"""


@kind("byzantine_attack")
@dataclass(frozen=True, kw_only=True)
class ByzantineAttack:
    """The part that says what hostile clients send. What it leaves alone stays as honest training made it."""

    flips_signs: ClassVar[bool] = False
    """whether running variances stay honest, which cannot be negative"""

    def craft_reply(self, view: AttackView) -> Tensor:
        """The values the hostile clients send, [L, ...] or one for all."""
        return view.own

    def figures(self, updates: Updates, hostile: Tensor) -> Updates:
        """The updates with the sample counts and losses that hostile clients, marked true, report."""
        return updates

    @property
    def plants_backdoor(self) -> bool:
        """Whether there are test rows to measure how well it works."""
        return False

    def poison(self, federation: Federation, hostile: Sequence[int], seed: int) -> dict[int, tuple[Pixels, Labels]]:
        """Hostile client -> the inputs and labels it trains on, where they are not its own."""
        return {}

    def with_triggered_rows(self, federation: Federation) -> Federation:
        """The federation with the test rows that a backdoor is measured on."""
        return federation

    def tune(self, trial: Trial) -> "ByzantineAttack":
        """The attack with what it leaves open chosen."""
        return self

    @property
    def changes_tensors(self) -> bool:
        """Whether hostile clients send other tensors than training gave them."""
        return type(self).craft_reply is not ByzantineAttack.craft_reply


@part("byzantine_attack")
@dataclass(frozen=True, kw_only=True)
class SignFlipping(ByzantineAttack):
    """The opposite of its own honest change, of its own running mean (Allen-Zhu et al., ICLR 2021). ByzFL's, the
    opposite of the honest mean, is fall_of_empires with factor 1."""

    flips_signs = True

    def craft_reply(self, view: AttackView) -> Tensor:
        return view.origin - (view.own - view.origin)


@part("byzantine_attack")
@dataclass(frozen=True, kw_only=True)
class FallOfEmpires(ByzantineAttack):
    """The mean of the honest, turned round and stretched: −τ·mean (Xie et al., UAI 2019)."""

    factor: float = 2.0
    """τ, how far the mean of the honest is stretched"""
    flips_signs = True

    def __post_init__(self) -> None:
        require_factor(self.factor, "fall_of_empires factor (τ)")

    def craft_reply(self, view: AttackView) -> Tensor:
        return view.origin - self.factor * (view.honest.mean(0) - view.origin)


@part("byzantine_attack")
@dataclass(frozen=True, kw_only=True)
class ALittleIsEnough(ByzantineAttack):
    """The mean of the honest plus τ of their standard deviations, variances too (Baruch et al., NeurIPS 2019)."""

    factor: float | None = None
    """τ; absent: in each round the one that takes the aggregate furthest from the honest mean, by a line search"""

    def __post_init__(self) -> None:
        if self.factor is not None:
            require_factor(self.factor, "a_little_is_enough factor (τ)")

    def craft_reply(self, view: AttackView) -> Tensor:
        honest, factor = view.honest, self.factor or 0.0
        return honest.mean(0) + factor * honest.std(0) if len(honest) > 1 else honest[0]

    def tune(self, trial: Trial) -> ByzantineAttack:
        return self if self.factor is not None else search_factor(self, trial)


def search_factor(attack: ByzantineAttack, trial: Trial) -> ByzantineAttack:
    """The attack with the factor τ that takes the aggregate furthest: half of the trials double τ from 1/8 on, the
    others go on around the best of them with ever smaller steps."""
    factor, furthest, ratio = 1.0, 0.0, 2.0**0.5
    for number in range(_EVALUATIONS):
        coarse = number < _EVALUATIONS // 2
        chosen = 2.0 ** (number - 3) if coarse else factor * ratio
        reached = trial.moved(replace(attack, factor=chosen))  # type: ignore[call-arg]
        if reached > furthest * (1 + 1e-6):  # where the rule leaves hostile clients out all is level, but for rounding
            factor, furthest = chosen, reached
        elif not coarse:
            ratio **= -0.5
    return replace(attack, factor=factor)  # type: ignore[call-arg]


@part("byzantine_attack")
@dataclass(frozen=True, kw_only=True)
class Mimic(ByzantineAttack):
    """A copy of the first honest client's reply, so that it counts for many (Karimireddy et al., ICLR 2022)."""

    def craft_reply(self, view: AttackView) -> Tensor:
        return view.honest[0]


@part("byzantine_attack")
@dataclass(frozen=True, kw_only=True)
class LabelFlipping(ByzantineAttack):
    """Honest training on labels turned round, y → classes − 1 − y (Allen-Zhu et al., ICLR 2021)."""

    def poison(self, federation: Federation, hostile: Sequence[int], seed: int) -> dict[int, tuple[Pixels, Labels]]:
        held = {number: federation.clients[number].train for number in hostile}
        turned = {n: len(federation.classes) - 1 - federation.y_train[rows] for n, rows in held.items()}
        return {number: (federation.x_train[rows], turned[number]) for number, rows in held.items()}


@part("byzantine_attack")
@dataclass(frozen=True, kw_only=True)
class NotFinite(ByzantineAttack):
    """NaN or infinity in every place, variances too."""

    value: Literal["nan", "inf", "-inf"] = "nan"
    """what is sent"""

    def craft_reply(self, view: AttackView) -> Tensor:
        return torch.full_like(view.own, float(self.value))


@part("byzantine_attack")
@dataclass(frozen=True, kw_only=True)
class TinyLoss(ByzantineAttack):
    """An honest reply with a loss near 0, which rules that favour small losses (SFAT) would reward."""

    loss: float = 1e-6
    """the loss that is claimed"""

    def figures(self, updates: Updates, hostile: Tensor) -> Updates:
        return replace(updates, loss=torch.where(hostile, self.loss, updates.loss))


@part("byzantine_attack")
@dataclass(frozen=True, kw_only=True)
class Stale(ByzantineAttack):
    """What it was sent, as the result of the rounds before, with nothing learnt since; variances too."""

    def craft_reply(self, view: AttackView) -> Tensor:
        return view.sent


@part("byzantine_attack")
@dataclass(frozen=True, kw_only=True)
class InflatedCount(ByzantineAttack):
    """An honest reply that claims many times the examples it was trained on."""

    factor: float = 1000.0
    """times the true number of examples"""

    def __post_init__(self) -> None:
        require_factor(self.factor, "inflated_count factor")

    def figures(self, updates: Updates, hostile: Tensor) -> Updates:
        return replace(updates, weights=torch.where(hostile, self.factor * updates.weights, updates.weights))


def require_factor(factor: float, what: str) -> None:
    if not 0 < factor < float("inf"):
        raise HardyError(f"{what} is {factor}; it must be above 0, and finite.")


def affected_tensors(affects: Affects, roles: Mapping[str, Role]) -> dict[str, Role]:
    """The tensors that attacks change, out of those with these roles."""
    return {n: r for n, r in roles.items() if affects == "both" or (r in _STATISTICS) == (affects == "statistics")}


def corrupt(
    attack: ByzantineAttack,
    updates: Updates,
    work: Work,
    *,
    hostile: Collection[int],
    roles: Mapping[str, Role],
    aggregate: Callable[[Updates], Tensors],
) -> Updates:
    """The round's updates with what the clients `hostile` send in place of the tensors in `roles`.

    `aggregate` says what the server would make of them.
    """
    groups = list(_bases(updates, hostile))
    if not groups:
        return updates
    device = updates.weights.device
    marked = tensors.send([slot.client in hostile for slot in updates.slots], device)
    shared, reported = tensors.gather(work.shared, updates.bases), work.reported.read(updates.slots)

    def attacked(attack: ByzantineAttack) -> Updates:
        def change(name: str, value: Tensor, sent: Tensor) -> Tensor:
            role = roles.get(name)
            if role is None or not value.is_floating_point() or (attack.flips_signs and role is Role.NORM_VAR):
                return value
            about = role in _STATISTICS, role is Role.NORM_VAR
            origin = torch.zeros_like(sent) if about[0] else sent
            changed = value.clone()
            for _, own, honest in groups:
                changed[own] = attack.craft_reply(AttackView(value[own], value[honest], sent[own], origin[own], *about))
            return changed

        changed = replace(
            updates,
            shared={name: change(name, value, shared[name]) for name, value in updates.shared.items()},
            reported={name: change(name, value, reported[name]) for name, value in updates.reported.items()},
        )
        return attack.figures(changed, marked)

    def moved(attack: ByzantineAttack) -> float:
        outcome = aggregate(attacked(attack))
        far = [
            (outcome[name][base] - value[honest].mean(0)).flatten()
            for name, value in updates.shared.items()
            for base, _, honest in groups
            if name in roles and value.is_floating_point()
        ]
        return float(torch.linalg.vector_norm(torch.cat(far))) if far else 0.0

    def distances(attack: ByzantineAttack) -> list[tuple[Tensor, Tensor]]:
        forged, found = attacked(attack), []
        names = [name for name, value in updates.shared.items() if name in roles and value.is_floating_point()]
        for _, own, honest in groups:
            seen = [own[0], *honest]
            each = [forged.shared[n][seen].reshape(len(seen), -1).double() for n in names]
            apart = torch.cdist(rows := torch.cat(each, 1), rows).square() if each else torch.zeros(1, 1)
            found.append((apart[0, 1:], apart[1:, 1:]))
        return found

    return attacked(attack.tune(Trial(moved, distances)))


def _bases(updates: Updates, hostile: Collection[int]) -> Iterator[tuple[int, list[int], list[int]]]:
    """(base, its slots of hostile clients, the slots they look at) for each base that hostile clients were given."""
    order = sorted(range(len(updates.slots)), key=lambda i: updates.slots[i].client)
    for base in sorted({slot.base for slot in updates.slots}):
        here = [i for i in order if updates.slots[i].base == base]
        own = [i for i in here if updates.slots[i].client in hostile]
        if own:
            yield base, own, [i for i in here if i not in own] or own


sign_flipping, fall_of_empires, a_little_is_enough = SignFlipping, FallOfEmpires, ALittleIsEnough
inflated_count, label_flipping, mimic, not_finite = InflatedCount, LabelFlipping, Mimic, NotFinite
stale, tiny_loss = Stale, TinyLoss
__all__ = [
    "Affects",
    "AttackView",
    "ByzantineAttack",
    "Trial",
    "a_little_is_enough",
    "affected_tensors",
    "corrupt",
    "fall_of_empires",
    "inflated_count",
    "label_flipping",
    "mimic",
    "not_finite",
    "require_factor",
    "search_factor",
    "sign_flipping",
    "stale",
    "tiny_loss",
]
