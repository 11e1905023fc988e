"""Layers that run well for many slots at once, where vmap alone would copy or fall back to slow kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

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
    """A convolution of stride 1 whose gradients vectorise.

    vmap makes grouped convolutions of many clients' layers. cuDNN's own kernels for their input gradient are slow,
    while adversarial training asks for little else: it is a convolution again, with the kernel turned round. For images
    of few channels all its kernels are slow, and both gradients are plain products with their windows, which are small.
    A kernel of one pixel is a product throughout.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, padding: int) -> Tensor:
        if weight.shape[-1] == 1:
            return _unfolded(weight.flatten(1) @ x.flatten(2), x.shape)
        if odd := -x.shape[1] % 4:  # channels of nothing: with three, the matrix units would stand idle
            x, weight = F.pad(x, (0, 0, 0, 0, 0, odd)), F.pad(weight, (0, 0, 0, 0, 0, odd))
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
            to_x = _to_x(x.shape, weight, gradient, ctx.padding)
        if ctx.needs_input_grad[1]:
            to_weight = _to_weight(x, weight.shape, gradient, ctx.padding)
        return to_x, to_weight, None


_FEW = 4
"""channels"""


def _to_x(shape: torch.Size, weight: Tensor, gradient: Tensor, padding: int) -> Tensor:
    size = weight.shape[-1]
    if size == 1:
        return _unfolded(weight.flatten(1).T @ gradient.flatten(2), shape)
    if shape[1] <= _FEW:
        windows = torch.bmm(weight.flatten(1).T.expand(len(gradient), -1, -1), gradient.flatten(2))
        return F.fold(windows, shape[2:], size, padding=padding)
    if _one_for_all(weight):
        plain: Tensor = conv2d_input(shape, weight, gradient, 1, padding)  # type: ignore[no-untyped-call]
        return plain
    return _convolve(gradient, weight.flip(2, 3).transpose(0, 1), size - 1 - padding)


def _unfolded(pixels: Tensor, shape: torch.Size) -> Tensor:
    return pixels.view(*pixels.shape[:2], *shape[2:])


def _one_for_all(weight: Tensor) -> bool:
    """Whether all slots that vmap runs over share these weights, as in their first step of a round."""
    inside = torch._C._functorch
    while inside.is_functorch_wrapped_tensor(weight):
        if inside.is_batchedtensor(weight):
            return False
        weight = inside.get_unwrapped(weight)
    return True


def _to_weight(x: Tensor, shape: torch.Size, gradient: Tensor, padding: int) -> Tensor:
    size = shape[-1]
    if size == 1:
        return (gradient.flatten(2) @ x.flatten(2).transpose(1, 2)).sum(0).view(shape)
    if shape[1] > _FEW:
        wide: Tensor = conv2d_weight(x, shape, gradient, 1, padding)  # type: ignore[no-untyped-call]
        return wide
    windows = F.pad(x, (padding,) * 4).unfold(2, size, 1).unfold(3, size, 1).permute(0, 2, 3, 1, 4, 5)
    images = gradient.flatten(2) @ windows.reshape(len(x), -1, shape[1:].numel())  # one a product: they run abreast
    return images.sum(0).view(shape)


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
        weight = self.weight
        if torch.is_autocast_enabled("cuda"):
            x, weight = (t.to(torch.get_autocast_dtype("cuda")) for t in (x, weight))
        out = _convolve(x, weight, padding)
        return out if self.bias is None else out + self.bias.view(-1, 1, 1).to(out.dtype)


class Pooling(NamedTuple):
    """The arguments of a max pooling."""

    size: int | tuple[int, int]
    stride: int | tuple[int, int]
    padding: int | tuple[int, int]
    ceil: bool

    @property
    def turns(self) -> int | None:
        """Every how many windows no two meet, in a row or a column; None where the two differ."""
        if not (isinstance(self.size, int) and isinstance(self.stride, int)):
            return None
        return -(-self.size // self.stride)


class _Pool(torch.autograd.Function):
    """Max pooling that takes the images of many slots as they lie in memory, where vmap would copy them."""

    @staticmethod
    def forward(x: Tensor, how: Pooling) -> tuple[Tensor, Tensor]:
        pool = torch.ops.aten.max_pool2d_with_indices
        return cast(tuple[Tensor, Tensor], pool(x, how.size, how.stride, how.padding, 1, how.ceil))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Pooling], output: tuple[Tensor, Tensor]) -> None:
        ctx.how = inputs[1]
        ctx.save_for_backward(inputs[0], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return _Unpool.apply(gradient, *ctx.saved_tensors, ctx.how), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, how: Pooling) -> tuple[tuple[Tensor, ...], Any]:
        x = x.movedim(in_dims[0], 0)
        into = _lying(x)
        outs = _Pool.apply(_merge(x, into), how)  # type: ignore[no-untyped-call]
        return tuple(_part(out, into, info.batch_size) for out in outs), (0, 0)


class _Unpool(torch.autograd.Function):
    """The gradient of `_Pool`."""

    @staticmethod
    def forward(gradient: Tensor, x: Tensor, index: Tensor, how: Pooling) -> Tensor:
        if how.turns is None:
            unpool = torch.ops.aten.max_pool2d_with_indices_backward
            return cast(Tensor, unpool(gradient, x, how.size, how.stride, how.padding, 1, how.ceil, index))
        flat = x.new_zeros(*x.shape[:2], x.shape[2] * x.shape[3])  # gradients put back by index: much quicker
        put = flat.scatter_ if how.turns == 1 else flat.scatter_add_
        for row, column in product(range(how.turns), repeat=2):
            index_, gradient_ = (t[:, :, row :: how.turns, column :: how.turns].flatten(2) for t in (index, gradient))
            put(2, index_, gradient_)
        return flat.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Pooling], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return gradient.flatten(2).gather(2, index.flatten(2)).view_as(index), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, gradient: Tensor, x: Tensor, index: Tensor, how: Pooling) -> tuple[Tensor, int]:
        gradient, x, index = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((gradient, x, index), in_dims, strict=False)
        )
        into = _lying(x)
        merged = (_merge(t, into) for t in (gradient, x, index))
        return _part(_Unpool.apply(*merged, how), into, info.batch_size), 0  # type: ignore[no-untyped-call]


def _lying(x: Tensor) -> int:
    """Where the slots of [S, N, C, H, W] lie in memory: before the examples (0) or before the channels (1)."""
    return int(x.movedim(0, 1).is_contiguous())


def _merge(x: Tensor, into: int) -> Tensor:
    return x.movedim(0, into).flatten(into, into + 1)


def _part(x: Tensor, into: int, slots: int) -> Tensor:
    return x.view(*x.shape[:into], slots, -1, *x.shape[into + 1 :]).movedim(into, 0)


class MaxPool2d(nn.MaxPool2d):
    """nn.MaxPool2d that vectorises well. A ReLU belongs after it rather than before: output and gradients are the same,
    and less is left to rectify."""

    def forward(self, x: Tensor) -> Tensor:
        how = Pooling(self.kernel_size, self.stride, self.padding, self.ceil_mode)
        if not _vectorising.get() or self.dilation != 1:
            return cast(Tensor, super().forward(x))
        out, _ = cast(tuple[Tensor, Tensor], _Pool.apply(x, how))  # type: ignore[no-untyped-call]
        return out
