"""Models written with torch's own layers are taken in, and infer as before."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hardy.core.layers import BatchNorm, Statistics, calling
from hardy.errors import HardyError
from hardy.models.convert import adopt


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
        theirs, lambda features: BatchNorm(features, branches={"clean": Statistics, "adversarial": Statistics})
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
    assert isinstance(adopt(Users(), lambda features: nn.GroupNorm(1, features)).again, nn.GroupNorm)
    assert isinstance(adopt(nn.BatchNorm1d(3)), BatchNorm)


class NormAndReLU(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: an activation inside the norm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class ScaledDropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adopt(nn.Sequential(nn.Dropout2d())), "Dropout2d at '0'"),
        (lambda: adopt(nn.Sequential(ScaledDropout())), "ScaledDropout at '0' cannot be adopted; only nn.Dropout can"),
        (lambda: adopt(nn.BatchNorm1d(2, track_running_stats=False)), "track_running_stats"),
        (
            lambda: adopt(nn.Sequential(nn.Conv2d(3, 4, 3), NormAndReLU(4))),
            "NormAndReLU at '1' cannot be adopted: .* lost. Replace it by nn.BatchNorm2d and a layer of its own",
        ),
        (lambda: adopt(Users(), shape=(3, 9, 9)), r"the model cannot run on inputs of shape \(3, 9, 9\)"),
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
    with pytest.raises(HardyError, match=r"infers differently on inputs of shape \(3, 32, 32\)"):
        adopt(Looks(nn.Conv2d(3, 4, 3)))
    odd = nn.Sequential(nn.Unflatten(1, (4, 5)), nn.Conv1d(4, 20, 1), nn.Unflatten(1, (4, 5)), Looks(nn.Identity()))
    with pytest.raises(HardyError, match=r"infers differently on inputs of shape \(20,\)"):
        adopt(odd, shape=(20,))
    adopt(Looks(nn.Conv2d(3, 4, 3)), lambda features: nn.GroupNorm(1, features))  # another norm is another network


def test_the_comparison_leaves_no_trace() -> None:
    model = Looks(nn.Conv2d(3, 4, 3)).train()
    before, noise = {k: t.clone() for k, t in model.state_dict().items()}, torch.random.get_rng_state()
    with pytest.raises(HardyError):
        adopt(model)
    assert model.training and torch.equal(torch.random.get_rng_state(), noise)
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())


def test_models_of_an_unknown_input_are_adopted_unseen() -> None:
    assert isinstance(adopt(nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (3, 3)), nn.BatchNorm1d(3)))[2], BatchNorm)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert isinstance(adopt(empty)[1], BatchNorm)
