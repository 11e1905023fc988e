"""The kernels as functions that torch differentiates and vectorises.

All take tensors with a leading slot axis, [S, ...]. `torch.vmap` over one of them folds the axis that it maps into the
slots, so that however many slots there are, one launch does them all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hardy.errors import HardyError
from hardy.kernels import convolution, pooling
from hardy.kernels.convolution import Epilogue, Geometry
from hardy.kernels.pooling import Window


def _fold(info: Any, in_dims: tuple[Any, ...], tensors: tuple[Any, ...]) -> list[Any]:
    """[S, ...] and an axis of B that vmap maps over -> [B * S, ...]; what is mapped over no axis is the same for all."""
    folded = []
    for tensor, dim in zip(tensors, in_dims, strict=False):
        if not isinstance(tensor, Tensor):
            folded.append(tensor)
            continue
        whole = tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        folded.append(whole.flatten(0, 1))
    return folded


def _unfold(info: Any, out: Tensor) -> Tensor:
    return out.unflatten(0, (info.batch_size, -1))


def _vectorised(function: Any) -> Callable[..., Any]:
    """The rule of vmap for a function of tensors with a slot axis."""

    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        out = function.apply(*_fold(info, in_dims, arguments))
        if isinstance(out, Tensor):
            return _unfold(info, out), 0
        return tuple(_unfold(info, one) for one in out), (0,) * len(out)

    return vmap


def _once(ctx: Any, *_: Any) -> Any:
    raise HardyError(
        "a second derivative was asked for, which fused layers do not have. Set engine.kernels = false for this method."
    )


class _Convolution(torch.autograd.Function):
    """x [S, N, CI, H, W], weight [S, CO, CI, kh, kw] -> [S, N, CO, H', W']."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, how: Geometry, precision: str) -> Tensor:
        return convolution.convolve(x, weight, how, precision=precision)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.how, ctx.precision = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *_gradients(ctx, x, weight, gradient), None, None


class _ToInput(torch.autograd.Function):
    """gradient [S, N, CO, H', W'], weight -> the gradient to the input, [S, N, CI, H, W]."""

    @staticmethod
    def forward(gradient: Tensor, weight: Tensor, how: Geometry, sides: tuple[int, int], precision: str) -> Tensor:
        return convolution.to_input(gradient, weight, how, sides, precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        gradient, weight, ctx.how, _, ctx.precision = inputs
        ctx.save_for_backward(gradient, weight)

    @staticmethod
    def backward(ctx: Any, again: Tensor) -> tuple[Tensor | None, ...]:
        gradient, weight = ctx.saved_tensors
        to_gradient = to_weight = None
        if ctx.needs_input_grad[0]:
            to_gradient = convolve(again, weight, ctx.how, ctx.precision)
        if ctx.needs_input_grad[1]:
            to_weight = _weight_gradient(again, gradient, weight, ctx)
        return to_gradient, to_weight, None, None, None


class _ToWeight(torch.autograd.Function):
    """x, gradient -> the gradient to the weights, in float32."""

    @staticmethod
    def forward(x: Tensor, gradient: Tensor, how: Geometry, precision: str) -> Tensor:
        return convolution.to_weight(x, gradient, how, precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, gradient, ctx.how, ctx.precision = inputs
        ctx.save_for_backward(x, gradient)

    @staticmethod
    def backward(ctx: Any, again: Tensor) -> tuple[Tensor | None, ...]:
        x, gradient = ctx.saved_tensors
        again, to_x, to_gradient = again.to(gradient.dtype), None, None
        if ctx.needs_input_grad[0]:
            to_x = _ToInput.apply(gradient, again, ctx.how, tuple(x.shape[3:]), ctx.precision).to(x.dtype)  # type: ignore[no-untyped-call]
        if ctx.needs_input_grad[1]:
            to_gradient = convolve(x, again, ctx.how, ctx.precision)
        return to_x, to_gradient, None, None


def _gradients(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    to_x = to_weight = None
    gradient = gradient.to(weight.dtype)
    if ctx.needs_input_grad[0]:
        to_x = _ToInput.apply(gradient, weight, ctx.how, tuple(x.shape[3:]), ctx.precision).to(x.dtype)  # type: ignore[no-untyped-call]
    if ctx.needs_input_grad[1]:
        to_weight = _weight_gradient(x, gradient, weight, ctx)
    return to_x, to_weight


def _weight_gradient(x: Tensor, gradient: Tensor, weight: Tensor, ctx: Any) -> Tensor:
    found: Tensor = _ToWeight.apply(x, gradient, ctx.how, ctx.precision)  # type: ignore[no-untyped-call]
    return found.to(weight.dtype)


class _Served(torch.autograd.Function):
    """relu(pool(scale · convolution + shift)) in one kernel: a layer and its norm with running statistics."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, scale: Tensor | None, shift: Tensor | None,
        how: Geometry, pool: bool, relu: bool, precision: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        lines = (None if line is None else line.float().contiguous() for line in (scale, shift))
        coded = pool or relu
        out, code = convolution.convolve(x, weight, how, Epilogue(*lines, pool, relu, coded), precision)
        return out, out.new_zeros(len(out), dtype=torch.uint8) if code is None else code

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, scale, shift, ctx.how, pool, relu, ctx.precision = inputs
        ctx.coded, ctx.window = pool or relu, Window(2, 2) if pool else Window()
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, scale, shift, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, shift, code = ctx.saved_tensors
        code = code if ctx.coded else None
        sides = ctx.how.leaving(*x.shape[3:])
        own = any(ctx.needs_input_grad[2:4])
        slope = gradient
        if ctx.coded or (scale is not None and not own):
            slope = _Spread.apply(gradient, code, None if own else scale, sides, ctx.window)  # type: ignore[no-untyped-call]
        to_scale = to_shift = None
        if own:  # not in attacks, for which this function is
            over = (1, 3, 4)
            if scale is not None:
                plain = convolve(x, weight, ctx.how, ctx.precision)
                to_scale = (slope.float() * plain.float()).sum(over).to(scale.dtype)
            if shift is not None:
                to_shift = slope.float().sum(over).to(shift.dtype)
            if scale is not None:
                slope = slope * scale[:, None, :, None, None].to(slope.dtype)
        return *_gradients(ctx, x, weight, slope), to_scale, to_shift, None, None, None, None


class _Spread(torch.autograd.Function):
    """The gradient of a pooling and a ReLU, times a scale per channel."""

    @staticmethod
    def forward(
        gradient: Tensor, code: Tensor | None, scale: Tensor | None, sides: tuple[int, int], window: Window
    ) -> Tensor:
        return pooling.spread(gradient, code, sides, window, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    backward = staticmethod(_once)


class _Settled(torch.autograd.Function):
    """relu(pool(norm(z))) with the statistics of z [G, N, C, H, W] itself, and these: mean and variance, [G, C]."""

    @staticmethod
    def forward(
        z: Tensor, weight: Tensor, bias: Tensor, eps: float, window: Window, relu: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var = pooling.moments(z)
        scale = weight.float() * torch.rsqrt(var + eps)
        out, code = pooling.settle(z, scale, bias.float() - mean * scale, window, relu=relu)
        return out, code, mean, var

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        z, weight, bias, ctx.eps, ctx.window, _ = inputs
        _, code, mean, var = output
        ctx.mark_non_differentiable(code, mean, var)
        ctx.save_for_backward(z, weight, bias, code, mean, var)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        z, weight, bias, code, mean, var = ctx.saved_tensors
        to_z, to_weight, to_bias = _Unsettled.apply(gradient, z, weight, code, mean, var, ctx.eps, ctx.window)  # type: ignore[no-untyped-call]
        return to_z, to_weight.to(weight.dtype), to_bias.to(bias.dtype), None, None, None


class _Unsettled(torch.autograd.Function):
    """The gradients of `_Settled`: to z, to the scale and to the shift."""

    @staticmethod
    def forward(
        gradient: Tensor, z: Tensor, weight: Tensor, code: Tensor, mean: Tensor, var: Tensor, eps: float, window: Window
    ) -> tuple[Tensor, Tensor, Tensor]:
        rsqrt = torch.rsqrt(var + eps)
        total, product = pooling.sums(z, gradient, code, mean, rsqrt, window)
        batch = z, mean, rsqrt, total, product
        return pooling.spread(gradient, code, _sides(z), window, weight.float() * rsqrt, batch), product, total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    backward = staticmethod(_once)


class _Pooled(torch.autograd.Function):
    """relu(pool(z · scale + shift)) of z [G, N, C, H, W], without a convolution before."""

    @staticmethod
    def forward(
        z: Tensor, scale: Tensor | None, shift: Tensor | None, window: Window, relu: bool
    ) -> tuple[Tensor, Tensor]:
        return pooling.settle(z, scale, shift, window, relu=relu)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        z, scale, shift, ctx.window, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(z, scale, shift, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        z, scale, shift, code = ctx.saved_tensors
        to_z = to_scale = to_shift = None
        if ctx.needs_input_grad[0]:
            to_z = _Spread.apply(gradient, code, scale, _sides(z), ctx.window)  # type: ignore[no-untyped-call]
        if any(ctx.needs_input_grad[1:3]):
            slope = _Spread.apply(gradient, code, None, _sides(z), ctx.window).float()  # type: ignore[no-untyped-call]
            over = (1, 3, 4)
            to_scale = None if scale is None else (slope * z.float()).sum(over).to(scale.dtype)
            to_shift = None if shift is None else slope.sum(over).to(shift.dtype)
        return to_z, to_scale, to_shift, None, None


def _sides(z: Tensor) -> tuple[int, int]:
    return z.shape[3], z.shape[4]


for _kind in (_Convolution, _ToInput, _ToWeight, _Served, _Spread, _Settled, _Unsettled, _Pooled):
    _kind.vmap = staticmethod(_vectorised(_kind))  # type: ignore[attr-defined]


def convolve(x: Tensor, weight: Tensor, how: Geometry, precision: str) -> Tensor:
    """A convolution of every slot."""
    out: Tensor = _Convolution.apply(x, weight, how, precision)  # type: ignore[no-untyped-call]
    return out


class Following(NamedTuple):
    """What follows a convolution or a norm: a max pooling, ReLU."""

    window: Window = Window()
    relu: bool = False


def serve(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    how: Geometry,
    after: Following,
    precision: str,
) -> Tensor:
    """relu(pool(scale · convolution + shift))."""
    if after.window in (Window(), Window(2, 2)):
        two = after.window.size == 2
        return _Served.apply(x, weight, scale, shift, how, two, after.relu, precision)[0]  # type: ignore[no-any-return,no-untyped-call]
    plain = convolve(x, weight, how, precision)
    return pool(plain, scale, shift, after)


def pool(z: Tensor, scale: Tensor | None, shift: Tensor | None, after: Following) -> Tensor:
    """relu(pool(z · scale + shift))."""
    return _Pooled.apply(z, scale, shift, after.window, after.relu)[0]  # type: ignore[no-any-return,no-untyped-call]


def settle(z: Tensor, weight: Tensor, bias: Tensor, eps: float, after: Following) -> tuple[Tensor, Tensor, Tensor]:
    """relu(pool(norm(z))) of [G, N, C, H, W] by the statistics of each group, and their mean and variance."""
    out, _, mean, var = _Settled.apply(z, weight, bias, eps, after.window, after.relu)  # type: ignore[no-untyped-call]
    return out, mean, var
