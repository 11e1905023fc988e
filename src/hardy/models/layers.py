"""Layers whose behaviour is an argument of the call, never a flag left on a module.

`calling(branch=..., statistics=..., key=...)` sets the arguments for the forward passes inside it. Statistics are
replaced by assignment, so a forward never writes into a tensor it was given: under `torch.func.functional_call` the
new ones are read back from the state that was passed in.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hardy import random

UseStatistics = Literal["batch", "running"]


@dataclass
class Call:
    """How the forward passes now running are to behave. The default is plain inference."""

    branch: str = "clean"
    statistics: UseStatistics = "running"
    key: Tensor | None = None
    draws: int = 0


_current: ContextVar[Call] = ContextVar("hardy_call")


def current() -> Call:
    return _current.get(None) or Call()


@contextmanager
def calling(*, branch: str, statistics: UseStatistics, key: Tensor | None) -> Iterator[None]:
    """Sets branch, statistics (batch: normalise by the batch and move the running ones; running: leave them) and
    the key of dropout (None: no dropout)."""
    token = _current.set(Call(branch, statistics, key))
    try:
        yield
    finally:
        _current.reset(token)


class Statistics(nn.Module):
    """Running mean and variance of one branch of a norm."""

    mean: Tensor
    var: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("var", torch.ones(features))


class BatchNorm(nn.Module):
    """Batch normalisation over every axis but the second, with statistics per branch and one affine for all."""

    def __init__(
        self, features: int, *, branches: tuple[str, ...] = ("clean",), momentum: float = 0.1, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        for branch in branches:
            self.add_module(branch, Statistics(features))

    def forward(self, x: Tensor) -> Tensor:
        call = current()
        kept = self.get_submodule(call.branch)
        assert isinstance(kept, Statistics)
        if call.statistics == "running":
            return self.scale_and_shift(x, kept)
        mean, var = kept.mean.clone(), kept.var.clone()
        out = F.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum, self.eps)
        kept.mean, kept.var = mean, var
        return out

    def scale_and_shift(self, x: Tensor, kept: Statistics) -> Tensor:
        """The norm as one product and sum: attacks do little else, and it needs no copies under vmap."""
        scale = self.weight * torch.rsqrt(kept.var + self.eps)
        shift = self.bias - kept.mean * scale
        shape = -1, *[1] * (x.dim() - 2)
        return torch.addcmul(shift.view(shape), x, scale.view(shape))


class Dropout(nn.Module):
    """Dropout whose mask comes from the key of the call, so all engines drop the same units. No key: identity."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        call = current()
        if call.key is None or self.p == 0.0:
            return x
        call.draws += 1
        kept = random.uniform(random.fold(call.key, call.draws), x.shape, x.dtype) >= self.p
        return x * kept / (1.0 - self.p)


class InputScale(nn.Module):
    """(x - mean) / std inside the model, so that attacks always see pixels in [0, 1]. Its buffers are constants of
    the model: nobody trains, sends or stores them."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...] = (0.5,), std: tuple[float, ...] = (0.5,)) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std
