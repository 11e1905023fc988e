"""Convolutions of many slots against torch in float64."""

import pytest
import torch
from drawing import draw  # first: it skips where there is no Triton
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from hardy.kernels import convolution, weight_gradient
from hardy.kernels.convolution import Epilogue, Geometry


def each(x, weight, how):
    return torch.stack(
        [F.conv2d(a, b, None, how.stride, how.padding) for a, b in zip(x.double(), weight.double(), strict=True)]
    )


def close(found, wanted, limit=1e-5):
    assert found.shape == wanted.shape
    assert (found.double() - wanted).norm() <= limit * wanted.norm() + 1e-12


def agree(slots, images, entering, leaving, sides, how, limit=1e-5, dtype=torch.float32):
    x, weight = draw(slots, images, entering, *sides), draw(slots, leaving, entering, how.height, how.width, seed=1)
    x, weight = x.to(dtype), weight.to(dtype)
    double, turned = x.double().requires_grad_(), weight.double().requires_grad_()
    wanted = each(double, turned, how)
    slope = draw(*wanted.shape, seed=2).to(dtype)
    to_x, to_weight = torch.autograd.grad(wanted, (double, turned), slope.double())
    close(convolution.convolve(x, weight, how, precision="ieee")[0], wanted.detach(), limit)
    close(convolution.to_input(slope, weight, how, sides, "ieee"), to_x, limit)
    close(weight_gradient.to_weight(x, slope, how, "ieee"), to_weight, limit)


@pytest.mark.parametrize(
    ("slots", "images", "entering", "leaving", "sides", "how"),
    [
        (2, 2, 3, 4, (6, 5), Geometry(5, 5, 1, 2)),  # an image's channels
        (2, 2, 20, 6, (4, 5), Geometry(3, 3, 1, 1)),  # channels that are no power of two
        (2, 2, 20, 6, (5, 4), Geometry(3, 3, 2, 1)),  # stride 2
        (1, 2, 17, 5, (7, 7), Geometry(1, 1, 2, 0)),  # a projection
        (2, 2, 2, 5, (8, 8), Geometry(3, 3, 1, 0)),  # no padding
        (1, 2, 6, 5, (5, 7), Geometry(1, 1, 1, 0)),  # a network in a network
        (1, 2, 3, 5, (7, 5), Geometry(3, 3, 2, 0)),  # an image's channels, strides and no padding
        (1, 2, 3, 4, (8, 8), Geometry(2, 2, 2, 0)),  # patches
        (1, 1, 2, 3, (15, 13), Geometry(11, 11, 4, 2)),  # AlexNet's first
        (1, 1, 70, 5, (3, 3), Geometry(3, 3, 1, 1)),  # more channels than one product takes
    ],
)
def test_convolutions_and_their_gradients_are_torchs(slots, images, entering, leaving, sides, how):
    agree(slots, images, entering, leaving, sides, how)


ANY = {
    "numbers": st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 18), st.integers(1, 9)),
    "sides": st.tuples(st.integers(3, 7), st.integers(3, 7)),
    "window": st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2)),
}
"""also 1 x 1, odd sides, strides without padding, steps longer than the window"""


def any_shape(numbers, sides, window):
    size, stride, padding = window
    agree(*numbers, sides, Geometry(size, size, stride, min(padding, size - 1)))


@settings(max_examples=6, deadline=None)
@given(**ANY)
def test_any_shape(numbers, sides, window):
    any_shape(numbers, sides, window)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(**ANY)
def test_any_of_many_shapes(numbers, sides, window):
    any_shape(numbers, sides, window)


def test_half_precision_is_rounded_once():
    """Sums are in float32. The interpreter has no bfloat16."""
    half = torch.bfloat16 if torch.cuda.is_available() else torch.float16
    agree(1, 2, 16, 8, (5, 5), Geometry(3, 3, 1, 1), limit=1e-2, dtype=half)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_the_epilogue_is_norm_pooling_and_relu(pool, relu, flat):
    how = Geometry(3, 3, 1, 1)
    x, weight = draw(2, 2, 3, 7, 6), draw(2, 5, 3, 3, 3, seed=1)
    scale, shift = draw(2, 5, seed=2), draw(2, 5, seed=3)  # scales of both signs: a line comes before a maximum
    out, code = convolution.convolve(x, weight, how, Epilogue(scale, shift, pool, relu, True, flat), "ieee")
    wanted = each(x, weight, how) * scale[:, None, :, None, None] + shift[:, None, :, None, None]
    if pool:
        wanted = F.max_pool2d(wanted.flatten(0, 1), 2).unflatten(0, (2, 2))
    close(out, wanted.relu() if relu else wanted)
    assert code is not None and out.is_contiguous() is flat
    assert torch.equal(code == convolution.DEAD, (out == 0) & relu)


def test_slots_that_share_weights_need_no_copies():
    x, weight, how = draw(3, 2, 4, 5, 5), draw(1, 6, 4, 3, 3, seed=1), Geometry(3, 3, 1, 1)
    found = convolution.convolve(x, weight.expand(3, -1, -1, -1, -1), how, precision="ieee")[0]
    close(found, each(x, weight.expand(3, -1, -1, -1, -1), how))
