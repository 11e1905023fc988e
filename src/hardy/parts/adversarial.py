"""Adversarial training: objectives that attack their own batch before they learn from it.

The attack sees the network as it would be deployed: running statistics of the branch the attacked images belong to,
no dropout. The passes that are learnt from use batch statistics, clean images in the branch `clean`, attacked ones in
`branch` (the same one for a single BatchNorm, `adversarial` for a dual one), and move the running statistics there.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hardy.attacks.base import Attack
from hardy.attacks.gradient import Ascent, pgd
from hardy.core import random
from hardy.core.box import clip_to_box
from hardy.core.layers import Call
from hardy.core.net import Net
from hardy.core.protocols import Batch, Fact, Objective, Wrapper, name_part
from hardy.core.tensors import ImageShape, Tensors
from hardy.errors import HardyError
from hardy.registry import part


class Losses(NamedTuple):
    """What each image of a batch costs, [N]."""

    clean: Tensor
    attacked: Tensor
    """what is learnt from its attacked copy"""


@dataclass(frozen=True, kw_only=True)
class AdversarialTraining(Objective):
    """What the objectives below share: an attack, the branch its images belong to, and a loss for each image."""

    attack: Attack
    branch: str = "clean"

    @property
    def branches(self) -> frozenset[str]:
        return frozenset({"clean", self.branch})

    def craft(self, net: Net, batch: Batch, key: Tensor) -> Tensor:
        return self.attack.perturb(partial(net, branch=self.branch), batch.x, batch.y, random.fold(key, "attack"))

    def craft_counting(self, net: Net, batch: Batch, key: Tensor) -> tuple[Tensor, Tensor]:
        """The attacked images, and how many steps of the attack each withstood."""
        assert isinstance(self.attack, Ascent)
        return self.attack.climb(partial(net, branch=self.branch), batch.x, batch.y, random.fold(key, "attack"))

    def logits(self, net: Net, batch: Batch, attacked: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Of the clean and of the attacked images, in that order of passes."""
        clean, robust = net.together(
            (batch.x, Call("clean", "batch", random.fold(key, "clean"))),
            (attacked, Call(self.branch, "batch", random.fold(key, "attacked"))),
        )
        return clean, robust

    def losses(self, clean: Tensor, robust: Tensor, y: Tensor) -> Losses:
        """What the images cost by these logits."""
        raise NotImplementedError

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        clean, robust = self.logits(net, batch, self.craft(net, batch, key), key)
        each = self.losses(clean, robust, batch.y)
        return each.clean.mean() + each.attacked.mean()


def divergence(target: Tensor, logits: Tensor) -> Tensor:
    """KL(softmax(target) ‖ softmax(logits)) of each image, [N]."""
    taught = target.log_softmax(-1)  # as F.kl_div has it, which vmap knows only as a loop
    return (taught.exp() * (taught - logits.log_softmax(-1))).sum(-1)


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Adversarial(AdversarialTraining):
    """Madry's adversarial training on a mix: (1 − q) CE(clean) + q CE(attacked). FedRBN and Split-Mix take q = 1/2."""

    attack: Attack = pgd()
    mix: float = 0.5
    """q, weight of the attacked images in the loss; 1 trains on them alone"""

    def __post_init__(self) -> None:
        if not 0 < self.mix <= 1:
            raise HardyError(f"mix of adversarial training is {self.mix}; it must be in (0, 1].")

    def logits(self, net: Net, batch: Batch, attacked: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.mix < 1:
            return super().logits(net, batch, attacked, key)
        robust = net(attacked, branch=self.branch, statistics="batch", key=key)
        return robust, robust  # clean images do not count

    def losses(self, clean: Tensor, robust: Tensor, y: Tensor) -> Losses:
        attacked = self.mix * F.cross_entropy(robust, y, reduction="none")
        if self.mix == 1:
            return Losses(torch.zeros_like(attacked), attacked)
        return Losses((1 - self.mix) * F.cross_entropy(clean, y, reduction="none"), attacked)


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Trades(AdversarialTraining):
    """TRADES (Zhang et al. 2019): CE(clean) + β KL(clean ‖ attacked), the attack climbing the same KL."""

    attack: Attack = pgd(steps=10, loss="kl", start="normal")
    beta: float = 6.0
    """β, weight of the divergence between clean and attacked predictions"""

    def losses(self, clean: Tensor, robust: Tensor, y: Tensor) -> Losses:
        return Losses(F.cross_entropy(clean, y, reduction="none"), self.beta * divergence(clean, robust))


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Mart(AdversarialTraining):
    """MART (Wang et al. 2020): boosted CE(attacked) + β · mean of KL(clean ‖ attacked)(1 − p_y(clean))."""

    attack: Attack = pgd(steps=10, start="normal")
    beta: float = 6.0
    """β (λ in the paper)"""

    def losses(self, clean: Tensor, robust: Tensor, y: Tensor) -> Losses:
        own = y[:, None]
        rival = robust.softmax(-1).scatter(-1, own, 0.0).amax(-1)  # the likeliest wrong class
        boosted = F.cross_entropy(robust, y, reduction="none") - torch.log(1.0001 - rival)
        doubt = 1.0000001 - clean.softmax(-1).gather(-1, own).squeeze(-1)
        return Losses(torch.zeros_like(doubt), boosted + self.beta * doubt * divergence(clean, robust))


@dataclass(frozen=True, kw_only=True)
class Reweighted(Wrapper):
    """An adversarial objective in which what is learnt from an attacked image counts by how many steps of the attack
    the image withstood. The weights of a batch have a mean of one."""

    inner: Objective = Adversarial(mix=1.0)

    def __post_init__(self) -> None:
        if not isinstance(self.inner, AdversarialTraining) or not isinstance(self.inner.attack, Ascent):
            raise HardyError(
                f"{name_part(self)} counts the steps of an attack, but its inner objective is "
                f"{name_part(self.inner)!r}. It takes adversarial, trades or mart with attack pgd, mim or cw; any "
                "other objective goes around it, and by_kind(AT=..., ST=...) too."
            )

    def weigh(self, withstood: Tensor, steps: int) -> Tensor:
        """The weights of images that withstood so many of the attack's steps, [N], of any mean."""
        raise NotImplementedError

    @property
    def mixes_examples(self) -> bool:
        return True

    def regularise(self, net: Net, batch: Batch, robust: Tensor) -> Tensor | float:
        """What is added to the loss, by the logits of the attacked images."""
        return 0.0

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        training = self.inner
        assert isinstance(training, AdversarialTraining) and isinstance(training.attack, Ascent)
        attacked, withstood = training.craft_counting(net, batch, key)
        weights = self.weigh(withstood, training.attack.steps)
        weights = weights / weights.mean().clamp_min(1e-12)
        clean, robust = training.logits(net, batch, attacked, key)
        each = training.losses(clean, robust, batch.y)
        return each.clean.mean() + (weights * each.attacked).mean() + self.regularise(net, batch, robust)


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Free(Objective):
    """Free adversarial training (Shafahi et al. 2019): one backward pass moves the weights down and the change up.

    Take it with `training.replays` = m, which shows each batch m times. The change is a private tensor, carried from
    batch to batch as in the paper.
    """

    epsilon: float = 8 / 255
    branch: str = "clean"

    def __post_init__(self) -> None:
        if not self.epsilon >= 0:
            raise HardyError(f"epsilon of free adversarial training is {self.epsilon}; it must be 0 or more.")

    @property
    def branches(self) -> frozenset[str]:
        return frozenset({self.branch})

    @property
    def has_adversary(self) -> bool:
        return True

    def private(self, shape: ImageShape, batch: int) -> Tensors:
        return {"free.change": torch.zeros(batch, *shape)}

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        change = private["free.change"]
        x = clip_to_box(batch.x + change[: len(batch.x)])
        return F.cross_entropy(net(x, branch=self.branch, statistics="batch", key=key), batch.y)

    def step_adversary(self, private: Tensors, gradient: Tensors) -> None:
        change, slope = private["free.change"], gradient["free.change"]
        change.add_(slope.sign(), alpha=self.epsilon).clamp_(-self.epsilon, self.epsilon)


@part("objective")
@dataclass(frozen=True, kw_only=True)
class ByKind(Objective):
    """An objective for clients that can afford adversarial training and one for those that cannot (kind ST)."""

    AT: Objective
    """for clients that can afford adversarial training"""
    ST: Objective
    """for the others"""

    @property
    def branches(self) -> frozenset[str]:
        return self.AT.branches | self.ST.branches

    @property
    def has_adversary(self) -> bool:
        return self.AT.has_adversary or self.ST.has_adversary

    @property
    def consumes(self) -> frozenset[Fact]:
        return frozenset({"kind"})

    def for_client(self, kind: str, round_number: int) -> Objective:
        return (self.ST if kind == "ST" else self.AT).for_client(kind, round_number)

    def alone(self) -> Objective:
        return replace(self, AT=self.AT.alone(), ST=self.ST.alone())

    def private(self, shape: ImageShape, batch: int) -> Tensors:
        return {**self.ST.private(shape, batch), **self.AT.private(shape, batch)}

    def kept(self, model: Tensors) -> Tensors:
        return {**self.ST.kept(model), **self.AT.kept(model)}


adversarial, by_kind, free, mart, trades = Adversarial, ByKind, Free, Mart, Trades


@part("objective")
def fast(*, epsilon: float = 8 / 255, branch: str = "clean") -> Adversarial:
    """Fast adversarial training (Wong et al. 2020): one step of 1.25 ε from a random start, attacked images alone."""
    return adversarial(attack=pgd(epsilon=epsilon, step=1.25 * epsilon, steps=1), mix=1.0, branch=branch)


__all__ = ["adversarial", "by_kind", "fast", "free", "mart", "trades"]
