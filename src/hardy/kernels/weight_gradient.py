"""The gradient to the weights of convolutions of many slots at once, as a Triton kernel: for each place of the window a
product of what went in and the gradient to what came out, summed over pixels in one fixed order."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from hardy.kernels.convolution import FEW, Geometry, lies_by_channel, look, many_slots, power_of_two, strides
from hardy.kernels.tuning import Tiles, quickest_tiles


@triton.jit
def _to_weight(
    x, g, out,
    slot_x, image_x, row_x, column_x, channel_x,
    slot_g, image_g, row_g, column_g, channel_g,
    slots, height, width, rows_out, columns_out, pixels,
    SPAN: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr,
    FEW: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of [taps x input channels, output channels] of one slot, summed over a span of its pixels."""
    leaving = tl.program_id(1) * BN + tl.arange(0, BN)
    slot, split = (tl.program_id(2) % slots).to(tl.int64), tl.program_id(2) // slots
    PARTS: tl.constexpr = (CI + BM - 1) // BM
    if FEW:
        flat = tl.program_id(0) * BM + tl.arange(0, BM)
        tap, channel, known = flat // CI, flat % CI, flat < KH * KW * CI
    else:
        tap, channel = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS * BM + tl.arange(0, BM)
        known = channel < CI
    kh, kw, kept = tap // KW, tap % KW, leaving < CO
    x += slot * slot_x
    g += slot * slot_g
    cells = rows_out * columns_out
    acc = tl.zeros((BM, BN), tl.float32)
    end = tl.minimum((split + 1) * SPAN, pixels)
    for start in range(0, SPAN, BK):
        pixel = split * SPAN + start + tl.arange(0, BK)
        there, image, cell = pixel < end, pixel // cells, pixel % cells
        top, left = cell // columns_out, cell % columns_out
        b = tl.load(
            g + (image * image_g + top * row_g + left * column_g)[:, None] + leaving[None, :] * channel_g,
            mask=there[:, None] & kept[None, :],
            other=0.0,
        )
        a = look(
            x, image * image_x, top, left, there, kh, kw, channel, known, row_x, column_x, channel_x, height, width,
            STRIDE, PAD, False, FEW,
        ).to(b.dtype)  # fmt: skip
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
    out += (split.to(tl.int64) * slots + slot) * KH * KW * CI * CO
    at = leaving[None, :] * (CI * KH * KW) + (channel * (KH * KW) + tap)[:, None]
    tl.store(out + at, acc, mask=known[:, None] & kept[None, :])


def to_weight(x: Tensor, gradient: Tensor, how: Geometry, precision: str = "tf32") -> Tensor:
    """The gradient to the weights, [S, CO, CI, kh, kw], in float32."""
    _, images, entering, height, width = x.shape
    leaving, rows, columns = gradient.shape[2:]
    few, pixels = entering < FEW, images * rows * columns
    span = _span(pixels, few=few)
    splits = -(-pixels // span)
    taps = how.height * how.width
    narrow, part = gradient.dtype.itemsize == 2, min(128, max(16, power_of_two(leaving)))

    def on(x: Tensor, gradient: Tensor) -> Callable[[Tiles], Tensor]:
        slots = len(x)
        out = x.new_empty(splits, slots, leaving, entering, how.height, how.width, dtype=torch.float32)

        def run(tiles: Tiles) -> Tensor:
            one_axis = tiles.rows > most or few
            blocks = triton.cdiv(taps * entering, tiles.rows) if one_axis else taps * triton.cdiv(entering, tiles.rows)
            _to_weight[(blocks, triton.cdiv(leaving, part), slots * splits)](
                x, gradient, out, *strides(x), *strides(gradient),
                slots, height, width, rows, columns, pixels,
                SPAN=span, CI=entering, CO=leaving, KH=how.height, KW=how.width, STRIDE=how.stride, PAD=how.padding,
                FEW=one_axis, PRECISION=precision, BM=tiles.rows, BN=part, BK=64 if narrow and not few else 32,
                num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
            return out

        return run

    most = 128 if few else min(128, max(16, power_of_two(entering)))
    kinds = [
        Tiles(size, warps, stages)
        for size in sorted({most, min(most, 64)})
        for warps, stages in ((4, 3), (4, 4), (8, 3))
    ]
    if most < 128:
        kinds.append(Tiles(128, 8, 3))  # taps and channels as one axis of the product
    shape = (
        how,
        images,
        entering,
        height,
        width,
        leaving,
        str(x.dtype),
        str(gradient.dtype),
        precision,
        lies_by_channel(x),
    )
    out = on(x, gradient)(
        quickest_tiles("to_weight", shape, kinds, lambda: on(many_slots(x), many_slots(gradient)), x.device)
    )
    return out[0] if splits == 1 else out.sum(0)


def _span(pixels: int, *, few: bool) -> int:
    """Pixels that one program sums over: few tiles need many programs. By the shape alone, so that bits do not depend
    on how many slots run together."""
    return min(pixels, 2048 if few else 16384)
