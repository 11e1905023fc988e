"""Layers that obey the call, and pooling of many slots at once."""

from functools import partial

import pytest
import torch
from torch import nn

from hardy.core.layers import BatchNorm, Call, Dropout, Statistics, calling
from hardy.core.manner import vectorising
from hardy.core.net import Net
from hardy.errors import HardyError
from hardy.models.stacked import MaxPool2d


def test_statistics_move_only_when_the_call_says_so():
    layer = BatchNorm(3, branches={"clean": Statistics, "adversarial": Statistics})
    x = 5 + torch.randn(8, 3, 4, 4)
    layer(x)
    assert torch.equal(layer.clean.mean, torch.zeros(3))
    with calling(branch="adversarial", statistics="batch", key=None):
        layer(x)
    assert torch.equal(layer.clean.mean, torch.zeros(3)) and (layer.adversarial.mean > 0.3).all()


@pytest.mark.parametrize(
    ("size", "stride", "padding", "ceil"), [(2, 2, 0, False), (3, 1, 1, False), (3, 2, 1, False), (3, 2, 0, True)]
)
@pytest.mark.parametrize("slots_first", [True, False])
def test_stacked_pooling_is_pooling_of_each(size, stride, padding, ceil, slots_first):
    stacked, plain = (kind(size, stride, padding, ceil_mode=ceil) for kind in (MaxPool2d, nn.MaxPool2d))
    x = torch.randn(3, 4, 5, 8, 8, dtype=torch.float64)
    if not slots_first:  # as a grouped convolution leaves it
        x = x.movedim(0, 1).contiguous().movedim(1, 0)

    def first(pool, x):
        return torch.func.grad(lambda x: (pool(x) ** 3).sum())(x)

    def second(pool, x):
        return torch.func.grad(lambda x: (first(pool, x) ** 2).sum())(x)

    for function in (lambda pool, x: pool(x), first, second):
        with vectorising():
            found = torch.vmap(partial(function, stacked))(x)
        assert torch.equal(found, torch.stack([function(plain, row) for row in x]))


@pytest.mark.parametrize("second", ["clean", "adversarial"])
@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_passes_together_are_passes_one_after_the_other(second, statistics):
    """Logits, and statistics that the second pass moves on from where the first left them."""
    norm = BatchNorm(4, branches={"clean": Statistics, "adversarial": partial(Statistics, noise=0.1)})
    model = nn.Sequential(nn.Conv2d(1, 4, 3), norm, Dropout(0.5), nn.Flatten(), nn.Linear(64, 3)).double()
    trained = {name: value.detach() for name, value in model.named_parameters()}
    x, other = (torch.rand(5, 1, 6, 6, dtype=torch.float64) for _ in range(2))
    calls = Call("clean", "batch", torch.tensor(1)), Call(second, statistics, torch.tensor(2))

    one = Net(model, trained, {n: b.clone() for n, b in model.named_buffers()})
    apart = [
        one(images, branch=call.branch, statistics=call.statistics, key=call.key)
        for images, call in zip((x, other), calls, strict=True)
    ]
    two = Net(model, trained, {n: b.clone() for n, b in model.named_buffers()})
    together = two.together((x, calls[0]), (other, calls[1]))
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(two.buffers, one.buffers)
    assert not torch.equal(one.buffers["1.clean.mean"], torch.zeros(4).double())


def test_images_are_normalised_by_each_other_and_nothing_moves():
    x, norm = torch.randn(6, 4, 3, 3, dtype=torch.float64), BatchNorm(4).double()
    with calling(branch="clean", statistics="images", key=None):
        found = norm(x)
        apart = torch.vmap(norm)(x.view(2, 3, 4, 3, 3))
        assert norm.clean.mean.eq(0).all() and norm.clean.var.eq(1).all()
    with calling(branch="clean", statistics="batch", key=None):
        torch.testing.assert_close(found, norm(x))
        torch.testing.assert_close(apart[1], norm(x[3:]))
    with calling(branch="clean", statistics="images", key=None), pytest.raises(HardyError, match="needs 2"):
        norm(x[:1, :, :1, :1])


def test_a_norm_of_one_channel_is_that_of_the_others():
    x = torch.rand(6, 2, 3, 3, dtype=torch.float64)
    found = []
    for channels in (slice(0, 2), slice(0, 1)):
        norm = BatchNorm(x[:, channels].shape[1]).double()
        with calling(branch="clean", statistics="batch", key=None):
            found.append((norm(x[:, channels])[:, :1], norm.clean.mean[:1], norm.clean.var[:1]))
    torch.testing.assert_close(*found)


def test_mixed_precision_rounds_weights_once_and_again_when_they_are_replaced():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), BatchNorm(4), nn.Flatten(), nn.Linear(64, 3))
    trained = {name: value.detach() for name, value in model.named_parameters()}
    kept, x = dict(model.named_buffers()), torch.rand(5, 1, 6, 6)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        net = Net(model, trained, kept)
        for weights in (trained, {name: 2 * value for name, value in trained.items()}):
            net.trained = weights
            usual = torch.func.functional_call(model, {**weights, **kept}, (x,))
            assert torch.equal(net(x), usual.float()) and net.trained is weights

        def loss(trained, x):
            return Net(model, trained, kept)(x).pow(2).sum()

        of_weights, of_x = torch.func.grad(loss, (0, 1))(trained, x)
    assert {value.dtype for value in of_weights.values()} == {torch.float32} and of_x.abs().sum() > 0
