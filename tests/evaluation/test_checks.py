"""An honest net raises no flag; every planted fault raises its own."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import fit
from hardy import papers
from hardy.core.engine import Branches
from hardy.core.layers import calling
from hardy.data.sources import load_dataset
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.evaluation import checks
from hardy.evaluation.checks import ADVICE, check
from hardy.evaluation.client_checks import check_clients
from hardy.evaluation.measure import ServedClients
from hardy.models import tiny_cnn
from hardy.papers.fedbn import local
from hardy.parts.norms import batch

KEY = torch.tensor(3)


@pytest.fixture(scope="module")
def digits():
    """Training and test images of two domains at half size, with their labels."""
    domains = load_dataset("mini_digits").domains[:2]

    def images(parts):
        return F.avg_pool2d(torch.from_numpy(np.concatenate(parts)).permute(0, 3, 1, 2).float() / 255, 2)

    def labels(parts):
        return torch.from_numpy(np.concatenate(parts))

    x_train, y_train = images([d.x_train for d in domains]), labels([d.y_train for d in domains])
    return x_train, y_train, images([d.x_test for d in domains]), labels([d.y_test for d in domains])


@pytest.fixture(scope="module")
def honest(digits):
    x, y, *_ = digits
    torch.manual_seed(0)
    model = tiny_cnn(shape=(3, 14, 14), width=0.25)
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for rows in torch.stack([torch.randperm(len(x)) for _ in range(4)]).view(-1, 50):
        with calling(branch="clean", statistics="batch", key=None):
            loss = F.cross_entropy(model(x[rows]), y[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.requires_grad_(False)


def flags(forward, digits, **options):
    _, _, x, y = digits
    return {flag.name: flag for flag in check(forward, x, y, KEY, **{"points": 64} | options)}


@pytest.mark.parametrize(("ball", "epsilon"), [("linf", 8 / 255), ("l2", 0.5)])
def test_an_honest_net_raises_no_flag(honest, digits, ball, epsilon):
    _, _, x, y = digits
    assert (honest(x).argmax(1) == y).double().mean() > 0.8
    assert flags(honest, digits, ball=ball, epsilon=epsilon) == {}


def reversed_slope(x):
    """x, with a slope of minus one."""
    return 2 * x.detach() - x


def quantised(x):
    return (x * 15).round() / 15


def test_each_planted_fault_raises_its_flag(honest, digits):
    in_training = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(576, 10)).train()
    planted = {
        "random_output": lambda x: honest(x) + 0.1 * torch.randn(len(x), 10),
        "probabilities": lambda x: honest(x).softmax(1),
        "batch_dependent": in_training,
    }
    for name, forward in planted.items():
        found = flags(forward, digits)
        assert name in found and not (planted.keys() - {name}) & found.keys()
        assert any(c.isdigit() for c in found[name].message) and found[name].advice == ADVICE[name]


@pytest.mark.parametrize(
    ("masked", "expected"),
    [
        (lambda net, x: 1e6 * net(x), {"zero_gradients", "black_box_beats_white_box", "survives_huge_epsilon"}),
        (lambda net, x: net(quantised(x)), {"zero_gradients", "black_box_beats_white_box", "survives_huge_epsilon"}),
        (lambda net, x: net(reversed_slope(x)), {"black_box_beats_white_box", "survives_huge_epsilon"}),
    ],
    ids=["scaled", "quantised", "reversed"],
)
def test_masked_gradients_are_seen(honest, digits, masked, expected):
    found = flags(lambda x: masked(honest, x), digits, epsilon=12 / 255)
    assert found.keys() == expected, found


def test_a_net_that_mends_what_strays_far_is_not_monotone():
    """A linear net in front of which an image too far from all it remembers is replaced by the nearest of them."""
    torch.manual_seed(0)
    epsilon, x = 0.06, 0.3 + 0.4 * torch.rand(64, 36)
    weight = torch.randn(36, 4)
    y = ((x - 0.5) @ weight).argmax(1)

    def found(distance, limit):
        def forward(images):
            z = images.flatten(1)
            least, nearest = distance(z[:, None] - x).min(1)
            return (torch.where((least > limit)[:, None], x[nearest], z) - 0.5) @ weight

        return {flag.name for flag in check(forward, x.view(-1, 1, 6, 6), y, KEY, epsilon=epsilon)}

    # one step from a random start moves pixels by 0.75 epsilon on average, many steps by more
    assert "not_monotone_in_steps" in found(lambda change: change.abs().mean(-1), 0.85 * epsilon)
    by_radius = found(lambda change: change.abs().amax(-1), 1.5 * epsilon)
    assert {"not_monotone_in_epsilon", "survives_huge_epsilon"} == by_radius


def test_nothing_to_check_is_refused():
    with pytest.raises(HardyError, match="epsilon=0"):
        check(lambda x: x, torch.zeros(1, 1, 2, 2), torch.zeros(1).long(), KEY, epsilon=0)
    with pytest.raises(HardyError, match="0 images"):
        check(lambda x: x, torch.zeros(0, 1, 2, 2), torch.zeros(0).long(), KEY)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("norm", [local(), batch(inference_statistics="batch")], ids=["local", "by the batch"])
def test_clients_checked_side_by_side_raise_what_each_raises_alone(engine, norm, monkeypatch):
    monkeypatch.setattr(checks, "_QUERIES", 5)
    monkeypatch.setattr(checks, "_STEPS", (1, 2, 3))
    run = fit(papers.fedbn(norm=norm), engine=EngineChoice(name=engine, device="cpu", precision="float64"), rounds=1)
    served = ServedClients(run.engine, run.state, "test", Branches(), None)
    served.rows[1] = served.rows[1][:3]  # of another size: it goes alone
    clients = range(len(served.rows))
    alone = {}
    for client in clients:
        rows = torch.from_numpy(served.rows[client])
        x, y = run.engine.device_data.images("test", rows), run.engine.device_data.y["test"][rows]
        alone[client] = check(served.predicting(served.served.network(client)), x, y, KEY)
    assert check_clients(served, clients, KEY) == alone
    assert any(alone.values())
