"""Networks whose layers run by the kernels answer, and learn, as they do without."""

from functools import partial

import pytest
import torch
from drawing import draw  # first: it skips where there is no Triton
from torch import nn
from torch.nn import functional as F

from hardy.attacks.gradient import pgd
from hardy.core.layers import BatchNorm, Call, CountedStatistics, Dropout, FederatedStatistics, Statistics
from hardy.core.manner import vectorising
from hardy.core.net import Net
from hardy.errors import HardyError
from hardy.kernels import descent, functions
from hardy.models import nin, preresnet18, resnet18, tiny_cnn
from hardy.models.stacked import Conv2d, FusedSequential, Linear, MaxPool2d


def dual(features):
    return BatchNorm(features, branches={"clean": CountedStatistics, "adversarial": Statistics})


def sent(features):
    return BatchNorm(features, branches={"clean": FederatedStatistics, "adversarial": FederatedStatistics})


def usual(norm):
    return FusedSequential(
        Conv2d(3, 4, 3, padding=1),
        norm(4),
        MaxPool2d(2),
        nn.ReLU(),
        nn.Sequential(Conv2d(4, 5, 3), nn.ReLU(), norm(5)),
        Dropout(0.5),
        nn.Identity(),
        MaxPool2d(3, 2, 1),
        nn.Flatten(),
        Linear(5, 6),
        norm(6),
        nn.ReLU(),
        Linear(6, 10),
    )


def known_by_torch_alone(norm):
    """Between layers that the kernels know, others: groups, dilation, sides that differ, other poolings."""
    return FusedSequential(
        Conv2d(3, 4, 3, padding=2, dilation=2),
        norm(4),
        nn.ReLU(),
        Conv2d(4, 6, 1, stride=2),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1, groups=2),
        norm(6),
        nn.AvgPool2d(3, 2, 1),
        MaxPool2d(2, 1, dilation=2, padding=1),
        Conv2d(6, 5, (1, 3), padding=(0, 1)),
        nn.ReLU(),
        Conv2d(5, 5, 3, padding=1, padding_mode="reflect"),
        Conv2d(5, 4, 3, padding="same"),
        norm(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        Linear(4, 10),
    )


NETS = {
    "blocks": lambda: usual(dual),
    "federated": lambda: usual(sent),
    "without norms": lambda: usual(lambda features: nn.Identity()),
    "tiny": lambda: tiny_cnn(norm=dual, width=0.25, shape=(3, 8, 8)),
    "by torch": lambda: known_by_torch_alone(dual),
    "nin": lambda: nin(width=0.02, shape=(3, 7, 7)),
    "residual": lambda: resnet18(norm=dual, width=0.03, shape=(3, 8, 8)),
    "residual, norms first": lambda: preresnet18(norm=dual, width=0.03, shape=(3, 9, 7)),
}
LARGE = [name for name in NETS if name.startswith("residual")]
ONCE = ("without norms", "by torch", "nin")


def step(model, second):
    """Gradients, statistics, attacked images and logits of an adversarial step."""

    def run(trained, buffers, x, y):
        def loss(weights):
            net = Net(model, weights, buffers)
            attacked = pgd(steps=1, step=0.05, epsilon=0.1).perturb(
                partial(net, branch="adversarial"), x, y, torch.tensor(3, device=x.device)
            )
            key = torch.tensor(1, device=x.device)
            a, b = net.together((x, Call("clean", "batch", key)), (attacked, Call("adversarial", second, key)))
            return F.cross_entropy(a, y) + F.cross_entropy(b, y), (net.buffers, attacked, a)

        return torch.func.grad(loss, has_aux=True)(trained)

    return run


@pytest.mark.parametrize("second", ["batch", "running"])
@pytest.mark.parametrize("name", [name for name in NETS if name not in LARGE])
@pytest.mark.parametrize("shared", [False, True])
def test_a_step_is_the_same(name, second, shared):
    if ((shared or second == "running") and name in ONCE) or (shared and name == "federated"):
        return  # nothing else would run
    same(name, second, shared)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_step_of_larger_networks_is_the_same(name):
    same(name, "batch", shared=False)


def same(name, second, shared, slots=2, images=3):
    torch.manual_seed(1)
    model = NETS[name]()
    trained = {
        name: value.detach() + 0.1 * draw(1 if shared else slots, *value.shape, seed=len(name))
        for name, value in model.named_parameters()
    }
    if shared:
        trained = {name: value[0] for name, value in trained.items()}
    buffers = {name: torch.stack([value] * slots) for name, value in model.named_buffers()}
    sides = {"nin": (7, 7), "residual, norms first": (9, 7)}.get(name, (8, 8))
    x, y = torch.rand(slots, images, 3, *sides), torch.arange(slots * images).view(slots, images) % 10
    x, y = x.to(next(iter(trained.values())).device), y.to(next(iter(trained.values())).device)
    found = {}
    for manner in ("many", "fused"):
        with vectorising(manner):
            found[manner] = torch.vmap(step(model, second), (None if shared else 0, 0, 0, 0))(trained, buffers, x, y)
    (fused, (statistics, *seen)), (plain, (wanted, *right)) = found["fused"], found["many"]
    size = max(value.abs().max() for value in plain.values())
    for tensor in plain:
        torch.testing.assert_close(fused[tensor], plain[tensor], rtol=1e-3, atol=float(1e-4 * size))
    torch.testing.assert_close(statistics, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen, right, rtol=1e-4, atol=1e-5)


def test_products_have_second_derivatives():
    x, weight = draw(2, 3, 4, 5, 5), draw(2, 6, 4, 3, 3, seed=1)
    how = functions.Geometry(3, 3, 1, 1)

    def fused(x, w):
        return functions.convolution_layer(x[None], w[None], w.detach()[None], how, "ieee")[0].pow(3).sum()

    def plain(x, w):
        return F.conv2d(x, w, None, 1, 1).pow(3).sum()

    def second(function, x, w):
        return torch.func.grad(lambda x: torch.func.grad(function, 1)(x, w).pow(2).sum())(x)

    found = torch.vmap(partial(second, fused))(x, weight)
    torch.testing.assert_close(found, torch.vmap(partial(second, plain))(x, weight), rtol=1e-3, atol=1e-2)


def test_blocks_refuse_second_derivatives():
    model = usual(dual)
    trained = {name: value.detach() for name, value in model.named_parameters()}

    def slope(x):
        net = Net(model, trained, dict(model.named_buffers()))
        return torch.func.grad(lambda x: net(x).square().sum())(x).square().sum()

    with vectorising("fused"), pytest.raises(HardyError, match="kernels = false"):
        torch.vmap(torch.func.grad(slope))(torch.rand(2, 3, 3, 8, 8))


@pytest.mark.parametrize("opening", [False, True])
def test_one_pass_of_sgd_moves_weights_and_their_rounded_copies(opening):
    weights = {"linear": draw(2, 5, 7), "convolution": draw(2, 4, 3, 3, 3, seed=1), "bias": draw(2, 3, seed=2)}
    gradient = {name: draw(*value.shape, seed=3) for name, value in weights.items()}
    velocity = {name: draw(*value.shape, seed=4) for name, value in weights.items()}
    rounded = descent.round_all(weights, ["linear", "convolution"], torch.bfloat16)
    begin = {name: draw(*weights[name].shape[1:], seed=5) for name in ("linear", "convolution") if opening}
    wanted = {}
    for name, value in weights.items():
        first = begin[name].expand_as(value) if name in begin else value
        slope = gradient[name] + 0.1 * first
        wanted[name] = first - 0.01 * (slope + 0.9 * (0.9 * velocity[name] + slope))
    rate = torch.tensor(0.01, device=weights["bias"].device)
    how = {"decay": 0.1, "velocity": velocity, "momentum": 0.9, "nesterov": True}
    descent.descend_rounded(weights, gradient, rate, rounded, begin=begin, **how)
    torch.testing.assert_close(weights, wanted)
    for name, copy in rounded.items():
        torch.testing.assert_close(copy.float(), weights[name], rtol=2**-7, atol=0.0)


def test_a_watched_layer_is_not_hidden_in_a_block():
    seen = []
    model = usual(dual)
    model[1].register_forward_hook(lambda layer, inputs, out: seen.append(out.shape))
    with vectorising("fused"):
        model(torch.rand(2, 3, 8, 8))
    assert seen == [(2, 4, 8, 8)]


def test_a_watched_convolution_runs_by_its_kernel():
    seen = []
    model = usual(dual)
    model[0].register_forward_hook(lambda layer, inputs, out: seen.append(out.shape))
    with vectorising("fused"):
        model(torch.rand(2, 3, 8, 8))
    assert seen == [(2, 4, 8, 8)]
