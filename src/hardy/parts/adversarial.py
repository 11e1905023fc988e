"""Adversarial training: objectives that attack their own batch before they learn from it.

The attack sees the network as it would be deployed: running statistics of the branch the attacked images belong to,
no dropout. The passes that are learnt from use batch statistics, clean images in the branch `clean`, attacked ones in
`branch` (the same one for a single BatchNorm, `adversarial` for a dual one), and move the running statistics there.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from hardy.attacks.base import Attack
from hardy.attacks.gradient import pgd
from hardy.core import random
from hardy.core.box import clip_to_box
from hardy.core.layers import Call
from hardy.core.net import Net
from hardy.core.protocols import Batch, Fact, Objective
from hardy.core.tensors import ImageShape, Tensors
from hardy.errors import HardyError
from hardy.registry import part


@dataclass(frozen=True, kw_only=True)
class _Attacking(Objective):
    """What the objectives below share: an attack, and the branch its images belong to."""

    attack: Attack
    branch: str = "clean"

    @property
    def branches(self) -> frozenset[str]:
        return frozenset({"clean", self.branch})

    def craft(self, net: Net, batch: Batch, key: Tensor) -> Tensor:
        return self.attack.perturb(partial(net, branch=self.branch), batch.x, batch.y, random.fold(key, "attack"))

    def both(self, net: Net, batch: Batch, key: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the clean and of the attacked images, in that order of passes."""
        attacked = self.craft(net, batch, key)
        clean, robust = net.together(
            (batch.x, Call("clean", "batch", random.fold(key, "clean"))),
            (attacked, Call(self.branch, "batch", random.fold(key, "attacked"))),
        )
        return clean, robust


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Adversarial(_Attacking):
    """Madry's adversarial training on a mix: (1 − q) CE(clean) + q CE(attacked). FedRBN and Split-Mix take q = 1/2."""

    attack: Attack = pgd()
    mix: float = 0.5
    """q, weight of the attacked images in the loss; 1 trains on them alone"""

    def __post_init__(self) -> None:
        if not 0 < self.mix <= 1:
            raise HardyError(f"mix of adversarial training is {self.mix}; it must be in (0, 1].")

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        if self.mix == 1:
            attacked = self.craft(net, batch, key)
            return F.cross_entropy(net(attacked, branch=self.branch, statistics="batch", key=key), batch.y)
        clean, attacked = (F.cross_entropy(logits, batch.y) for logits in self.both(net, batch, key))
        return (1 - self.mix) * clean + self.mix * attacked


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Trades(_Attacking):
    """TRADES (Zhang et al. 2019): CE(clean) + β KL(clean ‖ attacked), the attack climbing the same KL."""

    attack: Attack = pgd(steps=10, loss="kl", start="normal")
    beta: float = 6.0
    """β, weight of the divergence between clean and attacked predictions"""

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        clean, attacked = self.both(net, batch, key)
        apart = F.kl_div(attacked.log_softmax(-1), clean.log_softmax(-1), reduction="batchmean", log_target=True)
        return F.cross_entropy(clean, batch.y) + self.beta * apart


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Mart(_Attacking):
    """MART (Wang et al. 2020): boosted CE(attacked) + β · mean of KL(clean ‖ attacked)(1 − p_y(clean))."""

    attack: Attack = pgd(steps=10, start="normal")
    beta: float = 6.0
    """β (λ in the paper)"""

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        clean, attacked = self.both(net, batch, key)
        own = batch.y[:, None]
        p = attacked.softmax(-1)
        rival = p.scatter(-1, own, 0.0).amax(-1)  # the likeliest wrong class
        boosted = F.cross_entropy(attacked, batch.y) - torch.log(1.0001 - rival).mean()
        apart = F.kl_div(attacked.log_softmax(-1), clean.log_softmax(-1), reduction="none", log_target=True).sum(-1)
        doubt = 1.0000001 - clean.softmax(-1).gather(-1, own).squeeze(-1)
        return boosted + self.beta * (apart * doubt).mean()


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


adversarial, by_kind, free, mart, trades = Adversarial, ByKind, Free, Mart, Trades


@part("objective")
def fast(*, epsilon: float = 8 / 255, branch: str = "clean") -> Adversarial:
    """Fast adversarial training (Wong et al. 2020): one step of 1.25 ε from a random start, attacked images alone."""
    return adversarial(attack=pgd(epsilon=epsilon, step=1.25 * epsilon, steps=1), mix=1.0, branch=branch)


__all__ = ["adversarial", "by_kind", "fast", "free", "mart", "trades"]
