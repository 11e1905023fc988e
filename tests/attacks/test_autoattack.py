"""APGD, FAB and the ensemble: exact where theory gives the answer, and as strong as the authors' code."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F

from hardy.attacks.autoattack import apgd, auto_attack, checkpoints, dlr, fab, to_plane
from hardy.attacks.balls import length, project, steepest
from hardy.attacks.gradient import pgd
from hardy.core import random
from hardy.core.layers import BatchNorm, calling
from hardy.data.sources import load_dataset
from hardy.errors import HardyError
from hardy.models import mlp

KEY = torch.tensor(11)
BALLS = {"linf": 0.1, "l2": 0.5}
ball = pytest.mark.parametrize("ball", BALLS)


def small_net(seed: int, classes: int = 5, norm=nn.Identity) -> nn.Module:
    torch.manual_seed(seed)
    return mlp(hidden=(12,), norm=norm, shape=(1, 4, 4), classes=classes).double()


def images(count: int, net: nn.Module, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images with the net's own answers as labels, so that all stand before the attack."""
    x = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, net(x).argmax(1)


def standing(net, attack, x, y) -> torch.Tensor:
    return net(attack.perturb(net, x, y, KEY)).argmax(1) == y


def test_checkpoints_are_the_papers():
    assert checkpoints(100) == [22, 41, 57, 70, 80, 87, 93, 99]


def test_dlr_ignores_scale_and_shift_and_tells_errors_apart():
    logits = torch.tensor([[4.0, 3.0, 1.0, 0.0], [1.0, 3.0, 0.0, 2.0]])
    y, target = torch.tensor([0, 0]), torch.tensor([1, 3])
    torch.testing.assert_close(dlr(logits, y), torch.tensor([-1 / 3, 2 / 2]))
    torch.testing.assert_close(dlr(logits, y, target), torch.tensor([-1 / 3.5, 1 / 2.5]))
    torch.testing.assert_close(dlr(1e4 * logits + 7, y, target), dlr(logits, y, target))


@ball
def test_to_plane_is_the_nearest_point_of_plane_and_box(ball):
    """Against bisection on the multiplier; half of the planes miss the box."""
    draw = torch.Generator().manual_seed(1)
    x = torch.rand(40, 9, generator=draw, dtype=torch.float64)
    x[:, 0], x[:, 1] = 0.0, 1.0
    normal = torch.randn(40, 9, generator=draw, dtype=torch.float64)
    normal[:, 2] = 0.0
    offset = torch.randn(40, generator=draw, dtype=torch.float64) * torch.linspace(0, 6, 40)
    change = to_plane(x, normal, offset, ball)

    direction = normal.sign() if ball == "linf" else normal
    low, high = torch.zeros(40, 1).double(), torch.full((40, 1), 1e3).double()
    for _ in range(100):
        middle = (low + high) / 2
        tried = (x - offset.sign()[:, None] * middle * direction).clamp(0, 1) - x
        short = offset.abs() + offset.sign() * (normal * tried).sum(1) > 0
        low, high = torch.where(short[:, None], middle, low), torch.where(short[:, None], high, middle)
    torch.testing.assert_close(change, tried, rtol=0, atol=1e-9)
    left = (offset + (normal * change).sum(1)).abs()
    assert 5 < (left < 1e-9).sum() < 35 and ((x + change >= 0) & (x + change <= 1)).all()


@ball
def test_apgd_beats_pgd_of_as_many_steps(ball):
    """On the loss reached, over a net with kinks."""
    net, epsilon = small_net(3), 2 * BALLS[ball]
    x, y = images(60, net)

    def loss(attack):
        return F.cross_entropy(net(attack.perturb(net, x, y, KEY)), y, reduction="none").detach()

    ours = loss(apgd(epsilon=epsilon, ball=ball, steps=40))
    plain = loss(pgd(epsilon=epsilon, ball=ball, step=epsilon / 4, steps=40, keep_best=True))
    assert ours.mean() >= plain.mean() and (ours > plain - 1e-6).double().mean() > 0.8


def algorithm_1(loss, x, start, epsilon, ball, steps):
    """APGD for one image, with plain conditions: the points visited, and when the step was halved."""

    def ascend(z):
        z = z.clone().requires_grad_()
        value = loss(z)
        return value.item(), torch.autograd.grad(value, z)[0]

    visited, halvings, size = [start], [], 2 * epsilon
    before = now = best = start
    current = best_value = best_at_mark = ascend(start)[0]
    mark, rose, halved = 0, 0, False
    for k in range(1, steps + 1):
        z = project(now + size * steepest(ascend(now)[1], ball), x, epsilon, ball)
        share = 0.75 if k > 1 else 1.0
        before, now = now, project(now + share * (z - now) + (1 - share) * (now - before), x, epsilon, ball)
        value = ascend(now)[0]
        visited.append(now)
        rose += value > current
        current = value
        if value > best_value:
            best, best_value = now, value
        if k in checkpoints(steps):
            halved = rose < 0.75 * (k - mark) or (not halved and best_value == best_at_mark)
            if halved:
                size, now, current = size / 2, best, best_value
                halvings.append(k)
            mark, best_at_mark, rose = k, best_value, 0
    return visited, halvings


@ball
def test_apgd_visits_the_points_of_algorithm_1(ball):
    """Images with fates of their own in one batch, on a loss with ridges."""
    net, epsilon, steps, calls = small_net(3), 2 * BALLS[ball], 60, []
    x, y = images(4, net)

    def forward(z):
        return 3 * (4 * net(z)).sin()

    def recorded(z):
        calls.append(torch.tensor(z.tolist(), dtype=torch.float64))
        return forward(z)

    apgd(epsilon=epsilon, ball=ball, steps=steps).perturb(recorded, x, y, KEY)
    starts, fates = calls[1], set()  # the first call is on the clean images
    for i in range(4):
        one = slice(i, i + 1)
        visited, halvings = algorithm_1(
            lambda z, one=one: F.cross_entropy(forward(z), y[one]), x[one], starts[one], epsilon, ball, steps
        )
        torch.testing.assert_close(torch.cat([z[one] for z in calls[1:]]), torch.cat(visited), rtol=0, atol=1e-7)
        fates.add(tuple(halvings))
    assert len(fates) > 1, "all images fared alike: the test says nothing about images being treated one by one"


@ball
def test_a_linear_net_falls_exactly_where_the_boundary_is_in_reach(ball):
    """Classes of unlike slopes, so that the nearest boundary is often not that of the likeliest wrong class."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 5)).double()
    net[1].weight.data *= torch.tensor([0.3, 0.6, 1.0, 2.0, 4.0]).double()[:, None]
    net[1].bias.data -= net[1].weight.data.sum(1) / 2
    weight = net[1].weight.detach()
    x = 0.4 + 0.2 * images(80, net)[0]  # away from the walls
    logits = net(x).detach()
    y = logits.argmax(1)
    gaps = (logits.gather(1, y[:, None]) - logits).scatter(1, y[:, None], torch.inf)
    distances = gaps / (weight[y][:, None] - weight).norm({"linf": 1, "l2": 2}[ball], dim=2).clamp_min(1e-12)
    distance, nearest = distances.min(1)
    assert (nearest != gaps.argmin(1)).sum() > 10
    epsilon = float(distance.median()) * 1.001
    for attack in (fab(steps=30), apgd(loss="dlr", targeted=4)):
        found = replace(attack, epsilon=epsilon, ball=ball).perturb(net, x, y, KEY)
        fell = net(found).argmax(1) != y
        # FAB's last step goes 5 % beyond the tenth of the way that was left
        assert fell[distance * 1.01 < epsilon].all() and not fell[distance > epsilon].any() and fell.sum() > 30
        assert (length(found - x, ball) <= epsilon + 1e-12).all()
        assert isinstance(attack, apgd) or torch.equal(found[~fell], x[~fell])


@ball
@pytest.mark.parametrize("attack", [apgd(), apgd(loss="dlr"), apgd(loss="dlr", targeted=2), fab(), auto_attack()])
def test_vmap_over_clients_equals_the_loop(attack, ball):
    few = {"steps": 6, "queries": 10}
    attack = replace(attack, epsilon=BALLS[ball], ball=ball, **{k: v for k, v in few.items() if hasattr(attack, k)})
    nets = [small_net(seed) for seed in (1, 2)]
    batches = [images(6, net) for net in nets]
    keys = torch.tensor([5, 6])
    params, buffers = stack_module_state(nets)

    def one(params, buffers, x, y, key):
        return attack.perturb(lambda z: functional_call(nets[0], (params, buffers), (z,)), x, y, key)

    together = torch.vmap(one)(params, buffers, *map(torch.stack, zip(*batches, strict=True)), keys)
    for net, found, (x, y), key in zip(nets, together, batches, keys, strict=True):
        torch.testing.assert_close(found, attack.perturb(net, x, y, key), rtol=0, atol=1e-9)


@ball
@pytest.mark.parametrize("attack", [apgd(loss="dlr", targeted=3, steps=6, restarts=2), fab(targets=3, steps=6)])
@pytest.mark.parametrize("statistics", ["running", "images"])
def test_targets_at_once_are_targets_in_turn(attack, ball, statistics, monkeypatch):
    """Each meets the images as if it were alone, also where a norm makes images depend on each other."""
    net = small_net(3, norm=BatchNorm)
    attack = replace(attack, epsilon=BALLS[ball], ball=ball)

    def forward(z):
        with calling(branch="clean", statistics=statistics, key=None):
            return net(z.square())  # not linear, or a step would end on a boundary and rounding decide

    x, y = images(8, forward)
    at_once = attack.perturb(forward, x, y, torch.tensor(5))

    def in_turn(function):
        def each(*targets):
            found = [function(*given) for given in zip(*targets, strict=True)]
            return tuple(torch.stack(values) for values in zip(*found, strict=True))

        return each

    monkeypatch.setattr(torch, "vmap", in_turn)
    torch.testing.assert_close(at_once, attack.perturb(forward, x, y, torch.tensor(5)), rtol=0, atol=1e-9)
    assert (at_once != x).any() and attack.points == 3


def test_auto_attack_keeps_the_first_success():
    """Driven stage by stage over those still standing, as the evaluator does, the same points fall."""
    net = small_net(4)
    x, y = images(40, net)
    attack = auto_attack(epsilon=0.08, steps=10, queries=50)
    found = attack.perturb(net, x, y, KEY)
    left = torch.ones(40, dtype=torch.bool)
    for name, stage in attack.stages():
        candidate = stage.perturb(net, x, y, random.fold(KEY, name))
        fell = left & (net(candidate).argmax(1) != y)
        assert torch.equal(found[fell], candidate[fell])
        left &= ~fell
    assert [name for name, _ in attack.stages()] == ["apgd_ce", "apgd_t", "fab_t", "square"]
    assert torch.equal(net(found).argmax(1) == y, left) and 0 < left.sum() < 40


def test_standard_restarts_steps_and_targets():
    stages = dict(auto_attack().stages())
    assert stages["apgd_ce"] == apgd(steps=100, restarts=1, loss="cross_entropy", targeted=0)
    assert stages["apgd_t"] == apgd(steps=100, restarts=1, loss="dlr", targeted=9)
    assert stages["fab_t"] == fab(steps=100, targets=9)
    assert stages["square"].queries == 5000


@pytest.mark.parametrize("classes", [2, 3])
def test_few_classes_suffice(classes):
    net = small_net(1, classes=classes)
    x, y = images(30, net)
    stages = auto_attack(epsilon=0.2, steps=10, queries=10, targets=9).stages()
    for attack in (*(stage for _, stage in stages[:3]), apgd(epsilon=0.2, loss="dlr", steps=10)):
        assert standing(net, attack, x, y).double().mean() < 0.7


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: apgd(targeted=9), "set loss='dlr'"),
        (lambda: apgd(loss="dlr", targeted=-1), "targeted is -1"),
        (lambda: fab(targets=0), "targets is 0"),
    ],
)
def test_arguments_that_cannot_work_are_refused(make, message):
    with pytest.raises(HardyError, match=message):
        make()


# Against the authors' own attacks: pip install pyautoattack


@pytest.fixture(scope="module")
def digits():
    """600 test images of mini_digits at half size, and a net trained on them against PGD for some seconds."""
    pytest.importorskip("pyautoattack")
    domains = [d for d in load_dataset("mini_digits").domains if d.name in ("pen", "mail", "print")]

    def images(parts):
        pixels = torch.from_numpy(np.concatenate(parts)).permute(0, 3, 1, 2).float() / 255
        return F.avg_pool2d(pixels[:, :1], 2, padding=1)  # 15 x 15: their Square cannot tile 14 x 14

    x, x_test = images([d.x_train for d in domains]), images([d.x_test for d in domains])
    y, y_test = (
        torch.from_numpy(np.concatenate([getattr(d, part) for d in domains])) for part in ("y_train", "y_test")
    )
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )
    optimiser = torch.optim.Adam(net.parameters(), 2e-3)
    for epoch in range(20):
        epsilon = ORACLE["linf"] * min(1.0, epoch / 8)
        for rows in torch.randperm(len(x)).split(60):
            attack = pgd(epsilon=epsilon, step=epsilon / 3 + 1e-6, steps=5)
            near = attack.perturb(net, x[rows], y[rows], random.fold(KEY, epoch))
            optimiser.zero_grad()
            F.cross_entropy(net(near), y[rows]).backward()
            optimiser.step()
    return net.requires_grad_(False), x_test, y_test


ORACLE = {"linf": 0.05, "l2": 0.4}
PAIRS = {
    "apgd-ce": lambda **around: [("", apgd(**around))],
    "apgd-t": lambda **around: [("", apgd(loss="dlr", targeted=9, **around))],
    "fab-t": lambda **around: [("", fab(**around))],
    "standard": lambda **around: auto_attack(**around).stages(),
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PAIRS)
@ball
def test_robust_accuracy_agrees_with_the_authors_attacks(digits, name, ball):
    import pyautoattack

    net, x, y = digits
    epsilon = ORACLE[ball]
    custom = {"version": "standard"} if name == "standard" else {"version": "custom", "attacks": [name]}
    oracle = pyautoattack.AutoAttack(net, eps=epsilon, norm={"linf": "Linf", "l2": "L2"}[ball], seed=0, **custom)
    oracle.apgd.n_restarts = oracle.fab.n_restarts = 1  # as in its standard version
    attacked, *_ = oracle.run_standard_evaluation(x, y, batch_size=len(x))
    other = 100 * (net(attacked).argmax(1) == y).double().mean().item()

    left = net(x).argmax(1) == y
    clean = 100 * left.double().mean().item()
    for _, attack in PAIRS[name](epsilon=epsilon, ball=ball):
        left[left.clone()] = standing(net, attack, x[left], y[left])
    own = 100 * left.double().mean().item()
    assert len(x) >= 500 and 20 < own < clean - 5
    assert abs(own - other) <= 0.5, (own, other)
