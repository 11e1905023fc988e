"""Norm, max pooling and ReLU of groups of images against torch in float64."""

import pytest
import torch
from drawing import draw  # first: it skips where there is no Triton
from torch.nn import functional as F

from hardy.kernels import pooling
from hardy.kernels.pooling import Window

EPS = 1e-5


@pytest.mark.parametrize("window", [Window(), Window(2, 2), Window(3, 2, 1), Window(3, 2, 0, True)])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_a_norm_with_what_follows_and_its_gradients_are_torchs(window, relu, flat):
    """The last group has given statistics, the others their own."""
    groups, channels, sides = 3, 5, (9, 8)
    z, weight, bias = draw(groups, 2, channels, *sides), draw(groups, channels, seed=1), draw(groups, channels, seed=2)
    given = draw(channels, seed=3), draw(channels, seed=4).abs() + 0.5
    double = [t.double().requires_grad_() for t in (z, weight, bias)]
    outs = []
    for group in range(groups):
        kept = [t.double() for t in given] if group == 2 else [None, None]
        one, w, b = (t[group] for t in double)
        out = F.batch_norm(one, *kept, w, b, group < 2, 0.0, EPS)
        if window.size > 1:
            out = F.max_pool2d(out, window.size, window.stride, window.padding, 1, window.ceil)
        outs.append(out.relu() if relu else out)
    wanted = torch.stack(outs)
    slope = draw(*wanted.shape, seed=5)
    gradients = torch.autograd.grad(wanted, double, slope.double())

    mean, var = pooling.moments(z)
    torch.testing.assert_close(var.double(), z.double().var((1, 3, 4), correction=0), rtol=1e-4, atol=1e-5)
    mean[2], var[2] = given
    rsqrt = (var + EPS).rsqrt()
    out, code = pooling.settle(z, weight * rsqrt, bias - mean * weight * rsqrt, window, relu=relu, flat=flat)
    total, product = pooling.sums(z, slope, code, mean, rsqrt, window)
    batch = torch.tensor([1.0, 1.0, 0.0], device=z.device)
    to_z = pooling.spread(slope, code, sides, window, weight * rsqrt, (z, mean, rsqrt, total, product, batch))
    for found, right in zip((out, to_z, product, total), (wanted.detach(), *gradients), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-3, atol=1e-4)


def test_a_large_mean_does_not_swallow_the_variance():
    z = 1000 + draw(1, 4, 2, 6, 6)
    torch.testing.assert_close(
        pooling.moments(z)[1].double(), z.double().var((1, 3, 4), correction=0), rtol=1e-3, atol=0.0
    )


def test_sums_over_several_spans(monkeypatch):
    monkeypatch.setattr(pooling, "_SPAN", 32)
    z = draw(2, 3, 4, 5, 5)
    mean, var = pooling.moments(z)
    torch.testing.assert_close(mean.double(), z.double().mean((1, 3, 4)), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(var.double(), z.double().var((1, 3, 4), correction=0), rtol=1e-4, atol=1e-6)
