"""A norm's line, max pooling and ReLU in one pass over memory, for many groups of images at once, as Triton kernels.

A group is what one norm sees: a slot's images, or one part of them (clean, attacked). Activations lie as
[G, N, H, W, C]. Where each value came from is kept in one byte (its place in the pooling window, or `DEAD`), from which
gradients find their way back. Sums run in one fixed order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Window(NamedTuple):
    """Of a max pooling; the default is none."""

    size: int = 1
    stride: int = 1
    padding: int = 0
    ceil: bool = False

    def leaving(self, height: int, width: int) -> tuple[int, int]:
        """Sides of what comes out."""
        down, across = (self._windows(side) for side in (height, width))
        return down, across

    def _windows(self, side: int) -> int:
        free = side + 2 * self.padding - self.size
        count = (-(-free // self.stride) if self.ceil else free // self.stride) + 1
        # a window must begin inside the image or the padding before it
        return count - (self.ceil and (count - 1) * self.stride >= side + self.padding)

    @property
    def turns(self) -> int:
        """How many windows, in a row or a column, hold one pixel at most."""
        return -(-self.size // self.stride)


@triton.jit
def _settle(
    z, scale, shift, out, code, images, height, width, rows_out, columns_out, cell_out, channel_out,
    C: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, PAD: tl.constexpr,
    SCALED: tl.constexpr, SHIFTED: tl.constexpr, RELU: tl.constexpr, CODED: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BM + tl.arange(0, BM)
    channel = tl.program_id(2) * BC + tl.arange(0, BC)
    cells = rows_out * columns_out
    there, kept = pixel < images * cells, channel < C
    image, cell = pixel // cells, pixel % cells
    top, left = cell // columns_out * STEP - PAD, cell % columns_out * STEP - PAD
    z += group * images * height * width * C
    if SCALED:
        factor = tl.load(scale + group * C + channel, mask=kept, other=0.0)
    if SHIFTED:
        term = tl.load(shift + group * C + channel, mask=kept, other=0.0)
    best = tl.full((BM, BC), float("-inf"), tl.float32)
    place = tl.zeros((BM, BC), tl.int32)
    for at in tl.static_range(SIZE * SIZE):
        row, column = top + at // SIZE, left + at % SIZE
        inside = there & (row >= 0) & (row < height) & (column >= 0) & (column < width)
        seen = inside[:, None] & kept[None, :]
        where = ((image * height + row) * width + column)[:, None] * C + channel[None, :]
        value = tl.load(z + where, mask=seen, other=0.0).to(tl.float32)
        if SCALED:
            value = value * factor[None, :]
        if SHIFTED:
            value = value + term[None, :]
        better = seen & (value > best)
        place = tl.where(better, at, place)
        best = tl.where(better, value, best)
    if RELU:
        place = tl.where(best > 0, place, 255)
        best = tl.maximum(best, 0.0)
    at = (group * images + image)[:, None] * (cells * C) + (cell * cell_out)[:, None] + (channel * channel_out)[None, :]
    written = there[:, None] & kept[None, :]
    tl.store(out + at, best.to(out.dtype.element_ty), mask=written)
    if CODED:
        tl.store(code + at, place.to(tl.uint8), mask=written)


@triton.jit
def _moments(z, mean, square, pixels, SPAN: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """Mean and sum of squared deviations of a span of a group's pixels. Values are taken relative to the span's first,
    so that a large mean does not swallow the deviations."""
    group, span = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = tl.program_id(2) * BC + tl.arange(0, BC)
    kept = channel < C
    z += group * pixels * C
    first = tl.load(z + span * SPAN * C + channel, mask=kept, other=0.0).to(tl.float32)
    total, squares = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for start in range(0, SPAN, BM):
        pixel = span * SPAN + start + tl.arange(0, BM)
        seen = ((pixel < pixels) & (start + tl.arange(0, BM) < SPAN))[:, None] & kept[None, :]
        value = tl.load(z + pixel[:, None] * C + channel[None, :], mask=seen, other=0.0).to(tl.float32)
        value = tl.where(seen, value - first[None, :], 0.0)
        total += value
        squares += value * value
    count = tl.minimum(pixels - span * SPAN, SPAN).to(tl.float32)
    summed = tl.sum(total, 0)
    at = (group * tl.num_programs(0) + span) * C + channel
    tl.store(mean + at, first + summed / count, mask=kept)
    tl.store(square + at, tl.sum(squares, 0) - summed * summed / count, mask=kept)


@triton.jit
def _found(
    g, code, image, row, column, there, channel, kept, rows_out, columns_out, cell_out, channel_out,
    C: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, PAD: tl.constexpr, TURNS: tl.constexpr,
    CODED: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of the pixels that went into the pooling: of the windows that took their value."""
    total = tl.zeros((BM, BC), tl.float32)
    for turn in tl.static_range(TURNS * TURNS):
        up, across = (row + PAD) // STEP - turn // TURNS, (column + PAD) // STEP - turn % TURNS
        down, aside = row + PAD - up * STEP, column + PAD - across * STEP
        inside = there & (up >= 0) & (up < rows_out) & (across >= 0) & (across < columns_out)
        inside = inside & (down < SIZE) & (aside < SIZE)
        at = (image * (rows_out * columns_out * C) + (up * columns_out + across) * cell_out)[:, None]
        at += (channel * channel_out)[None, :]
        seen = inside[:, None] & kept[None, :]
        value = tl.load(g + at, mask=seen, other=0.0).to(tl.float32)
        if CODED:
            place = tl.load(code + at, mask=seen, other=255).to(tl.int32)
            value = tl.where(place == (down * SIZE + aside)[:, None], value, 0.0)
        total += value
    return total


@triton.jit
def _sums(
    z, g, code, mean, rsqrt, total, product, images, height, width, rows_out, columns_out, cell_out, channel_out,
    SPAN: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, PAD: tl.constexpr,
    TURNS: tl.constexpr, CODED: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Over a span of a group's pixels: the sum of gradients, and of gradients times normalised values."""
    group, span = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = tl.program_id(2) * BC + tl.arange(0, BC)
    kept = channel < C
    pixels = images * height * width
    z += group * pixels * C
    g += group * images * rows_out * columns_out * C
    code += group * images * rows_out * columns_out * C
    middle = tl.load(mean + group * C + channel, mask=kept, other=0.0)
    factor = tl.load(rsqrt + group * C + channel, mask=kept, other=0.0)
    sums, products = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for start in range(0, SPAN, BM):
        pixel = span * SPAN + start + tl.arange(0, BM)
        there = (pixel < pixels) & (start + tl.arange(0, BM) < SPAN)
        image, cell = pixel // (height * width), pixel % (height * width)
        slope = _found(
            g, code, image, cell // width, cell % width, there, channel, kept,
            rows_out, columns_out, cell_out, channel_out,
            C, SIZE, STEP, PAD, TURNS, CODED, BM, BC,
        )  # fmt: skip
        value = tl.load(z + pixel[:, None] * C + channel[None, :], mask=there[:, None] & kept[None, :], other=0.0).to(
            tl.float32
        )
        sums += slope
        products += slope * (value - middle[None, :]) * factor[None, :]
    at = (group * tl.num_programs(0) + span) * C + channel
    tl.store(total + at, tl.sum(sums, 0), mask=kept)
    tl.store(product + at, tl.sum(products, 0), mask=kept)


@triton.jit
def _spread(
    g, code, z, scale, mean, rsqrt, total, product, batch, out,
    images, height, width, rows_out, columns_out, cell_out, channel_out,
    C: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, PAD: tl.constexpr, TURNS: tl.constexpr,
    CODED: tl.constexpr, SCALED: tl.constexpr, BATCH: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients to what went in. With BATCH, the norm of a group took its statistics from these very pixels if its
    number in `batch` is 1; it is 0 for given statistics."""
    group = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BM + tl.arange(0, BM)
    channel = tl.program_id(2) * BC + tl.arange(0, BC)
    there, kept = pixel < images * height * width, channel < C
    image, cell = pixel // (height * width), pixel % (height * width)
    g += group * images * rows_out * columns_out * C
    code += group * images * rows_out * columns_out * C
    slope = _found(
        g, code, image, cell // width, cell % width, there, channel, kept, rows_out, columns_out, cell_out, channel_out,
        C, SIZE, STEP, PAD, TURNS, CODED, BM, BC,
    )  # fmt: skip
    at = (group * images * height * width + pixel)[:, None] * C + channel[None, :]
    written = there[:, None] & kept[None, :]
    line = group * C + channel
    if BATCH:
        value = tl.load(z + at, mask=written, other=0.0).to(tl.float32)
        middle = tl.load(mean + line, mask=kept, other=0.0)
        factor = tl.load(rsqrt + line, mask=kept, other=0.0)
        share = tl.load(batch + group) / (images * height * width)
        sums = tl.load(total + line, mask=kept, other=0.0) * share
        products = tl.load(product + line, mask=kept, other=0.0) * share * factor
        slope = slope - sums[None, :] - (value - middle[None, :]) * products[None, :]
    if SCALED:
        slope = slope * tl.load(scale + line, mask=kept, other=0.0)[None, :]
    tl.store(out + at, slope.to(out.dtype.element_ty), mask=written)


def settle(
    z: Tensor, scale: Tensor | None, shift: Tensor | None, window: Window, *, relu: bool, flat: bool = False
) -> tuple[Tensor, Tensor]:
    """relu(pool(z · scale + shift)) of z [G, N, C, H, W] with scale, shift [G, C]; and the codes of its values. `flat`:
    they lie channel by channel, as a layer of whole images reads them."""
    z = channels_last(z)
    groups, images, channels, height, width = z.shape
    rows, columns = window.leaving(height, width)
    out = z.new_empty(groups, images, *((channels, rows, columns) if flat else (rows, columns, channels)))
    code = torch.empty_like(out, dtype=torch.uint8)
    cell, channel = (1, rows * columns) if flat else (channels, 1)
    grid = _tiles(groups, images * rows * columns, channels)
    _settle[grid](
        z, _line(scale), _line(shift), out, code, images, height, width, rows, columns, cell, channel,
        C=channels, SIZE=window.size, STEP=window.stride, PAD=window.padding,
        SCALED=scale is not None, SHIFTED=shift is not None, RELU=relu, CODED=True, BM=_PIXELS, BC=_channels(channels),
    )  # fmt: skip
    return (out, code) if flat else (out.permute(0, 1, 4, 2, 3), code.permute(0, 1, 4, 2, 3))


def moments(z: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel, [G, C]."""
    z = channels_last(z)
    groups, images, channels, height, width = z.shape
    pixels = images * height * width
    span = _span(pixels)
    spans = triton.cdiv(pixels, span)
    mean, square = z.new_empty(2, groups, spans, channels, dtype=torch.float32).unbind()
    _moments[spans, groups, triton.cdiv(channels, _channels(channels))](
        z, mean, square, pixels, SPAN=span, C=channels, BM=_PIXELS, BC=_channels(channels)
    )
    if spans == 1:
        return mean[:, 0], square[:, 0] / pixels
    starts = torch.arange(0, pixels, span, device=z.device)
    counts = (pixels - starts).clamp_max(span).to(torch.float32)[:, None]
    middle = (mean * counts).sum(1) / pixels
    var = (square + counts * (mean - middle[:, None]).square()).sum(1) / pixels
    return middle, var


def sums(
    z: Tensor, gradient: Tensor, code: Tensor | None, mean: Tensor, rsqrt: Tensor, window: Window
) -> tuple[Tensor, Tensor]:
    """The gradients to a norm's shift and to its scale, [G, C]."""
    z, gradient, code, cell, channel = channels_last(z), *_alike(gradient, code)
    groups, images, channels, height, width = z.shape
    span = _span(images * height * width)
    spans = triton.cdiv(images * height * width, span)
    total, product = z.new_empty(2, groups, spans, channels, dtype=torch.float32).unbind()
    _sums[spans, groups, triton.cdiv(channels, _channels(channels))](
        z, gradient, gradient if code is None else code, _line(mean), _line(rsqrt), total, product,
        images, height, width, *gradient.shape[3:], cell, channel, SPAN=span, C=channels,
        SIZE=window.size, STEP=window.stride, PAD=window.padding, TURNS=window.turns,
        CODED=code is not None, BM=_PIXELS, BC=_channels(channels),
    )  # fmt: skip
    return total.sum(1), product.sum(1)


def spread(
    gradient: Tensor,
    code: Tensor | None,
    sides: tuple[int, int],
    window: Window,
    scale: Tensor | None = None,
    batch: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Gradients to what `settle` was given. `batch`: z, its mean and reciprocal deviation, the `sums`, and for each
    group whether its statistics come from z itself, [G]."""
    gradient, code, cell, channel = _alike(gradient, code)
    groups, images, channels = gradient.shape[:3]
    pixels = images * sides[0] * sides[1]
    out = gradient.new_empty(groups, images, *sides, channels)
    z, *lines = (channels_last(batch[0]), *map(_line, batch[1:])) if batch else (gradient, *[None] * 5)
    _spread[_tiles(groups, pixels, channels)](
        gradient, gradient if code is None else code, z, _line(scale), *lines, out,
        images, *sides, *gradient.shape[3:], cell, channel, C=channels,
        SIZE=window.size, STEP=window.stride, PAD=window.padding, TURNS=window.turns, CODED=code is not None,
        SCALED=scale is not None, BATCH=batch is not None, BM=_PIXELS, BC=_channels(channels),
    )  # fmt: skip
    return out.permute(0, 1, 4, 2, 3)


_PIXELS = 32
_SPAN = 2048
"""pixels of a partial sum"""


def _span(pixels: int) -> int:
    return min(_SPAN, -(-pixels // _PIXELS) * _PIXELS)


def _channels(channels: int) -> int:
    return min(64, max(4, 1 << (channels - 1).bit_length()))


def _tiles(groups: int, pixels: int, channels: int) -> tuple[int, int, int]:
    return triton.cdiv(pixels, _PIXELS), groups, triton.cdiv(channels, _channels(channels))


def _alike(gradient: Tensor, code: Tensor | None) -> tuple[Tensor, Tensor | None, int, int]:
    """A gradient and codes that lie in the same way, and their strides from cell to cell and channel to channel."""
    channels, cells = gradient.shape[2], gradient.shape[3] * gradient.shape[4]
    flat = gradient.is_contiguous() and (code is None or code.is_contiguous())
    if not flat:
        gradient, code = channels_last(gradient), None if code is None else channels_last(code)
    return gradient, code, *((1, cells) if flat else (channels, 1))


def channels_last(z: Tensor) -> Tensor:
    """[G, N, C, H, W] that lies in memory as [G, N, H, W, C]; the same values."""
    return z.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def _line(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.to(torch.float32).contiguous()
