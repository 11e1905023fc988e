"""OAT: a network conditioned on how robust it should be, trained once for all.

Wang et al., Once-for-All Adversarial Training: In-Situ Tradeoff between Robustness and Accuracy for Free, NeurIPS 2020.
Hong et al., Split-Mix, ICLR 2022, §5.2 (FedAvg+OAT).

λ weight of the attacked image in an image's loss · S the levels of λ in training · e(λ) its code, a random orthogonal
row · x̃ the attacked x · BNc, BNa the norms' branches
1. ⌈B/|S|⌉ images of a batch get λ = 0; every other one draws its λ from the rest of S.
2. Behind every norm a small network turns e(λ) into a scale and a shift of the channels (FiLM).
3. Images with λ = 0 pass through BNc and step on CE(x; 0); the others, attacked under their own λ, pass through BNa and
   step on (1 − λ) CE(x; λ) + λ CE(x̃; λ).
4. At inference λ is chosen: BNc at 0, BNa above; between two levels the codes are interpolated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hardy.attacks.base import Attack
from hardy.attacks.gradient import pgd
from hardy.core import random
from hardy.core.layers import BatchNorm, Call, Statistics, current
from hardy.core.method import Method
from hardy.core.net import Net
from hardy.core.protocols import Batch, Objective, Optimiser, Setting
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.parts.norms import Dual
from hardy.parts.optimisers import sgd
from hardy.registry import part

_LEVELS = (0.0, 0.1, 0.2, 0.3, 0.4, 1.0)


class Conditioned(BatchNorm):
    """A dual BatchNorm, then a scale and a shift that depend on the robustness of the call: one number, or one an
    image. Without one it is 0 in the clean branch and 1 in the other."""

    rows: Tensor

    def __init__(
        self, features: int, *, levels: tuple[float, ...], code: int, branches: Mapping[str, Callable[..., Statistics]]
    ) -> None:
        super().__init__(features, dual_affine=True, branches=branches)
        self.levels = levels
        drawn = torch.randn(code, code, generator=torch.Generator().manual_seed(0))
        self.register_buffer("rows", torch.linalg.qr(drawn)[0][: len(levels)].contiguous(), persistent=False)
        self.inner, self.outer = nn.Linear(code, features), nn.Linear(features, 2 * features)
        nn.init.zeros_(self.outer.weight)  # at first every λ is served alike
        nn.init.zeros_(self.outer.bias)

    def forward(self, x: Tensor) -> Tensor:
        call = current()
        level = call.robustness if call.robustness is not None else float(call.branch != "clean")
        level = level.to(x) if isinstance(level, Tensor) else x.new_full((), level)
        made: Tensor = self.outer(F.leaky_relu(self.inner(self._encode(level))))
        scale, shift = made.chunk(2, -1)
        shape = *scale.shape, *[1] * (x.dim() - 2)
        normal: Tensor = super().forward(x)
        return normal * (1 + scale.reshape(shape)) + shift.reshape(shape)

    def _encode(self, level: Tensor) -> Tensor:
        """e(λ), [..., code]."""
        pairs = zip(self.levels, self.levels[1:], strict=False)
        at = torch.stack([((level - low) / (high - low)).clamp(0, 1) for low, high in pairs]).sum(0)
        hats = torch.stack([(1 - (at - number).abs()).clamp_min(0) for number in range(len(self.levels))], -1)
        return hats @ self.rows

    def line(self, call: Call) -> tuple[Tensor, Tensor]:
        level = call.robustness
        if isinstance(level, Tensor) and level.dim():  # one an image: the caller says which branch
            level = None
        return super().line(replace(call, robustness=None if level is None else (level > 0) * 1.0))


@part("norm")
@dataclass(frozen=True, kw_only=True)
class Conditional(Dual):
    """Dual BatchNorm whose output depends on the robustness asked for."""

    dual_affine: bool = True
    levels: tuple[float, ...] = _LEVELS
    """S, ascending from 0 to 1"""
    code: int = 128
    """length of e(λ)"""
    serves: Literal["clean", "adversarial"] = "clean"

    def check(self, method: Method, setting: Setting) -> None:
        if not any(isinstance(part, OnceForAll) for part in method.parts()):
            raise HardyError(
                f"norm conditional depends on the robustness asked for, but objective "
                f"{type(method.objective).__name__!r} asks for none. Usual fix: objective once_for_all, or norm dual."
            )

    def __post_init__(self) -> None:
        super().__post_init__()
        if sorted(set(self.levels)) != list(self.levels) or (self.levels[0], self.levels[-1]) != (0, 1):
            raise HardyError(f"levels of conditional are {list(self.levels)}; they must ascend from 0 to 1.")
        if self.code < len(self.levels):
            raise HardyError(
                f"code of conditional is {self.code}; it must be {len(self.levels)} or more, as the levels."
            )

    def layer(self, features: int) -> nn.Module:
        return Conditioned(features, levels=self.levels, code=self.code, branches=self.statistics_by_branch)


@part("objective")
@dataclass(frozen=True, kw_only=True)
class OnceForAll(Objective):
    """Each image with a robustness of its own: (1 − λ) CE(clean; λ) + λ CE(attacked; λ). Take it with norm
    conditional."""

    attack: Attack = pgd()

    def check(self, method: Method, setting: Setting) -> None:
        if not isinstance(method.norm, Conditional):
            raise HardyError(
                f"objective once_for_all asks for a robustness, but norm {type(method.norm).__name__!r} does not "
                "depend on it. Usual fix: norm conditional."
            )

    @property
    def branches(self) -> frozenset[str]:
        return frozenset({"clean", "adversarial"})

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        size, levels = len(batch.x), _levels(net.model)
        plain = max(2, ceil(size / len(levels)))
        plain = plain if size - plain > 1 else size  # an image alone has no batch statistics
        head = F.cross_entropy(
            net(batch.x[:plain], statistics="batch", key=random.fold(key, "plain"), robustness=0.0), batch.y[:plain]
        )
        if plain == size:
            return head
        x, y = batch.x[plain:], batch.y[plain:]
        drawn = (random.uniform(random.fold(key, "levels"), (len(x),), x.dtype) * (len(levels) - 1)).floor()
        level = torch.stack([own * (drawn == at) for at, own in enumerate(levels[1:])]).sum(0).to(x)
        asked = partial(net, branch="adversarial", robustness=level)
        attacked = self.attack.perturb(asked, x, y, random.fold(key, "attack"))
        clean, robust = (
            F.cross_entropy(asked(z, statistics="batch", key=random.fold(key, word)), y, reduction="none")
            for word, z in (("clean", x), ("attacked", attacked))
        )
        tail = ((1 - level) * clean + level * robust).mean()
        return (plain * head + len(x) * tail) / size


@lru_cache(maxsize=32)
def _levels(model: nn.Module) -> tuple[float, ...]:
    """S, as the norms have it."""
    return next(module.levels for module in model.modules() if isinstance(module, Conditioned))


conditional, once_for_all = Conditional, OnceForAll


@part("method")
def oat(
    *,
    attack: Attack = pgd(),
    levels: tuple[float, ...] = _LEVELS,
    code: int = 128,
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg of clients that train once for all levels of robustness; levels are S."""
    norm = conditional(levels=levels, code=code)
    return Method(name="oat", norm=norm, objective=once_for_all(attack=attack), optimiser=optimiser)


__all__ = ["conditional", "oat", "once_for_all"]
