"""Split-Mix: one training, every width and robustness.

Hong et al., Efficient Split-Mix Federated Learning for On-Demand and In-Situ Customization, ICLR 2022, Algorithms 1–4.

r width of a base network · M = ⌊1/r⌋ bases w_1 … w_M · R_k ≤ 1 the width client k can train · D_k its data ·
P the queue of bases, p its head · BNc, BNn a base's BatchNorm for clean and for attacked images · λ robustness
1. The bases are drawn independently, with the variance that layers of the ×1 network have.               (§4.2)
2. Client k gets the base at the head of P, which is shuffled anew whenever it runs out,                  (Alg. 2, 1–2)
   and ⌊R_k/r⌋ − 1 further ones, uniformly without replacement.                                            (Alg. 2, 4–5)
3. It trains each of its bases on its own, all at once: a base of a client is a slot.                      (Alg. 3)
   DAT: along the gradient of ½ CE(x; BNc) + ½ CE(x̃; BNn), x̃ attacking that base through BNn.              (Alg. 4)
4. The server averages each base over the clients that trained it, weighted by |D_k|;                      (Alg. 1, 7–8)
   a base nobody trained keeps its value.
5. Width R is served by the mean of the logits of the first ⌊R/r⌋ bases,                                    (Alg. 1, 11)
   robustness λ by (1 − λ) BNc(x) + λ BNn(x) at every layer.                                               (Eq. 2)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import nn

from hardy.attacks.base import Attack
from hardy.attacks.gradient import pgd
from hardy.core import random
from hardy.core.federation import Client, affordable
from hardy.core.layers import BatchNorm
from hardy.core.messages import Slot
from hardy.core.method import Method
from hardy.core.protocols import Fact, Norm, Objective, Optimiser, Setting
from hardy.errors import HardyError
from hardy.parts.adversarial import adversarial
from hardy.parts.budgets import Mixed
from hardy.parts.norms import batch, dual
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd
from hardy.registry import part


@part("budget")
@dataclass(frozen=True, kw_only=True)
class Queue(Mixed):
    """Each client trains as many bases as fit into its capacity; a shuffled queue gives every base to every client."""

    width: float = 0.125
    """r of the bases; the model is built so wide"""
    rescale_init: bool = True
    """draw the bases with the variance of the ×1 network's layers instead of their own"""
    rescale_layer: bool = False
    """multiply what enters a norm by 1/r wherever the batch's own statistics are used: in training, and at test with
    inference_statistics = batch; poisonous for tracked statistics"""
    sort: bool = False
    """serve the bases in the order of their validation accuracy"""

    def __post_init__(self) -> None:
        if not 0 < self.width <= 1:
            raise HardyError(f"width (r) of the bases is {self.width}; it must be in (0, 1].")

    @property
    def unit(self) -> float:
        return self.width

    @property
    def base_width(self) -> float:
        return self.width

    @property
    def best_first(self) -> bool:
        return self.sort

    @property
    def consumes(self) -> frozenset[Fact]:
        return frozenset({"capacity"})

    def check(self, method: Method, setting: Setting) -> None:
        for number, client in enumerate(setting.sorts):
            if not affordable(client.capacity, self.width):
                raise HardyError(
                    f"client {number} can train a width of {client.capacity:g}, below the {self.width:g} of a base. "
                    "Take narrower bases (method.width), or raise its capacity (data.capacity)."
                )

    def networks(self, build: Callable[[], nn.Module]) -> list[nn.Module]:
        bases = super().networks(build)
        for base in bases:
            if self.rescale_init:
                rescale(base, self.width)
            for module in base.modules() if self.rescale_layer else ():
                if isinstance(module, BatchNorm):
                    module.gain = 1 / self.width
        return bases

    def assign(self, round_number: int, cohort: Sequence[int], clients: Sequence[Client], seed: int) -> list[Slot]:
        slots = []
        for position, client in enumerate(cohort, round_number * len(cohort)):
            shuffle, p = divmod(position, self.bases)
            first = random.stream(seed, "queue", shuffle).permutation(self.bases)[p]
            others = [base for base in range(self.bases) if base != first]
            more = affordable(clients[client].capacity, self.width) - 1
            drawn = random.stream(seed, round_number, client, "bases").permutation(others)[:more]
            slots += [Slot(client, int(base)) for base in (first, *drawn)]
        return slots


@torch.no_grad()
def rescale(base: nn.Module, width: float) -> None:
    """Makes first values as small as in the ×1 network, whose layers have 1/r times the inputs; the first layer sees
    the same image in both."""
    layers = [m for m in base.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear)]
    for parameter in (own for layer in layers[1:] for own in layer.parameters(recurse=False)):
        parameter.mul_(sqrt(width))


queue = Queue


@part("method")
def split_mix(
    *,
    width: float = 0.125,
    rescale_init: bool = True,
    rescale_layer: bool = False,
    sort: bool = False,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """Independent narrow bases, trained within the clients' capacities and mixed to any width; width is r.

    norm: batch = tracked; with inference_statistics = batch or recomputed, batch or post average; local = locally
    tracked.
    """
    budget = queue(width=width, rescale_init=rescale_init, rescale_layer=rescale_layer, sort=sort)
    return Method(name="split_mix", norm=norm, objective=objective, optimiser=optimiser, budget=budget)


@part("method")
def split_mix_dat(
    *,
    width: float = 0.125,
    rescale_init: bool = True,
    sort: bool = False,
    attack: Attack = pgd(),
    mix: float = 0.5,
    norm: Norm = dual(dual_affine=True, serves="clean"),
    optimiser: Optimiser = sgd(),
) -> Method:
    """Split-Mix whose bases learn clean and attacked images behind dual norms: robustness too is chosen afterwards.
    width is r, mix λ_n; every base is attacked on its own."""
    return Method(
        name="split_mix_dat",
        norm=norm,
        objective=adversarial(attack=attack, mix=mix, branch="adversarial"),
        optimiser=optimiser,
        budget=queue(width=width, rescale_init=rescale_init, sort=sort),
    )


__all__ = ["queue", "split_mix", "split_mix_dat"]
