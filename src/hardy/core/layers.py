"""Layers whose behaviour is an argument of the call, never a flag left on a module.

`calling(branch=..., statistics=..., key=...)` sets the arguments for the forward passes inside it. Statistics are
replaced by assignment, so a forward never writes into a tensor it was given: under `torch.func.functional_call` the
new ones are read back from the state that was passed in.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hardy.core import random
from hardy.errors import HardyError

UseStatistics = Literal["batch", "running", "images"]
"""normalise by the batch and move the running ones; by the running ones; by the batch and leave the running ones"""


@dataclass
class Call:
    """How the forward passes now running are to behave. The default is plain inference."""

    branch: str = "clean"
    statistics: UseStatistics = "running"
    key: Tensor | None = None
    robustness: float | Tensor | None = None
    draws: int = 0
    parts: "tuple[Call, ...]" = ()
    """how each of as many equal parts of the batch is to be treated where images are not treated one by one"""


_current: ContextVar[Call] = ContextVar("hardy_call")


def current() -> Call:
    return _current.get(None) or Call()


def calling(
    *, branch: str, statistics: UseStatistics, key: Tensor | None, robustness: float | Tensor | None = None
) -> AbstractContextManager[None]:
    """Sets branch, statistics, the key of dropout (None: no dropout) and robustness λ (None: the branch alone; else a
    mix of branches at every layer)."""
    return passing(Call(branch, statistics, key, robustness))


@contextmanager
def passing(*calls: Call) -> Iterator[None]:
    """Forward passes inside behave like this; with several calls the images of each are an equal part of the batch."""
    forced = _forced.get()
    parts = tuple(replace(call, statistics=forced or call.statistics) for call in calls)
    token = _current.set(parts[0] if len(parts) == 1 else Call(parts=parts))
    try:
        yield
    finally:
        _current.reset(token)


def in_parts(layer: Callable[[Tensor, Call], Tensor], x: Tensor) -> Tensor:
    """A layer under the arguments of the call, or of each part of it."""
    call = current()
    if not call.parts:
        return layer(x, call)
    return torch.cat([layer(images, part) for images, part in zip(x.chunk(len(call.parts)), call.parts, strict=True)])


_forced: ContextVar[UseStatistics | None] = ContextVar("hardy_forced", default=None)


@contextmanager
def forcing(statistics: UseStatistics | None) -> Iterator[None]:
    """All calls inside use these statistics, whatever they ask for."""
    token = _forced.set(statistics)
    try:
        yield
    finally:
        _forced.reset(token)


class AffineParameters(nn.Module):
    """Scale and shift of every channel, where there is one."""

    weight: Tensor
    bias: Tensor

    def __init__(self, features: int, *, affine: bool) -> None:
        super().__init__()
        if affine:
            self.weight = nn.Parameter(torch.ones(features))
            self.bias = nn.Parameter(torch.zeros(features))


class Statistics(AffineParameters):
    """Running mean and variance of one branch of a norm, and its affine if it has one of its own. `noise` is the
    deviation of Gaussian noise on every update of them, drawn from the key of the call; `bound` is the greatest length
    of what a batch says, mean and variance − 1 of all channels together."""

    roles: ClassVar[Mapping[str, str]] = {}
    """of trained tensors that a kind of statistics adds, by name; those of the affine need none"""
    by_batch: ClassVar[bool] = True
    """whether images that move the statistics are normalised by their own"""
    mean: Tensor
    var: Tensor
    bound: float = inf

    def __init__(self, features: int, *, affine: bool = False, momentum: float = 0.1, noise: float = 0.0) -> None:
        super().__init__(features, affine=affine)
        self.momentum, self.noise = momentum, noise
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("var", torch.ones(features))

    def normalise(self, x: Tensor, affine: AffineParameters, eps: float) -> Tensor:
        """Normalises by the batch, and moves the running statistics towards it."""
        if x.is_cuda and x.dtype != self.mean.dtype:
            return self._normalise_mixed(x, affine, eps)
        mean, var = self.mean.clone(), self.var.clone()
        taken = x.to(mean.dtype)  # a CPU has no kernel for images of another precision
        if x.shape[1] > 1:
            out = F.batch_norm(taken, mean, var, affine.weight, affine.bias, True, self.momentum, eps)
        else:  # what vmap makes of a single channel does not lie in memory as cuDNN wants it
            out, _, _ = torch.native_batch_norm(taken, affine.weight, affine.bias, mean, var, True, self.momentum, eps)
        self.mean, self.var = mean, var
        return out.to(x.dtype)

    def _normalise_mixed(self, x: Tensor, affine: AffineParameters, eps: float) -> Tensor:
        """The same where x is of half precision: vmap has no rule for running statistics of another type than x."""
        out, mean, rsqrt = torch.native_batch_norm(x, None, None, None, None, True, 0.0, eps)
        count = x.numel() / x.shape[1]
        var = (rsqrt.square().reciprocal() - eps).clamp_min(0.0) * (count / max(1.0, count - 1))
        self._move(mean.detach(), var.detach())
        return _along(out, affine.weight, affine.bias)

    def begin(self) -> None:
        """Told before each pass through the layer: clean and attacked images of one step may come in one pass."""

    def given(self, call: "Call") -> tuple[Tensor, Tensor]:
        """The mean and variance that images are normalised by where it is not by the batch's own."""
        return self.mean, self.var

    def follow(self, mean: Tensor, var: Tensor, values: float) -> None:
        """Moves the running statistics towards those of a batch of so many values a channel that somebody else has
        normalised; its variance is without Bessel's correction."""
        self._move(mean, var * (values / max(1.0, values - 1)))

    def _move(self, mean: Tensor, var: Tensor) -> None:
        self.mean = torch.lerp(self.mean, mean, self.momentum)
        self.var = torch.lerp(self.var, var, self.momentum)

    def blur(self, call: Call, mean: Tensor, var: Tensor) -> None:
        """Bounds the update from the mean and variance before it, and adds the noise."""
        if self.bound < inf:
            left, usual = 1 - self.momentum, torch.ones_like(var)
            kept = left * mean, left * var + self.momentum * usual
            moves = torch.stack([self.mean - kept[0], self.var - kept[1]])
            length = torch.linalg.vector_norm(moves.flatten(), dim=0).clamp_min(1e-30)
            moves = moves * (self.momentum * self.bound / length).clamp_max(1.0)
            self.mean, self.var = kept[0] + moves[0], (kept[1] + moves[1]).clamp_min(0.0)
        if self.noise:
            self.mean, self.var = self._blurred(self.mean, call), self._blurred(self.var, call).clamp_min(0.0)

    def _blurred(self, statistic: Tensor, call: Call) -> Tensor:
        if call.key is None:
            return statistic
        call.draws += 1
        drawn = random.normal(random.fold(call.key, call.draws), statistic.shape, statistic.dtype)
        return statistic + self.noise * drawn


class CountedStatistics(Statistics):
    """Statistics that count the batches they were taken of: 0 says that nobody has trained them yet."""

    batches: Tensor

    def __init__(self, features: int, *, affine: bool = False, momentum: float = 0.1, noise: float = 0.0) -> None:
        super().__init__(features, affine=affine, momentum=momentum, noise=noise)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def normalise(self, x: Tensor, affine: AffineParameters, eps: float) -> Tensor:
        self.batches = self.batches + 1
        return super().normalise(x, affine, eps)

    def follow(self, mean: Tensor, var: Tensor, values: float) -> None:
        self.batches = self.batches + 1
        super().follow(mean, var, values)


class FederatedStatistics(Statistics):
    """Statistics of Federated BatchNorm: a batch is normalised by what the server sent, and the running statistics move
    to what they would be if all batches seen since had been one."""

    by_batch = False
    count: Tensor
    """values a channel has seen since the server last spoke"""
    sent_mean: Tensor
    sent_var: Tensor

    def __init__(self, features: int, *, affine: bool = False, momentum: float = 0.1, noise: float = 0.0) -> None:
        super().__init__(features, affine=affine, momentum=momentum, noise=noise)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("sent_mean", torch.zeros(features), persistent=False)
        self.register_buffer("sent_var", torch.ones(features), persistent=False)

    def normalise(self, x: Tensor, affine: AffineParameters, eps: float) -> Tensor:
        mean, var = channel_moments(x.detach(), self.mean.dtype)
        self.follow(mean, var, x.numel() / x.shape[1])
        return scale_and_shift(x, self.sent_mean, self.sent_var, affine, eps)

    def given(self, call: "Call") -> tuple[Tensor, Tensor]:
        return (self.sent_mean, self.sent_var) if call.statistics == "batch" else super().given(call)

    def follow(self, mean: Tensor, var: Tensor, values: float) -> None:
        momentum = self.momentum
        mean, var = torch.lerp(self.sent_mean, mean, momentum), torch.lerp(self.sent_var, var, momentum)
        count = self.count + values
        share = (count - self.count) / count
        between = share * (1 - share) / momentum * (mean - self.mean).square()  # law of total variance over the steps
        self.mean, self.var = torch.lerp(self.mean, mean, share), torch.lerp(self.var, var, share) + between
        self.count = count


def channel_moments(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel. Values of half precision are read as they are: their mean cannot be so far
    from zero that its square would swallow the variance."""
    over = [axis for axis in range(x.dim()) if axis != 1]
    if x.dtype == dtype:
        var, mean = torch.var_mean(x, over, correction=0)
        return mean, var
    mean = x.mean(over, dtype=dtype)
    square = torch.linalg.vector_norm(x, dim=over, dtype=dtype).square() * (x.shape[1] / x.numel())
    return mean, (square - mean.square()).clamp_min(0.0)


def scale_and_shift(x: Tensor, mean: Tensor, var: Tensor, affine: AffineParameters, eps: float) -> Tensor:
    """A norm with given statistics as one product and sum: attacks do little else, and vmap needs no copies for it."""
    return _along(x, *_line(mean, var, affine, eps))


def _line(mean: Tensor, var: Tensor, affine: AffineParameters, eps: float) -> tuple[Tensor, Tensor]:
    scale = affine.weight * torch.rsqrt(var + eps)
    return scale, affine.bias - mean * scale


def _along(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x · scale + shift, one number per channel, [C], or for each image, [N, C]."""
    shape = *scale.shape, *[1] * (x.dim() - 2)
    return torch.addcmul(shift.to(x.dtype).view(shape), x, scale.to(x.dtype).view(shape))


class BatchNorm(AffineParameters):
    """Batch normalisation over every axis but the second, with statistics per branch and one affine for all, or one
    for each branch. `gain` multiplies what comes in where the batch's own statistics are used (layer rescaling)."""

    def __init__(
        self,
        features: int,
        *,
        branches: Mapping[str, Callable[..., Statistics]] | None = None,
        eps: float = 1e-5,
        dual_affine: bool = False,
    ) -> None:
        super().__init__(features, affine=not dual_affine)
        self.eps, self.dual_affine, self.gain = eps, dual_affine, 1.0
        for branch, make in (branches or {"clean": Statistics}).items():
            self.add_module(branch, make(features, affine=dual_affine))

    def forward(self, x: Tensor) -> Tensor:
        for kept in self.children():
            if isinstance(kept, Statistics):
                kept.begin()
        return in_parts(self._normalised, x)

    def _normalised(self, x: Tensor, call: Call) -> Tensor:
        if call.statistics == "running":
            return _along(x, *self.line(call))
        kept, affine = self.branch(call.branch)
        x = x if self.gain == 1.0 else x * self.gain
        if call.statistics == "images":
            if x.numel() == x.shape[1]:
                raise HardyError("a norm served by the batch was given 1 image, which has no statistics; it needs 2.")
            return scale_and_shift(x, *channel_moments(x, kept.mean.dtype), affine, self.eps)
        before = kept.mean, kept.var
        out = kept.normalise(x, affine, self.eps)
        kept.blur(call, *before)
        return out

    def branch(self, name: str) -> tuple[Statistics, AffineParameters]:
        kept = self.get_submodule(name)
        assert isinstance(kept, Statistics)
        return kept, kept if self.dual_affine else self

    def line(self, call: Call) -> tuple[Tensor, Tensor]:
        """Scale and shift of every channel by running statistics, [C], or for each image, [N, C]. With robustness λ,
        (1 − λ) of the clean branch's output and λ of the adversarial one's: two lines mix to a line."""
        if call.robustness is None:
            return self._line_of(call.branch)
        robustness = call.robustness
        if isinstance(robustness, Tensor) and robustness.dim():
            robustness = robustness[:, None]
        lines = self._line_of("clean"), self._line_of("adversarial")
        scale, shift = ((1 - robustness) * clean + robustness * robust for clean, robust in zip(*lines, strict=True))
        return scale, shift

    def _line_of(self, name: str) -> tuple[Tensor, Tensor]:
        kept, affine = self.branch(name)
        return _line(kept.mean, kept.var, affine, self.eps)


class Dropout(nn.Module):
    """Dropout whose mask comes from the key of the call, so all engines drop the same units. No key: identity."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return in_parts(self._thinned, x)

    def _thinned(self, x: Tensor, call: Call) -> Tensor:
        if call.key is None or self.p == 0.0:
            return x
        call.draws += 1
        dropped = random.chance(random.fold(call.key, call.draws), x.shape, self.p)
        return torch.where(dropped, 0.0, x / (1.0 - self.p))


class InputScale(nn.Module):
    """(x - mean) / std inside the model, so that attacks always see pixels in [0, 1]. A channel has two more `axes`, a
    feature none. Its buffers are constants of the model: nobody trains, sends or stores them."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...] = (0.5,), std: tuple[float, ...] = (0.5,), *, axes: int = 2) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, *[1] * axes))
        self.register_buffer("std", torch.tensor(std).view(-1, *[1] * axes))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std
