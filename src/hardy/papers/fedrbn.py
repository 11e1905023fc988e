"""FedRBN: robustness spreads from clients that can afford adversarial training to those that cannot.

Hong et al., Federated Robustness Propagation: Sharing Robustness in Heterogeneous Federated Learning, AAAI 2023,
Algorithms 1 to 3.

θ weights · BNc, BNa a client's BatchNorm for clean and for attacked images, (μ, σ²) and (μ_a, σ²_a) their statistics ·
S the clients of kind AT, the others are ST · λ weight of the calibration · T temperature · x̃ the attacked x
1. The server sends θ; an ST client also gets (μ_a, σ²_a).                                            (Alg. 2, 2)
2. An AT client steps on ½ CE(x; BNc) + ½ CE(x̃; BNa), which moves the statistics of both.            (Alg. 1, 5–7)
3. An ST client steps on (1 − λ) CE(x; BNc) + λ CE(x; BNa), BNa frozen: pseudo-noise calibration.     (Eq. 5)
4. The server takes the mean of θ; clients keep their BatchNorm and report its statistics.            (Alg. 2, 4–5)
5. It writes each ST client's BNa: μ_a,k = Σ α_j μ_a,j over j in S, and σ²_a,k alike.                 (Eq. 3)
   α = softmax over S of likeness / T, the mean over layers of [cos(μ_k, μ_j) + cos(σ²_k, σ²_j)] / 2. (Eq. 4)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.nn import functional as F

from hardy.attacks.base import Attack
from hardy.attacks.gradient import pgd
from hardy.core import random, tensors
from hardy.core.federation import Client
from hardy.core.layers import Call, CountedStatistics, Statistics
from hardy.core.method import Method
from hardy.core.net import Net
from hardy.core.partition import Placement, Role, Tag, branch_paths
from hardy.core.protocols import Batch, Givers, Objective, Optimiser, Setting, name_part
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.papers.fedbn import Local, local
from hardy.parts.adversarial import adversarial, by_kind
from hardy.parts.norms import dual
from hardy.parts.optimisers import sgd
from hardy.registry import part


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Propagated(Local):
    """The adversarial branch of `dual`: ST clients are given the statistics of the AT clients that resemble them.

    AT clients that were not heard yet give none. Of a branch's own affine nothing is propagated.
    """

    keeps: ClassVar[type[Statistics]] = CountedStatistics
    statistics: Placement = Placement.REPORTED
    temperature: float = 0.01
    """T; inf = all AT clients count alike, and clean statistics need not be reported"""
    givers: int | None = None
    """how many AT clients give at most, those that were heard last; absent: all. For tensors of clients on disk"""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise HardyError(f"propagated temperature (T) is {self.temperature}; it must be above 0.")
        if self.givers is not None and self.givers < 1:
            raise HardyError(f"propagated givers is {self.givers}; it must be 1 or more, or absent.")

    def check(self, method: Method, setting: Setting) -> None:
        super().check(method, setting)
        givers = {client.capacity for client in setting.sorts if client.kind != "ST"}
        for taker in sorted({client.capacity for client in setting.sorts if client.kind == "ST"}):
            if unfit := [giver for giver in sorted(givers) if not method.budget.shares_statistics(giver, taker)]:
                raise HardyError(
                    f"norm propagated hands statistics of AT clients of capacity {unfit[0]:g} to ST clients of "
                    f"capacity {taker:g}, but budget {name_part(method.budget)!r} gives these another network, whose "
                    "layers have other inputs or which the AT clients never trained. Usual fix: the same capacity for "
                    "all, budget queue (split_mix), or exits (depthfl) with AT clients of the largest capacity."
                )

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"clean"} if isfinite(self.temperature) else ())

    def gives(self, client: Client) -> bool:
        return client.kind != "ST"

    @property
    def most_givers(self) -> int | None:
        return self.givers

    def exchange(
        self, reported: Tensors, tags: Mapping[str, Tag], clients: Sequence[Client], givers: Givers | None = None
    ) -> Tensors:
        counters = _held(reported, tags, "adversarial", Role.COUNTER)
        statistics = _held(reported, tags, "adversarial", Role.NORM_MEAN, Role.NORM_VAR)
        if not counters:
            return reported
        takes, alpha = self.who_takes_what(reported, tags, clients, givers)
        source = givers.reported if givers else reported
        with tensors.full_precision():
            given = {
                n: torch.where(takes[..., None], torch.einsum("kjb,jbf->kbf", alpha.to(t), source[n]), t).contiguous()
                for n, t in statistics.items()
            }
        told = {n: torch.where(takes, t.clamp_min(1), t) for n, t in counters.items()}
        return {**reported, **given, **told}

    def who_takes_what(
        self, reported: Tensors, tags: Mapping[str, Tag], clients: Sequence[Client], givers: Givers | None = None
    ) -> tuple[Tensor, Tensor]:
        """Which clients take statistics, [C, B], and α, [C, J, B], of each that may give: all clients, or `givers`."""
        source = givers or Givers(reported, clients)
        counters = _held(source.reported, tags, "adversarial", Role.COUNTER)
        heard = torch.stack(list(counters.values())).amax(0) > 0  # [J, B]
        poor = _are_poor(clients, heard)
        gives = heard & ~(_are_poor(givers.clients, heard) if givers else poor)
        with tensors.full_precision():
            clean, *others = (
                list(_held(values.reported, tags, "clean", Role.NORM_MEAN, Role.NORM_VAR).values())
                for values in (Givers(reported, clients), *([givers] if givers else []))
            )
            return poor & gives.any(0), self.weights(clean, gives, *others).expand(len(clients), -1, -1)

    def weights(self, clean: Sequence[Tensor], gives: Tensor, givers: Sequence[Tensor] | None = None) -> Tensor:
        """α, [C, J, B]: what each client takes of each that gives, by the clean statistics of both. Where these are not
        reported all clients are alike, [1, J, B]."""
        likeness = torch.zeros(1, *gives.shape, device=gives.device)
        if clean:
            own, *others = ([F.normalize(s, dim=-1) for s in some] for some in (clean, givers) if some)
            pairs = zip(own, *(others or [own]), strict=True)
            likeness = torch.stack([torch.einsum("kbf,jbf->kjb", k, j) for k, j in pairs]).mean(0)
        return (likeness / self.temperature).masked_fill(~gives, -inf).softmax(1)


def _are_poor(clients: Sequence[Client], like: Tensor) -> Tensor:
    """Which clients are of kind ST, [C, 1]."""
    return tensors.send(torch.tensor([client.kind == "ST" for client in clients]), like.device)[:, None]


def _held(reported: Tensors, tags: Mapping[str, Tag], branch: str, *roles: Role) -> Tensors:
    """Reported tensors of a branch, in the order of the tags: that of a checkpoint is another."""
    wanted = [name for name, tag in tags.items() if tag.branch == branch and tag.role in roles]
    return tensors.select(reported, (name for name in wanted if name in reported))


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Pnc(Objective):
    """Pseudo-noise calibration: (1 − λ) CE(clean) + λ CE of the same images through the frozen adversarial branch.

    As long as that branch has been given nothing, the loss is CE(clean) alone.
    """

    weight: float = 0.5
    """λ, weight of the loss through the frozen adversarial branch"""
    rate: float = 1.0
    """what that loss is multiplied by besides: a learning rate of its own"""
    clip: float = inf
    """greatest length of the second term's gradient (Algorithm 3 takes 10)"""
    warm_up: int = 0
    """rounds before the calibration begins; until then the loss is CE(clean) alone"""

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise HardyError(f"pnc weight (λ) is {self.weight}; it must be in [0, 1].")
        if not self.clip > 0 or self.warm_up < 0 or not 0 <= self.rate < inf:
            raise HardyError(
                f"pnc takes a clip above 0, and a warm_up and a rate of 0 or more; it got {self.clip}, {self.warm_up} "
                f"and {self.rate}."
            )

    @property
    def branches(self) -> frozenset[str]:
        return frozenset({"clean", "adversarial"})

    def check(self, method: Method, setting: Setting) -> None:
        if method.norm.branches is None:
            raise HardyError(
                f"objective pnc calibrates on the statistics of an adversarial branch, but norm "
                f"{name_part(method.norm)!r} keeps none, so it has no effect. Usual fix: norm dual with propagated in "
                "its adversarial branch, or objective cross_entropy."
            )

    def for_client(self, kind: str, round_number: int) -> Objective:
        return replace(self, weight=0.0) if round_number < self.warm_up else self

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        paths = branch_paths(net.model, "adversarial")
        counters = [net.buffers.get(f"{path}.batches") for path in paths]
        counted = [counter for counter in counters if counter is not None]
        learning = Call("clean", "batch", key)
        calibrating = Call("adversarial", "running", random.fold(key, "calibration"))

        def losses(net: Net, *calls: Call) -> list[Tensor]:
            return [F.cross_entropy(o, batch.y) for o in net.together(*((batch.x, call) for call in calls))]

        if not self.weight or not paths:
            return losses(net, learning)[0]
        # a branch that counts its batches may have been given nothing yet; any other is taken as it is
        given = (torch.stack(counted).amax() > 0).to(batch.x.dtype) if counted else batch.x.new_ones(())
        weight = self.weight * given
        if self.clip == inf:
            clean, second = losses(net, learning, calibrating)
            return (1 - weight) * clean + self.rate * weight * second

        def calibration(trained: Tensors) -> Tensor:
            return self.rate * weight * losses(net.at(trained), calibrating)[0]

        (clean,) = losses(net, learning)
        return (1 - weight) * clean + clipped(calibration, self.clip)(net.trained)


def clipped(loss: Callable[[Tensors], Tensor], longest: float) -> Callable[[Tensors], Tensor]:
    """The same loss with a gradient of at most this length (Algorithm 3, line 12): a plane through its value."""

    def plane(trained: Tensors) -> Tensor:
        with torch.no_grad():
            gradient, value = grad_and_value(loss)(trained)
            length = torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt()
            scale = (longest / length).clamp_max(1.0)
        rises = [((w - w.detach()) * gradient[name]).sum() for name, w in trained.items()]
        return torch.add(value, torch.stack(rises).sum() * scale)

    return plane


pnc, propagated = Pnc, Propagated


@part("method")
def fedrbn(
    *,
    weight: float = 0.5,
    temperature: float = 0.01,
    attack: Attack = pgd(),
    mix: float = 0.5,
    rate: float = 1.0,
    clip: float = inf,
    warm_up: int = 0,
    affine: Placement = Placement.PRIVATE,
    dual_affine: bool = False,
    noise: float = 0.0,
    bound: float = inf,
    givers: int | None = None,
    optimiser: Optimiser = sgd(),
) -> Method:
    """Local dual BatchNorm whose adversarial statistics spread to clients that cannot afford adversarial training."""
    return Method(
        name="fedrbn",
        norm=dual(
            clean=local(affine=affine, statistics=Placement.REPORTED, noise=noise, bound=bound),
            adversarial=propagated(affine=affine, temperature=temperature, noise=noise, bound=bound, givers=givers),
            dual_affine=dual_affine,
        ),
        objective=by_kind(
            AT=adversarial(attack=attack, mix=mix, branch="adversarial"),
            ST=pnc(weight=weight, rate=rate, clip=clip, warm_up=warm_up),
        ),
        optimiser=optimiser,
    )


__all__ = ["fedrbn", "pnc", "propagated"]
