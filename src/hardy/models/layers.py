"""Layers whose behaviour is an argument of the call, never a flag left on a module.

`calling(branch=..., statistics=..., key=...)` sets the arguments for the forward passes inside it. Statistics are
replaced by assignment, so a forward never writes into a tensor it was given: under `torch.func.functional_call` the
new ones are read back from the state that was passed in.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

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
            return F.batch_norm(x, kept.mean, kept.var, self.weight, self.bias, False, 0.0, self.eps)
        mean, var = kept.mean.clone(), kept.var.clone()
        out = F.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum, self.eps)
        kept.mean, kept.var = mean, var
        return out


_vectorising: ContextVar[bool] = ContextVar("hardy_vectorising", default=False)


@contextmanager
def vectorising() -> Iterator[None]:
    """Tells the layers inside that they run for many slots at once."""
    token = _vectorising.set(True)
    try:
        yield
    finally:
        _vectorising.reset(token)


class _Convolve(torch.autograd.Function):
    """A convolution of stride 1 whose input gradient is again a convolution, with the kernel turned round.

    vmap makes grouped convolutions of many clients' layers, and cuDNN's own kernels for their input gradient are slow,
    while adversarial training asks for little else.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, padding: int) -> Tensor:
        return F.conv2d(x, weight, None, 1, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        x, weight, ctx.padding = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = _convolve(gradient, weight.flip(2, 3).transpose(0, 1), weight.shape[-1] - 1 - ctx.padding)
        if ctx.needs_input_grad[1]:
            to_weight = conv2d_weight(x, weight.shape, gradient, 1, ctx.padding)  # type: ignore[no-untyped-call]
        return to_x, to_weight, None


def _convolve(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    out: Tensor = _Convolve.apply(x, weight, padding)  # type: ignore[no-untyped-call]
    return out


class Conv2d(nn.Conv2d):
    """nn.Conv2d that vectorises well on a GPU, where its stride is 1."""

    def forward(self, x: Tensor) -> Tensor:
        size, padding = self.kernel_size[0], self.padding[0]
        plain = self.stride == (1, 1) and self.dilation == (1, 1) and self.groups == 1
        square = self.kernel_size == (size, size) and self.padding == (padding, padding)
        if not (_vectorising.get() and x.is_cuda and plain and square and isinstance(padding, int) and padding < size):
            return super().forward(x)
        out = _convolve(x, self.weight, padding)
        return out if self.bias is None else out + self.bias.view(-1, 1, 1)


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
