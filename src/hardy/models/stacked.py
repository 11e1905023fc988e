"""Layers that run well for many slots at once, where vmap alone would copy or fall back to slow kernels.

`in_turn(x, *layers)` runs layers one after the other. For many slots on a GPU, runs of a convolution, a norm, a max
pooling and a ReLU become one kernel or two (`hardy.kernels`), and activations lie with channels last in between. All
else, and all of it elsewhere, is torch's own.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from hardy.core.layers import BatchNorm, Call, CountedStatistics, FederatedStatistics, Statistics, current
from hardy.core.manner import manner, round_once

_LOG = logging.getLogger("hardy")


@cache
def why_not_fused(device: torch.device) -> str:
    """What keeps the fused kernels from running on a device; empty: nothing. Said once, in a warning."""
    why = ""
    if torch.cuda.get_device_capability(device) < (8, 0):
        why = f"{torch.cuda.get_device_name(device)} is older than they are made for (compute capability 8.0)"
    else:
        try:
            import triton  # noqa: F401
        except ImportError:
            why = "triton is not installed"
    if why:
        _LOG.warning("Layers of many clients run without fused kernels, which is slower: %s.", why)
    return why


def _fusing(x: Tensor) -> bool:
    return manner() == "fused" and x.dtype is not torch.float64


class FusedSequential(nn.Sequential):
    """nn.Sequential whose layers run in turn as `in_turn` runs them."""

    def forward(self, x: Tensor) -> Tensor:
        return in_turn(x, *self)


def in_turn(x: Tensor, *layers: nn.Module) -> Tensor:
    """The layers one after the other."""
    if not _fusing(x):
        for layer in layers:
            x = layer(x)
        return x
    for run in _runs(_leaves(layers)):
        x = run.fused(x) if x.dim() == 4 else run.plain(x)
    return x


def _leaves(layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for layer in layers:
        if type(layer) in (FusedSequential, nn.Sequential) and not _hooked(layer):
            yield from _leaves(cast(nn.Sequential, layer))
        elif type(layer) is not nn.Identity:
            yield layer


def _hooked(layer: nn.Module) -> bool:
    """Whether somebody waits for what goes in or out."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


class _Run(NamedTuple):
    """Layers that are one block: [convolution] [norm] and, in any order, [max pooling] [ReLU]. Or one other layer."""

    layers: list[nn.Module]
    convolution: nn.Conv2d | None = None
    norm: BatchNorm | None = None
    pool: nn.MaxPool2d | None = None
    relu: bool = False
    flat: bool = False

    @property
    def after(self) -> Any:
        from hardy.kernels.functions import Following

        return Following(_window(self.pool), self.relu, self.flat)

    def plain(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if layer is self.convolution:
                x = nn.Conv2d.forward(self.convolution, x)
            elif type(layer) is nn.AdaptiveAvgPool2d and layer.output_size in (1, (1, 1)) and not _hooked(layer):
                x = x.mean((2, 3), keepdim=True)  # torch's sets strides of what has its channels last, slot by slot
            elif not isinstance(layer, nn.Flatten) or not self.flat or x.dim() != 4:
                x = layer(x)
        return x

    def fused(self, x: Tensor) -> Tensor:
        call = current()
        calls = call.parts or (call,)
        if self.norm and (len(calls) > 1 or call.statistics == "batch"):
            out = self._by_statistics(x, calls) if _usual(self.norm, calls) else self._apart(x)
        elif self.norm and call.statistics != "running":
            out = self._apart(x)
        else:
            lines = self.norm.line(call) if self.norm else (None, None)
            for_each_image = lines[0] is not None and lines[0].dim() > 1
            out = self._apart(x) if for_each_image else self._by_line(x, *lines)
        return out.flatten(1) if self.flat else out

    def _apart(self, x: Tensor) -> Tensor:
        """The convolution fused, all after it by itself."""
        if self.convolution is None:
            return self.plain(x)
        z = _Run([self.convolution], self.convolution).fused(x)
        return self._replace(layers=self.layers[1:], convolution=None).plain(z)

    def _by_line(self, x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
        """With running statistics, or none: a norm is a line."""
        from hardy.kernels import functions

        scale, shift = (None if line is None else line[None] for line in (scale, shift))
        if self.convolution is None:
            if len(self.layers) == 1 and self.pool is None:
                return self.plain(x)
            return functions.pooling_layer(x[None], scale, shift, self.after).squeeze(0)
        weight, half, how = _product(self.convolution)
        bias = None if self.convolution.bias is None else self.convolution.bias[None]
        if bias is not None:
            shift = bias if scale is None or shift is None else shift + bias * scale
        return functions.served_layer(
            x[None], weight[None], half[None], scale, shift, how, self.after, _precision()
        ).squeeze(0)

    def _by_statistics(self, x: Tensor, calls: Sequence[Call]) -> Tensor:
        """With statistics of the batch, of each part of it by itself, or running ones for some of its parts. A bias
        before the norm changes the mean alone."""
        from hardy.kernels import functions

        assert self.norm is not None
        z, bias = x, None
        if self.convolution is not None:
            weight, half, how = _product(self.convolution)
            z = functions.convolution_layer(x[None], weight[None], half[None], how, _precision()).squeeze(0)
            bias = None if self.convolution.bias is None else self.convolution.bias
        kept, affine = zip(*(self.norm.branch(call.branch) for call in calls), strict=True)
        own = [one.by_batch and call.statistics == "batch" for one, call in zip(kept, calls, strict=True)]
        means, variances = zip(*(one.given(call) for one, call in zip(kept, calls, strict=True)), strict=True)
        given = (
            torch.stack([torch.full((), float(its), device=x.device) for its in own]),
            torch.stack([mean if bias is None else mean - bias.detach() for mean in means]),
            torch.stack(variances),
        )
        terms = [one.bias for one in affine]
        if bias is not None:  # given means do not follow it, so there the gradient to it is that to the shift
            lines = [one.weight * torch.rsqrt(v + self.norm.eps) for one, v in zip(affine, variances, strict=True)]
            terms = [
                t if its else t + (bias - bias.detach()) * line for t, line, its in zip(terms, lines, own, strict=True)
            ]
        out, mean, var = functions.norm_layer(
            z.view(len(calls), -1, *z.shape[1:]),
            torch.stack([one.weight for one in affine]),
            torch.stack(terms),
            given,
            self.norm.eps,
            self.after,
        )
        count = z.numel() // z.shape[1] // len(calls)
        for part in range(len(calls)):
            if calls[part].statistics == "batch":
                before = kept[part].mean, kept[part].var
                middle = mean[part] if bias is None else mean[part] + bias.detach()
                kept[part].follow(middle, var[part], count)
                kept[part].blur(calls[part], *before)
        return out.flatten(0, 1)


def _runs(layers: Iterable[nn.Module]) -> Iterator[_Run]:
    """The blocks of layers in turn."""
    waiting = list(layers)[::-1]

    def take(kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> Any:
        fits = waiting and type(waiting[-1]) in (kind if isinstance(kind, tuple) else (kind,))
        return waiting.pop() if fits and not _hooked(waiting[-1]) and _plain(waiting[-1]) else None

    while waiting:
        parts = [take((Conv2d, nn.Conv2d)), take(BatchNorm)]
        relu = take(nn.ReLU)
        pool = take((MaxPool2d, nn.MaxPool2d))
        relu = relu or take(nn.ReLU)
        found = [layer for layer in (*parts, pool, relu) if layer is not None]
        if not found:
            yield _Run([waiting.pop()])
            continue
        flat = take(nn.Flatten) if parts[0] or pool else None
        layers = [*found, *([flat] if flat else [])]
        yield _Run(layers, parts[0], parts[1], pool, relu is not None, flat is not None)


def _plain(layer: nn.Module) -> bool:
    """Whether the kernels can do what a layer is set to do."""
    if isinstance(layer, nn.Conv2d):
        size, padding, stride = layer.kernel_size[0], layer.padding[0], layer.stride[0]
        same = layer.kernel_size == (size, size) and layer.padding == (padding, padding)
        usual = layer.dilation == (1, 1) and layer.groups == 1 and layer.padding_mode == "zeros"
        return usual and same and layer.stride == (stride, stride) and isinstance(padding, int) and padding < size
    if isinstance(layer, nn.MaxPool2d):
        numbers = (layer.kernel_size, layer.stride, layer.padding)
        return layer.dilation == 1 and not layer.return_indices and all(isinstance(n, int) for n in numbers)
    return not isinstance(layer, nn.Flatten) or (layer.start_dim, layer.end_dim) == (1, -1)


def _usual(norm: BatchNorm, calls: Sequence[Call]) -> bool:
    """Whether a norm normalises every part by the batch as it is, by what the server sent, or by one branch's running
    statistics."""
    kinds = {type(norm.branch(call.branch)[0]) for call in calls if call.statistics == "batch"}
    known = all(call.statistics in ("batch", "running") and call.robustness is None for call in calls)
    return known and norm.gain == 1.0 and kinds <= {Statistics, CountedStatistics, FederatedStatistics}


def _window(pool: nn.MaxPool2d | None) -> Any:
    from hardy.kernels.pooling import Window

    return Window() if pool is None else Window(pool.kernel_size, pool.stride, pool.padding, pool.ceil_mode)  # type: ignore[arg-type]


def _product(convolution: nn.Conv2d) -> tuple[Tensor, Tensor, Any]:
    """Weights, the copy that the kernels read, and the window."""
    from hardy.kernels.convolution import Geometry

    height, width = convolution.kernel_size
    how = Geometry(height, width, convolution.stride[0], int(convolution.padding[0]))
    return convolution.weight, round_once(convolution.weight), how


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


class Linear(nn.Linear):
    """nn.Linear whose gradients to the weights are summed and kept in float32, whatever its products are."""

    reads_rounded = True

    def forward(self, x: Tensor) -> Tensor:
        if not (_fusing(x) and x.dim() == 2):
            return super().forward(x)
        from hardy.kernels import functions

        half = round_once(self.weight)
        out = functions.linear_layer(x.to(half.dtype)[None], self.weight[None], half[None]).squeeze(0)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class Conv2d(nn.Conv2d):
    """nn.Conv2d that runs by the fused kernels."""

    reads_rounded = True

    def forward(self, x: Tensor) -> Tensor:
        if not (_fusing(x) and x.dim() == 4 and _plain(self)):
            return super().forward(x)
        return _Run([self], convolution=self).fused(x)


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
        if _fusing(x) and x.dim() == 4 and _plain(self):
            return _Run([self], pool=self).fused(x)
        if manner() == "one" or self.dilation != 1:
            return cast(Tensor, super().forward(x))
        out, _ = cast(tuple[Tensor, Tensor], _Pool.apply(x, how))  # type: ignore[no-untyped-call]
        return out
