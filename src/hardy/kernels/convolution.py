"""Convolutions of many slots at once, each with weights of its own, as Triton kernels.

A convolution is a sum over taps (places of its window) of products [pixels, channels] x [channels, channels], so the
matrix units do all of it and no window is ever written to memory. Activations lie as [S, N, H, W, C] (channels last).
What follows a convolution in a network's forward pass is done while its result is still in registers: scale and shift
of a norm with running statistics, a max pooling of 2 x 2, ReLU.

Sums run in one fixed order, whatever the sizes of the tiles, which `tuning` chooses: a choice changes no bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hardy.kernels.tuning import Tiles, quickest_tiles

FEW = 16
"""input channels below which taps and channels are one axis of the product: it would be nearly empty otherwise"""
DEAD = 255
"""code of a pixel that ReLU has set to zero; else its place in the pooling window"""


class Geometry(NamedTuple):
    """A convolution's window: height and width of the kernel, stride, padding."""

    height: int
    width: int
    stride: int
    padding: int

    def leaving(self, height: int, width: int) -> tuple[int, int]:
        """Sides of what comes out."""
        down, across = (
            (side + 2 * self.padding - kernel) // self.stride + 1
            for side, kernel in ((height, self.height), (width, self.width))
        )
        return down, across


class Epilogue(NamedTuple):
    """What is done to a convolution's result before it is written: scale, shift [S, C], pooling, ReLU."""

    scale: Tensor | None = None
    shift: Tensor | None = None
    pool: bool = False
    relu: bool = False
    coded: bool = False
    """also write where each value came from, for `pooling.spread`"""
    flat: bool = False
    """write channel by channel, as a layer of whole images reads it"""


@triton.jit
def look(
    x, image, top, left, there, kh, kw, channel, known,
    row_x, column_x, channel_x, height, width,
    STRIDE: tl.constexpr, PAD: tl.constexpr, TURNED: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """x where a window looks: [pixels, channels], zero outside of the image. With TURNED, x is a gradient that came out
    of the convolution, and pixels are those that went in. With FEW, kh, kw and channel are [channels], else one tap."""
    if FEW:
        image, top, left = image[:, None], top[:, None], left[:, None]
        kh, kw = kh[None, :], kw[None, :]
    if TURNED:
        down, across = top + PAD - kh, left + PAD - kw
        row, column = down // STRIDE, across // STRIDE
        inside = (down >= 0) & (row < height) & (across >= 0) & (column < width)
        if STRIDE > 1:
            inside = inside & (down % STRIDE == 0) & (across % STRIDE == 0)
    else:
        row, column = top * STRIDE - PAD + kh, left * STRIDE - PAD + kw
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    pixel = image + row * row_x + column * column_x
    if FEW:
        seen = inside & there[:, None] & known[None, :]
    else:
        seen = (inside & there)[:, None] & known[None, :]
        pixel = pixel[:, None]
    return tl.load(x + pixel + channel[None, :] * channel_x, mask=seen, other=0.0)


@triton.jit
def _aligned(acc, line, SCALED: tl.constexpr, SHIFTED: tl.constexpr, scale):
    if SCALED:
        acc = acc * scale[None, :]
    if SHIFTED:
        acc = acc + line[None, :]
    return acc


@triton.jit
def _convolution(  # noqa: PLR0915
    x, w, out, code, scale, shift,
    slot_x, image_x, row_x, column_x, channel_x,
    slot_w, tap_w, in_w, out_w,
    images, height, width, rows_out, columns_out, cell_out, channel_out, tall, wide,
    CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, TURNED: tl.constexpr, SIDE: tl.constexpr,
    POOL: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, RELU: tl.constexpr, CODED: tl.constexpr,
    FEW: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of pixels x output channels of one slot. With POOL = 2, pixels are those after the pooling, and the four
    places of their windows are four tiles. With SIDE > 0, channels are those of a block of SIDE x SIDE pixels of an
    image [channels, tall, wide]."""
    slot = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BM + tl.arange(0, BM)
    leaving = tl.program_id(2) * BN + tl.arange(0, BN)
    cells = rows_out * columns_out
    there, kept = pixel < images * cells, leaving < CO
    image, cell = pixel // cells * image_x, pixel % cells
    top, left = cell // columns_out * POOL, cell % columns_out * POOL
    x += slot * slot_x
    w += slot * slot_w

    acc = tl.zeros((BM, BN), tl.float32)
    if POOL == 2:
        acc1, acc2, acc3 = (
            tl.zeros((BM, BN), tl.float32),
            tl.zeros((BM, BN), tl.float32),
            tl.zeros((BM, BN), tl.float32),
        )
    PARTS: tl.constexpr = (CI + BK - 1) // BK
    STEPS: tl.constexpr = (KH * KW * CI + BK - 1) // BK if FEW else KH * KW * PARTS
    for step in range(STEPS):
        if FEW:
            flat = step * BK + tl.arange(0, BK)
            tap, channel, known = flat // CI, flat % CI, flat < KH * KW * CI
            taps = tap[:, None] * tap_w
        else:
            tap, channel = step // PARTS, step % PARTS * BK + tl.arange(0, BK)
            known = channel < CI
            taps = tap * tap_w
        kh, kw = tap // KW, tap % KW
        b = tl.load(
            w + taps + channel[:, None] * in_w + leaving[None, :] * out_w,
            mask=known[:, None] & kept[None, :],
            other=0.0,
        )
        a = look(
            x, image, top, left, there, kh, kw, channel, known, row_x, column_x, channel_x, height, width,
            STRIDE, PAD, TURNED, FEW,
        ).to(b.dtype)  # fmt: skip
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if POOL == 2:
            a = look(
                x, image, top, left + 1, there, kh, kw, channel, known, row_x, column_x, channel_x, height, width,
                STRIDE, PAD, TURNED, FEW,
            ).to(b.dtype)  # fmt: skip
            acc1 = tl.dot(a, b, acc1, input_precision=PRECISION)
            a = look(
                x, image, top + 1, left, there, kh, kw, channel, known, row_x, column_x, channel_x, height, width,
                STRIDE, PAD, TURNED, FEW,
            ).to(b.dtype)  # fmt: skip
            acc2 = tl.dot(a, b, acc2, input_precision=PRECISION)
            a = look(
                x, image, top + 1, left + 1, there, kh, kw, channel, known, row_x, column_x, channel_x, height, width,
                STRIDE, PAD, TURNED, FEW,
            ).to(b.dtype)  # fmt: skip
            acc3 = tl.dot(a, b, acc3, input_precision=PRECISION)

    factor, term = leaving, leaving
    if SCALED:
        factor = tl.load(scale + slot * CO + leaving, mask=kept, other=0.0)
    if SHIFTED:
        term = tl.load(shift + slot * CO + leaving, mask=kept, other=0.0)
    acc = _aligned(acc, term, SCALED, SHIFTED, factor)
    place = tl.zeros((BM, BN), tl.int32)
    if POOL == 2:
        acc1, acc2, acc3 = (
            _aligned(acc1, term, SCALED, SHIFTED, factor),
            _aligned(acc2, term, SCALED, SHIFTED, factor),
            _aligned(acc3, term, SCALED, SHIFTED, factor),
        )
        place = tl.where(acc1 > acc, 1, place)
        acc = tl.maximum(acc, acc1)
        place = tl.where(acc2 > acc, 2, place)
        acc = tl.maximum(acc, acc2)
        place = tl.where(acc3 > acc, 3, place)
        acc = tl.maximum(acc, acc3)
    if RELU:
        place = tl.where(acc > 0, place, 255)
        acc = tl.maximum(acc, 0.0)
    written = there[:, None] & kept[None, :]
    if SIDE > 0:
        FEW_OUT: tl.constexpr = CO // (SIDE * SIDE)
        down, across = leaving // (SIDE * FEW_OUT), leaving // FEW_OUT % SIDE
        row = (top * SIDE)[:, None] + down[None, :]
        column = (left * SIDE)[:, None] + across[None, :]
        written = written & (row < tall) & (column < wide)
        at = ((slot * images + pixel // cells)[:, None] * FEW_OUT + (leaving % FEW_OUT)[None, :]) * tall * wide
        at += row * wide + column
    else:
        at = (slot * images + pixel // cells)[:, None] * (cells * CO)
        at += (cell * cell_out)[:, None] + (leaving * channel_out)[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=written)
    if CODED:
        tl.store(code + at, place.to(tl.uint8), mask=written)


def convolve(
    x: Tensor, weight: Tensor, how: Geometry, after: Epilogue = Epilogue(), precision: str = "tf32"
) -> tuple[Tensor, Tensor | None]:
    """[S, N, CI, H, W] and [S, CO, CI, kh, kw] -> [S, N, CO, H', W'], and the codes of its values."""
    rows, columns = how.leaving(*x.shape[3:])
    if after.pool:
        rows, columns = rows // 2, columns // 2
    return _run(x, packed(weight), how, (weight.shape[1], rows, columns), after, precision, turned=False)


def to_input(
    gradient: Tensor, weight: Tensor, how: Geometry, sides: tuple[int, int], precision: str = "tf32"
) -> Tensor:
    """The gradient to what went in, [S, N, CI, H, W] with H, W = sides, from that to what came out."""
    weight = packed(weight)
    if weight.shape[2] <= 4 and how.stride == 1:
        return _to_few(gradient, weight, how, sides, precision)
    out, _ = _run(gradient, weight.transpose(1, 2), how, (weight.shape[2], *sides), Epilogue(), precision, turned=True)
    return out


_SIDE = 4
"""of the blocks of pixels in `_to_few`"""


def _to_few(gradient: Tensor, weight: Tensor, how: Geometry, sides: tuple[int, int], precision: str) -> Tensor:
    """The same for an image of few channels, such as the first layer's, which would leave the matrix units idle: the
    channels of a block of 4 x 4 pixels are computed together, by a convolution of stride 4 with a larger kernel."""
    slots, leaving, few, size, _ = weight.shape
    larger = Geometry(size + _SIDE - 1, size + _SIDE - 1, _SIDE, size - 1 - how.padding)
    wide = weight.new_empty(slots, leaving, larger.height, larger.width, _SIDE * _SIDE * few)
    total = wide[0].numel()
    _widen[triton.cdiv(total, 1024), slots](
        weight, wide, *weight.stride(), total, CO=leaving, FEW=few, SIZE=size, SIDE=_SIDE, BLOCK=1024
    )
    blocks = wide.permute(0, 4, 1, 2, 3)
    leaving_blocks = blocks.shape[1], -(-sides[0] // _SIDE), -(-sides[1] // _SIDE)
    return _run(gradient, blocks, larger, leaving_blocks, Epilogue(), precision, turned=False, image=(few, *sides))[0]


@triton.jit
def _widen(
    weight, wide, slot_w, out_w, in_w, row_w, column_w, total,
    CO: tl.constexpr, FEW: tl.constexpr, SIZE: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The kernel of `_to_few`, [from CO, down, across, (pixel of the block, channel)]: that of the convolution turned
    round, at the place of each pixel."""
    slot = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    OUT: tl.constexpr = SIDE * SIDE * FEW
    LARGE: tl.constexpr = SIZE + SIDE - 1
    channel, pixel = at % FEW, at // FEW % (SIDE * SIDE)
    row = SIZE - 1 - (at // (OUT * LARGE) % LARGE - pixel // SIDE)
    column = SIZE - 1 - (at // OUT % LARGE - pixel % SIDE)
    inside = (row >= 0) & (row < SIZE) & (column >= 0) & (column < SIZE) & (at < total)
    where = at // (OUT * LARGE * LARGE) * out_w + channel * in_w + row * row_w + column * column_w
    value = tl.load(weight + slot * slot_w + where, mask=inside, other=0.0)
    tl.store(wide + slot * total + at, value, mask=at < total)


def packed(weight: Tensor) -> Tensor:
    """[S, CO, CI, kh, kw] that lies in memory as [S, CI, kh, kw, CO], as tiles are read; the same values."""
    return weight.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3)


def _run(
    x: Tensor,
    weight: Tensor,
    how: Geometry,
    leaving: tuple[int, int, int],
    after: Epilogue,
    precision: str,
    *,
    turned: bool,
    image: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`weight` as [S, to channels, from channels, kh, kw]. `image`: to channels are those of blocks of its pixels."""
    images = x.shape[1]
    channels, rows, columns = leaving
    entering = weight.shape[2]
    few = entering < FEW
    dtype = weight.dtype
    part, pixels = min(128, max(16, power_of_two(channels))), images * rows * columns
    tap = weight.stride(4)
    assert weight.stride(3) == tap * how.width or how.height == 1, "taps lie one after the other"

    def on(x: Tensor, weight: Tensor, scale: Tensor | None, shift: Tensor | None) -> Callable[[Tiles], list[Tensor]]:
        slots = len(x)
        shape = image or ((channels, rows, columns) if after.flat else (rows, columns, channels))
        out = x.new_empty(slots, images, *shape, dtype=dtype)
        code = torch.empty_like(out, dtype=torch.uint8) if after.coded else out
        cell, channel = (1, rows * columns) if after.flat else (channels, 1)

        def run(tiles: Tiles) -> list[Tensor]:
            _convolution[(triton.cdiv(pixels, tiles.rows), slots, triton.cdiv(channels, part))](
                x, weight, out, code, scale, shift,
                *strides(x), weight.stride(0) if len(weight) > 1 else 0, tap, weight.stride(2), weight.stride(1),
                images, x.shape[3], x.shape[4], rows, columns, cell, channel, *(image or (0, 0, 0))[1:],
                CI=entering, CO=channels, KH=how.height, KW=how.width, STRIDE=how.stride, PAD=how.padding,
                TURNED=turned, SIDE=_SIDE if image else 0, POOL=2 if after.pool else 1,
                SCALED=scale is not None, SHIFTED=shift is not None, RELU=after.relu, CODED=after.coded,
                FEW=few, PRECISION=precision, BM=tiles.rows, BN=part, BK=_depth(entering, dtype, few=few),
                num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
            return [out, code]

        return run

    sizes = ((32, 4, 3), (64, 4, 3), (64, 8, 3)) if after.pool else ((64, 4, 3), (128, 4, 3), (128, 8, 3), (128, 4, 4))
    shape: tuple[Any, ...] = (how, tuple(x.shape[1:]), leaving, turned, image, *after[2:])
    shape += (after.scale is not None, after.shift is not None, str(x.dtype), str(dtype), precision, lies_by_channel(x))
    given = x, weight, after.scale, after.shift
    tiles = quickest_tiles(
        "convolution", shape, [Tiles(*size) for size in sizes], lambda: on(*map(many_slots, given)), x.device
    )
    out, code = on(*given)(tiles)
    if not (after.flat or image):
        out, code = (whole.permute(0, 1, 4, 2, 3) for whole in (out, code))
    return out, code if after.coded else None


_SLOTS = 32
"""to try tiles on"""


def many_slots(x: Any) -> Any:
    """As many slots as a GPU needs to be busy."""
    if x is None or len(x) >= _SLOTS:
        return x
    index = torch.arange(_SLOTS, device=x.device) % len(x)
    lying = sorted(range(1, x.dim()), key=lambda axis: -x.stride(axis))  # an index keeps no order of axes
    back = [lying.index(axis) + 1 for axis in range(1, x.dim())]
    return x.permute(0, *lying)[index].permute(0, *back)


def _depth(entering: int, dtype: torch.dtype, *, few: bool) -> int:
    """Channels in one product. By the shape alone: it decides the order of sums."""
    if few or dtype.itemsize > 2:
        return 32
    return 32 if -(-entering // 32) % 2 else 64


def strides(x: Tensor) -> tuple[int, ...]:
    """Of [S, N, C, H, W], as slot, image, row, column, channel."""
    slot, image, channel, row, column = x.stride()
    return slot if x.shape[0] > 1 else 0, image, row, column, channel


def lies_by_channel(x: Tensor) -> bool:
    return x.stride(2) == 1


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
