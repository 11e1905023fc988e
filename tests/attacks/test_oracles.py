"""Agreement with independent code on the same trained net. Needs foolbox: pip install 'hardy-fl[oracle]'."""

import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hardy.attacks.gradient import fgsm, pgd
from hardy.core.layers import calling
from hardy.data.sources import load_dataset
from hardy.models import tiny_cnn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it imports from a namespace that scipy is giving up
    foolbox = pytest.importorskip("foolbox")

KEY = torch.tensor(3)
BUDGETS = {"linf": (4 / 255, 1 / 255), "l2": (0.5, 0.125)}


def pixels(images: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(images)).permute(0, 3, 1, 2).contiguous().float() / 255


@pytest.fixture(scope="module")
def digits():
    domains = load_dataset("mini_digits").domains
    y_train, y = (
        torch.from_numpy(np.concatenate(labels))
        for labels in zip(*((d.y_train, d.y_test) for d in domains), strict=True)
    )
    return pixels([d.x_train for d in domains]), y_train, pixels([d.x_test for d in domains]), y


@pytest.fixture(scope="module")
def model(digits):
    """Trained for seconds; the budgets leave its robust accuracy in mid-range."""
    x, y, _, _ = digits
    torch.manual_seed(0)
    model = tiny_cnn(width=0.5)
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for order in torch.stack([torch.randperm(len(x)) for _ in range(5)]).view(-1, 50):
        with calling(branch="clean", statistics="batch", key=None):
            loss = F.cross_entropy(model(x[order]), y[order])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


def theirs(attack, model, x, y, epsilon):
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    return attack.run(wrapped, x, foolbox.criteria.Misclassification(y), epsilon=epsilon)


def accuracy(model, x, y) -> float:
    with torch.no_grad():
        return 100 * (model(x).argmax(1) == y).double().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize(("ball", "attack"), [("linf", "LinfPGD"), ("l2", "L2PGD")])
def test_pgd_agrees_with_foolbox(model, digits, ball, attack):
    _, _, x, y = digits
    epsilon, step = BUDGETS[ball]
    foreign = getattr(foolbox.attacks, attack)(abs_stepsize=step, steps=10, random_start=True)
    torch.manual_seed(1)
    other = accuracy(model, theirs(foreign, model, x, y, epsilon), y)
    own = accuracy(model, pgd(epsilon=epsilon, step=step, steps=10, ball=ball).perturb(model, x, y, KEY), y)
    assert len(x) == 1000 and 20 < own < accuracy(model, x, y) - 20
    assert abs(own - other) <= 0.5, (own, other)


@pytest.mark.parametrize("ball", ["linf", "l2"])
def test_without_a_random_start_every_pixel_agrees(model, digits, ball):
    """In float64, where the sign of a gradient is not a matter of rounding."""
    x, y = digits[2][::20].double(), digits[3][::20]
    exact = tiny_cnn(width=0.5).double().eval()
    exact.load_state_dict(model.state_dict())
    epsilon, step = BUDGETS[ball]
    kinds, prefix = foolbox.attacks, {"linf": "Linf", "l2": "L2"}[ball]
    iterated = {"epsilon": epsilon, "step": step, "steps": 10, "ball": ball, "start": "none"}
    options = {"abs_stepsize": step, "steps": 10, "random_start": False}
    pairs = [
        (fgsm(epsilon=epsilon, ball=ball), getattr(kinds, f"{prefix}FastGradientAttack")(random_start=False)),
        (pgd(**iterated), getattr(kinds, f"{prefix}ProjectedGradientDescentAttack")(**options)),
    ]
    for own, other in pairs:
        found = own.perturb(exact, x, y, KEY)
        torch.testing.assert_close(found, theirs(other, exact, x, y, epsilon), rtol=0, atol=1e-9)
