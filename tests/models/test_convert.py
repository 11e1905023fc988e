"""Models written with torch's own layers are taken in, and infer as before."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from hardy.core.layers import BatchNorm, Statistics, calling
from hardy.errors import HardyError
from hardy.models import mlp, tiny_cnn
from hardy.models.convert import adopt, restore


class Users(nn.Module):
    """A model as users write them: nested, one norm used twice, in-place ReLU, odd eps."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=0.1), nn.ReLU(inplace=True))
        self.again = self.stem[1]
        self.drop, self.norm = nn.Dropout(0.4), nn.BatchNorm1d(6, affine=False)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, 6), self.norm, self.drop, nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.stem(x)))


def test_adopt_keeps_inference() -> None:
    theirs = Users().double()
    nn.init.uniform_(theirs.again.weight)
    nn.init.uniform_(theirs.again.bias)
    for _ in range(3):
        theirs(torch.rand(16, 3, 8, 8, dtype=torch.float64))  # moves the statistics
    x = torch.rand(5, 3, 8, 8, dtype=torch.float64)
    expected = theirs.eval()(x)
    ours = adopt(
        theirs,
        lambda features: BatchNorm(features, branches={"clean": Statistics, "adversarial": Statistics}),
        shape=(3, 8, 8),
    )
    for branch in ("clean", "adversarial"):
        with calling(branch=branch, statistics="running", key=None):
            torch.testing.assert_close(ours(x), expected, rtol=0, atol=1e-12)
    with calling(branch="clean", statistics="running", key=torch.tensor(1)):
        assert not torch.allclose(ours(x), expected), "dropout never drops"
    assert ours.again is ours.stem[1] and isinstance(ours.again, BatchNorm)
    assert not ours.stem[2].inplace
    assert theirs.stem[2].inplace and isinstance(theirs.again, nn.BatchNorm2d), "the original was changed"


def test_adopt_with_other_norms_and_of_a_bare_layer() -> None:
    adopted = adopt(Users(), lambda features: nn.GroupNorm(1, features), shape=(3, 8, 8))
    assert isinstance(adopted.again, nn.GroupNorm)
    assert isinstance(adopt(nn.BatchNorm1d(3)), BatchNorm)


class NormAndReLU(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: an activation inside the norm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class HalfScale(nn.BatchNorm1d):
    """Other than a batch norm in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if self.training else 1.0)


class Several(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adopt(nn.BatchNorm1d(2, track_running_stats=False)), "track_running_stats"),
        (
            lambda: adopt(nn.Sequential(nn.Conv2d(3, 4, 3), NormAndReLU(4))),
            "NormAndReLU at '1' cannot be adopted: .* lost. Replace it by nn.BatchNorm2d and a layer of its own",
        ),
        (lambda: adopt(Users(), shape=(3, 9, 9)), r"the model cannot run on inputs of shape \(3, 9, 9\)"),
        (lambda: adopt(Users()), r"could not be tried .* adopt\(model, norm, shape=\(3, 32, 32\)\)"),
        (lambda: adopt(nn.Unflatten(1, (3, 3))), "its first layer tells no shape"),
        (lambda: adopt(Several(), shape=(3,)), "answers with tuple; it must be one tensor of logits"),
        (lambda: adopt(nn.Linear(2, 2, device="meta")), "holds no values"),
        (lambda: adopt(nn.Sequential(HalfScale(2)), shape=(2,)), "HalfScale at '0' cannot be adopted"),
    ],
)
def test_what_cannot_be_adopted_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(HardyError, match=message):
        make()


class Looks(nn.Module):
    """A forward that looks at the type of its norm: adopted, it would infer otherwise."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = first, nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.first(x))
        return out.relu() if isinstance(self.norm, nn.BatchNorm2d) else out


def test_an_adopted_model_that_infers_otherwise_is_refused() -> None:
    with pytest.raises(HardyError, match=r"answers differently in evaluation on inputs of shape \(3, 32, 32\)"):
        adopt(Looks(nn.Conv2d(3, 4, 3)))
    odd = nn.Sequential(nn.Unflatten(1, (4, 5)), nn.Conv1d(4, 20, 1), nn.Unflatten(1, (4, 5)), Looks(nn.Identity()))
    with pytest.raises(HardyError, match=r"answers differently in evaluation on inputs of shape \(20,\)"):
        adopt(odd, shape=(20,))
    with pytest.raises(HardyError, match="answers differently in evaluation"):
        adopt(Looks(nn.Conv2d(3, 4, 3)), lambda features: nn.GroupNorm(1, features))


class FrozenNorm(nn.Module):
    """Its norm never leaves evaluation mode, as in fine-tuning: adopted, it would normalise by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_an_adopted_model_that_trains_otherwise_is_refused() -> None:
    with pytest.raises(HardyError, match=r"answers differently in training on inputs of shape \(3,\)"):
        adopt(FrozenNorm())


def test_the_comparison_leaves_no_trace() -> None:
    model = Looks(nn.Conv2d(3, 4, 3)).train()
    before, noise = {k: t.clone() for k, t in model.state_dict().items()}, torch.random.get_rng_state()
    with pytest.raises(HardyError):
        adopt(model)
    assert model.training and torch.equal(torch.random.get_rng_state(), noise)
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())


class NormAct(nn.BatchNorm2d):
    """A batch norm that runs its children after itself, as timm's BatchNormAct2d does."""

    def __init__(self, features: int) -> None:
        super().__init__(features, eps=0.01)
        self.drop, self.act = nn.Dropout(0.3), nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


def test_a_norm_that_runs_its_children_is_taken_apart() -> None:
    theirs = nn.Sequential(nn.Conv2d(3, 4, 3), NormAct(4), nn.Flatten(), nn.Linear(4 * 36, 2))
    theirs(torch.rand(8, 3, 8, 8))
    ours, x = adopt(theirs, shape=(3, 8, 8)), torch.rand(5, 3, 8, 8)
    assert isinstance(ours[1].batch_norm, BatchNorm) and not ours[1].act.inplace
    with calling(branch="clean", statistics="running", key=None):
        torch.testing.assert_close(ours(x), theirs.eval()(x))


def test_a_norm_without_affine_trains_none() -> None:
    assert not list(adopt(nn.BatchNorm1d(3, affine=False)).parameters())


@pytest.mark.parametrize("model", [Users(), nn.Sequential(nn.Conv2d(3, 4, 3), NormAct(4), nn.Flatten())])
def test_restore_gives_back_the_class_and_the_values(model: nn.Module) -> None:
    x = torch.rand(6, 3, 8, 8)
    ours = adopt(
        model,
        lambda features: BatchNorm(
            features, branches={"clean": Statistics, "adversarial": Statistics}, dual_affine=True
        ),
        shape=(3, 8, 8),
    )
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.rand(parameter.shape))
    for branch in ("clean", "adversarial"):
        with calling(branch=branch, statistics="batch", key=None):
            ours(torch.rand(16, 3, 8, 8))  # moves the statistics of the branch
    for branch in ("clean", "adversarial"):
        back = restore(ours, lambda net: net(x), branch=branch)
        with calling(branch=branch, statistics="running", key=None):
            torch.testing.assert_close(back(x), ours(x))
        fresh = deepcopy(model).eval()
        fresh.load_state_dict(back.state_dict())
        assert torch.equal(fresh(x), back(x)) and type(back) is type(model)
        assert [type(m) for m in back.modules()] == [type(m) for m in model.modules()]


def test_restore_of_a_network_of_hardy_is_plain_torch() -> None:
    model, x = tiny_cnn(shape=(1, 8, 8), classes=3), torch.rand(6, 1, 8, 8)
    back = restore(model, lambda net: net(x))
    assert torch.allclose(back(x), model(x), atol=1e-6)
    assert {type(m).__module__.partition(".")[0] for n, m in back.named_modules() if n != "scale"} == {"torch"}
    assert isinstance(back.norm1, nn.BatchNorm2d) and "norm1.running_mean" in back.state_dict()
    assert isinstance(restore(mlp(shape=(1, 8, 8)), lambda net: net(x)).hidden1.norm, nn.BatchNorm1d)
