"""The convolution that vectorises, and layers that obey the call."""

import pytest
import torch
from torch.nn import functional as F

from hardy.models.layers import BatchNorm, _convolve, calling


@pytest.mark.parametrize(("size", "padding"), [(3, 1), (5, 2), (5, 0), (1, 0)])
def test_the_turned_convolution_has_the_usual_gradients(size, padding):
    """Of x alone (attacks), of the weights alone (training), of both, and under vmap over slots."""
    x = torch.randn(3, 4, 2, 9, 9, dtype=torch.float64)
    weight = torch.randn(3, 5, 2, size, size, dtype=torch.float64)

    def usual(x, weight):
        return F.conv2d(x, weight, None, 1, padding).pow(3).sum()

    def turned(x, weight):
        return _convolve(x, weight, padding).pow(3).sum()

    for wanted in ((0,), (1,), (0, 1)):
        first, second = (torch.vmap(torch.func.grad(f, wanted))(x, weight) for f in (usual, turned))
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b)


def test_statistics_move_only_when_the_call_says_so():
    layer = BatchNorm(3, branches=("clean", "adversarial"))
    x = 5 + torch.randn(8, 3, 4, 4)
    layer(x)
    assert torch.equal(layer.clean.mean, torch.zeros(3))
    with calling(branch="adversarial", statistics="batch", key=None):
        layer(x)
    assert torch.equal(layer.clean.mean, torch.zeros(3)) and (layer.adversarial.mean > 0.3).all()
