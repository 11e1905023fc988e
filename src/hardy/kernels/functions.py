"""The kernels as functions that torch differentiates and vectorises.

All take tensors with a leading slot axis, [S, ...]. `torch.vmap` over one of them folds the axis that it maps into the
slots, so that however many slots there are, one launch does them all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hardy.errors import HardyError
from hardy.kernels import convolution, pooling, weight_gradient
from hardy.kernels.convolution import Epilogue, Geometry
from hardy.kernels.pooling import Window


def _fold(info: Any, in_dims: tuple[Any, ...], tensors: tuple[Any, ...]) -> list[Any]:
    """[S, ...] and an axis of B that vmap maps over -> [B * S, ...]; without such an axis, the same for all."""
    folded: list[Any] = []
    for tensor, dim in zip(tensors, in_dims, strict=False):
        if not isinstance(tensor, Tensor):
            some = isinstance(tensor, tuple) and any(isinstance(one, Tensor) for one in tensor)
            folded.append(tuple(_fold(info, dim, tensor)) if some else tensor)
            continue
        whole = tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        folded.append(whole.flatten(0, 1))
    return folded


def _unfold(info: Any, out: Tensor) -> Tensor:
    return out.view(info.batch_size, -1, *out.shape[1:])


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
    """x [S, N, CI, H, W], weight [S, CO, CI, kh, kw] -> [S, N, CO, H', W']. `half` is the weight as the product reads
    it: rounded, with channels last; the gradient goes to the weight itself. So it is in all functions here."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, half: Tensor, how: Geometry, precision: str) -> Tensor:
        return convolution.convolve(x, half, how, precision=precision)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, half, ctx.how, ctx.precision = inputs
        ctx.save_for_backward(x, weight, half)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, half = ctx.saved_tensors
        return *_gradients(ctx, x, weight, half, gradient), None, None, None


class _ToInput(torch.autograd.Function):
    """gradient [S, N, CO, H', W'], weight -> the gradient to the input, [S, N, CI, H, W]."""

    @staticmethod
    def forward(
        gradient: Tensor, weight: Tensor, half: Tensor, how: Geometry, sides: tuple[int, int], precision: str
    ) -> Tensor:
        return convolution.to_input(gradient, half, how, sides, precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        gradient, weight, half, ctx.how, _, ctx.precision = inputs
        ctx.save_for_backward(gradient, weight, half)

    @staticmethod
    def backward(ctx: Any, again: Tensor) -> tuple[Tensor | None, ...]:
        gradient, weight, half = ctx.saved_tensors
        to_gradient = to_weight = None
        if ctx.needs_input_grad[0]:
            to_gradient = convolution_layer(again, weight, half, ctx.how, ctx.precision)
        if ctx.needs_input_grad[1]:
            to_weight = _weight_gradient(again, gradient, weight, ctx)
        return to_gradient, to_weight, None, None, None, None


class _ToWeight(torch.autograd.Function):
    """x, gradient -> the gradient to the weights, in float32."""

    @staticmethod
    def forward(x: Tensor, gradient: Tensor, how: Geometry, precision: str) -> Tensor:
        return weight_gradient.to_weight(x, gradient, how, precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, gradient, ctx.how, ctx.precision = inputs
        ctx.save_for_backward(x, gradient)

    @staticmethod
    def backward(ctx: Any, again: Tensor) -> tuple[Tensor | None, ...]:
        x, gradient = ctx.saved_tensors
        again, to_x, to_gradient = again.to(gradient.dtype), None, None
        if ctx.needs_input_grad[0]:
            to_x = _to_input(gradient, again, again, x, ctx)
        if ctx.needs_input_grad[1]:
            to_gradient = convolution_layer(x, again, again, ctx.how, ctx.precision)
        return to_x, to_gradient, None, None


def _gradients(
    ctx: Any, x: Tensor, weight: Tensor, half: Tensor, gradient: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    to_x = to_weight = None
    gradient = gradient.to(half.dtype)
    if ctx.needs_input_grad[0]:
        to_x = _to_input(gradient, weight, half, x, ctx)
    if ctx.needs_input_grad[1]:
        to_weight = _weight_gradient(x, gradient, weight, ctx)
    return to_x, to_weight


def _to_input(gradient: Tensor, weight: Tensor, half: Tensor, x: Tensor, ctx: Any) -> Tensor:
    sides = x.shape[3], x.shape[4]
    found: Tensor = _ToInput.apply(gradient, weight, half, ctx.how, sides, ctx.precision)
    return found.to(x.dtype)


def _weight_gradient(x: Tensor, gradient: Tensor, weight: Tensor, ctx: Any) -> Tensor:
    found: Tensor = _ToWeight.apply(x, gradient, ctx.how, ctx.precision)
    return found.to(weight.dtype)


class _Served(torch.autograd.Function):
    """relu(pool(scale · convolution + shift)) in one kernel: a layer and its norm with running statistics."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, half: Tensor, scale: Tensor | None, shift: Tensor | None,
        how: Geometry, pool: bool, relu: bool, flat: bool, precision: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        scale, shift = (None if line is None else line.float().contiguous() for line in (scale, shift))
        coded = pool or relu
        out, code = convolution.convolve(x, half, how, Epilogue(scale, shift, pool, relu, coded, flat), precision)
        return out, out.new_zeros(len(out), dtype=torch.uint8) if code is None else code

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, half, scale, shift, ctx.how, pool, relu, _, ctx.precision = inputs
        ctx.set_materialize_grads(False)
        ctx.coded, ctx.window = pool or relu, Window(2, 2) if pool else Window()
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, half, scale, shift, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, half, scale, shift, code = ctx.saved_tensors
        code = code if ctx.coded else None
        sides = ctx.how.leaving(*x.shape[3:])
        own = any(ctx.needs_input_grad[3:5])
        slope = gradient
        if ctx.coded or (scale is not None and not own):
            slope = _Spread.apply(gradient, code, None if own else scale, sides, ctx.window)
        to_scale = to_shift = None
        if own:  # not in attacks, for which this function is
            over = (1, 3, 4)
            if scale is not None:
                plain = convolution_layer(x, weight, half, ctx.how, ctx.precision)
                to_scale = (slope.float() * plain.float()).sum(over).to(scale.dtype)
            if shift is not None:
                to_shift = slope.float().sum(over).to(shift.dtype)
            if scale is not None:
                slope = slope * scale[:, None, :, None, None].to(slope.dtype)
        return *_gradients(ctx, x, weight, half, slope), None, to_scale, to_shift, *[None] * 5


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
    """relu(pool(norm(z))) of z [G, N, C, H, W]. The statistics of a group are its own where `batch` [G] is 1, and the
    given mean and var [G, C] where it is 0. Also returns z's own ones."""

    @staticmethod
    def forward(
        z: Tensor, weight: Tensor, bias: Tensor, given: tuple[Tensor, Tensor, Tensor],
        eps: float, window: Window, relu: bool, flat: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        own = pooling.moments(z)
        mean, var = _chosen(own, given)
        scale = weight.float() * torch.rsqrt(var + eps)
        out, code = pooling.settle(z, scale, bias.float() - mean * scale, window, relu=relu, flat=flat)
        return out, code, *own

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        z, weight, bias, given, ctx.eps, ctx.window, _, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(z, weight, bias, *given, *output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        z, weight, bias, batch, mean, var, code, *own = ctx.saved_tensors
        to_z, to_weight, to_bias = _Unsettled.apply(
            gradient, z, weight, code, batch, *_chosen((own[0], own[1]), (batch, mean, var)), ctx.eps, ctx.window
        )
        return to_z, to_weight.to(weight.dtype), to_bias.to(bias.dtype), *[None] * 5


def _chosen(own: tuple[Tensor, Tensor], given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    batch, mean, var = given
    wanted = batch[:, None] > 0
    return torch.where(wanted, own[0], mean), torch.where(wanted, own[1], var)


class _Unsettled(torch.autograd.Function):
    """The gradients of `_Settled`: to z, to the scale and to the shift."""

    @staticmethod
    def forward(
        gradient: Tensor, z: Tensor, weight: Tensor, code: Tensor, batch: Tensor, mean: Tensor, var: Tensor,
        eps: float, window: Window,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        rsqrt = torch.rsqrt(var + eps)
        total, product = pooling.sums(z, gradient, code, mean, rsqrt, window)
        norm = z, mean, rsqrt, total, product, batch
        return pooling.spread(gradient, code, _sides(z), window, weight.float() * rsqrt, norm), product, total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    backward = staticmethod(_once)


class _Pooled(torch.autograd.Function):
    """relu(pool(z · scale + shift)) of z [G, N, C, H, W], without a convolution before."""

    @staticmethod
    def forward(
        z: Tensor, scale: Tensor | None, shift: Tensor | None, window: Window, relu: bool, flat: bool
    ) -> tuple[Tensor, Tensor]:
        return pooling.settle(z, scale, shift, window, relu=relu, flat=flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        z, scale, shift, ctx.window, _, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(z, scale, shift, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        z, scale, shift, code = ctx.saved_tensors
        to_z = to_scale = to_shift = None
        if ctx.needs_input_grad[0]:
            to_z = _Spread.apply(gradient, code, scale, _sides(z), ctx.window)
        if any(ctx.needs_input_grad[1:3]):
            slope = _Spread.apply(gradient, code, None, _sides(z), ctx.window).float()
            over = (1, 3, 4)
            to_scale = None if scale is None else (slope * z.float()).sum(over).to(scale.dtype)
            to_shift = None if shift is None else slope.sum(over).to(shift.dtype)
        return to_z, to_scale, to_shift, None, None, None


def _sides(z: Tensor) -> tuple[int, int]:
    return z.shape[3], z.shape[4]


class _Linear(torch.autograd.Function):
    """x [S, N, I], weight [S, O, I] -> [S, N, O]."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, half: Tensor) -> Tensor:
        return torch.bmm(x, half.transpose(1, 2))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, half = ctx.saved_tensors
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:  # a product of this kind too: of the weight turned round
            to_x = _Linear.apply(gradient, weight.transpose(1, 2), half.transpose(1, 2))
        if ctx.needs_input_grad[1]:
            to_weight = _Outer.apply(gradient, x).to(weight.dtype)
        return to_x, to_weight, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, weight: Tensor, half: Tensor) -> tuple[Tensor, int]:
        if in_dims[2] is None and in_dims[0] is not None and len(half) == 1:  # one weight for all: one product
            rows = x.movedim(in_dims[0], 0)
            wide = weight if in_dims[1] is None else weight.select(in_dims[1], 0)
            out = _Linear.apply(rows.flatten(0, 2)[None], wide, half)
            return out.view(*rows.shape[:3], -1), 0
        folded = _fold(info, in_dims, (x, weight, half))
        return _unfold(info, _Linear.apply(*folded)), 0


class _Outer(torch.autograd.Function):
    """gradient [S, N, O], x [S, N, I] -> the gradient to the weights [S, O, I], summed and written in float32."""

    @staticmethod
    def forward(gradient: Tensor, x: Tensor) -> Tensor:
        turned = gradient.transpose(1, 2)
        if x.is_cuda and x.dtype is not torch.float32:
            return torch.bmm(turned, x, out_dtype=torch.float32)
        return torch.bmm(turned, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, again: Tensor) -> tuple[Tensor, Tensor]:
        gradient, x = ctx.saved_tensors
        again = again.to(x.dtype)
        return torch.bmm(x, again.transpose(1, 2)), torch.bmm(gradient, again)


for _kind in (_Convolution, _ToInput, _ToWeight, _Served, _Spread, _Settled, _Unsettled, _Pooled, _Outer):
    setattr(_kind, "vmap", staticmethod(_vectorised(_kind)))  # noqa: B010


def convolution_layer(x: Tensor, weight: Tensor, half: Tensor, how: Geometry, precision: str) -> Tensor:
    """A convolution of every slot."""
    out: Tensor = _Convolution.apply(x, weight, half, how, precision)
    return out


def linear_layer(x: Tensor, weight: Tensor, half: Tensor) -> Tensor:
    """A linear layer of every slot, without its bias."""
    out: Tensor = _Linear.apply(x, weight, half)
    return out


class Following(NamedTuple):
    """What follows a convolution or a norm: a max pooling, ReLU, a flattening."""

    window: Window = Window()
    relu: bool = False
    flat: bool = False


def served_layer(
    x: Tensor,
    weight: Tensor,
    half: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    how: Geometry,
    after: Following,
    precision: str,
) -> Tensor:
    """relu(pool(scale · convolution + shift))."""
    if after.window in (Window(), Window(2, 2)):
        two = after.window.size == 2
        return _Served.apply(x, weight, half, scale, shift, how, two, after.relu, after.flat, precision)[0]  # type: ignore[no-any-return]
    return pooling_layer(convolution_layer(x, weight, half, how, precision), scale, shift, after)


def pooling_layer(z: Tensor, scale: Tensor | None, shift: Tensor | None, after: Following) -> Tensor:
    """relu(pool(z · scale + shift))."""
    return _Pooled.apply(z, scale, shift, *after)[0]  # type: ignore[no-any-return]


def norm_layer(
    z: Tensor, weight: Tensor, bias: Tensor, given: tuple[Tensor, Tensor, Tensor], eps: float, after: Following
) -> tuple[Tensor, Tensor, Tensor]:
    """relu(pool(norm(z))) of [G, N, C, H, W], and z's own mean and variance. `given`: for each group whether it is
    normalised by these, and the mean and variance it is normalised by if not."""
    out, _, mean, var = _Settled.apply(z, weight, bias, given, eps, *after)
    return out, mean, var
