from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F

from hardy.core.layers import BatchNorm, InputScale, Statistics, calling
from hardy.core.tensors import ImageShape
from hardy.errors import HardyError
from hardy.models import MODELS, digits_cnn, fbn_cnn, mini_inception, mini_resnet, mlp, nin, tiny_cnn
from hardy.models.count import macs, parameters
from hardy.models.stacked import Conv2d

CASES = [*((name, {}) for name in MODELS), ("flra_alexnet", {"lrn": True}), ("nin", {"relu_logits": True})]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """One seed; one thread, because on tensors this small more threads only wait for each other."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_vmap_of_grad_is_the_loop(name: str, options: dict[str, Any]) -> None:
    """One training step of two slots, batch statistics and dropout included."""
    shape = (3, 95, 64) if name == "alexnet" else (3, 17, 12)  # a swap of height and width would show
    model = MODELS[name](norm=BatchNorm, width=0.1, classes=4, shape=shape, **options).double()
    trained = {k: torch.stack([p, 1.01 * p]).detach() for k, p in model.named_parameters()}
    kept = {k: torch.stack([b, b + 0.1]) for k, b in model.named_buffers()}
    x, y = torch.rand(2, 3, *shape, dtype=torch.float64), torch.randint(4, (2, 3))
    keys = torch.tensor([3, 5])

    def loss(trained: dict[str, Tensor], kept: dict[str, Tensor], x: Tensor, y: Tensor, key: Tensor):
        state = {**trained, **kept}
        with calling(branch="clean", statistics="batch", key=key):
            logits = functional_call(model, state, (x,))
        return F.cross_entropy(logits, y), {k: state[k] for k in kept}

    step = grad(loss, has_aux=True)
    together = torch.vmap(step)(trained, kept, x, y, keys)
    for slot in range(2):
        one = ({k: t[slot] for k, t in tensors.items()} for tensors in (trained, kept))
        for many, single in zip(together, step(*one, x[slot], y[slot], keys[slot]), strict=True):
            for k, expected in single.items():
                torch.testing.assert_close(many[k][slot], expected, rtol=0, atol=1e-9)
    gradients, statistics = together
    assert all(g.any() for k, g in gradients.items() if k.endswith("weight")), "a dead layer"
    moved = [k for k, t in statistics.items() if k.endswith("clean.var") and (t != kept[k]).any()]
    assert len(moved) == sum(isinstance(m, Statistics) for m in model.modules()) > 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("norm", [None, nn.Identity, lambda features: nn.GroupNorm(1, features)])
def test_any_norm_on_the_default_image(name: str, norm: Callable[[int], nn.Module] | None) -> None:
    model = MODELS[name](width=0.05, **({} if norm is None else {"norm": norm}))
    stock = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    assert not any(isinstance(m, stock) or getattr(m, "inplace", False) for m in model.modules())
    side = {"alexnet": 256, "digits_cnn": 28, "mlp": 28, "tiny_cnn": 28, "tiny_vit": 28}.get(name, 32)
    assert model(torch.rand(2, 3, side, side)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "shape", "size", "work"),
    [
        ("digits_cnn", (3, 28, 28), 14.2e6, 47.8e6),
        ("alexnet", (3, 256, 256), 57e6, 923e6),
        ("preresnet18", (3, 32, 32), 11.2e6, 555e6),
        ("resnet18", (3, 32, 32), 11.2e6, 555e6),
        ("mini_resnet", (3, 32, 32), 0.46e6, 69e6),
        ("nin", (3, 32, 32), 0.97e6, 223e6),
        ("tiny_vit", (3, 28, 28), 0.107e6, 5.9e6),
        ("mini_convnext", (3, 28, 28), 60_082, 4_586_880),  # by hand, convolution by convolution
    ],
)
def test_published_counts(name: str, shape: ImageShape, size: float, work: float) -> None:
    with torch.device("meta"):
        model = MODELS[name](shape=shape)
    assert parameters(model) == pytest.approx(size, rel=0.02)
    assert macs(model, shape) == pytest.approx(work, rel=0.02)


def test_mini_inception_is_that_of_zhang_et_al() -> None:
    assert parameters(mini_inception(norm=nn.Identity)) == 1_649_402  # their table 1


@pytest.mark.parametrize("name", ["flra_alexnet", "mini_inception", "mini_resnet"])
def test_networks_without_norms_tell_images_apart_before_training(name: str) -> None:
    torch.manual_seed(0)
    logits = MODELS[name](norm=nn.Identity)(torch.rand(16, 3, 32, 32)).detach()
    assert 0.01 < logits.std(0).mean() < 10


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_attention_of_torch_is_counted(weights: bool, trained: bool) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True).requires_grad_(trained)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(2).transpose(1, 2)
            return self.attention(x, x, x, need_weights=weights)[0]

    assert macs(Attends(), (8, 3, 4)) == 4 * 12 * 8 * 8 + 2 * 12 * 12 * 8


def test_macs_by_hand_and_without_a_trace() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(24, 5))
    before = {k: t.clone() for k, t in model.state_dict().items()}
    assert macs(model, (4, 4, 4)) == 2 * 2 * 6 * (2 * 9) + 24 * 5
    assert model.training and not model[0]._forward_hooks
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())


def test_width_rounds_up_and_leaves_both_ends() -> None:
    model = mlp(hidden=(100, 64), width=0.07, shape=(1, 2, 2), classes=3)
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert [tuple(m.weight.shape) for m in linear] == [(7, 4), (5, 7), (3, 5)]
    assert 20_000 < parameters(tiny_cnn(shape=(1, 28, 28))) < 50_000


def test_scale_is_inside_the_model() -> None:
    x = torch.rand(2, 3, 28, 28)
    model, bare = digits_cnn(width=0.05), digits_cnn(width=0.05, scale=None)
    assert not any(isinstance(m, InputScale) for m in bare.modules())
    bare.load_state_dict({k: t for k, t in model.state_dict().items() if not k.startswith("scale")})
    torch.testing.assert_close(model(x), bare((x - 0.5) / 0.5))


def test_options_of_the_papers() -> None:
    x = torch.rand(8, 3, 32, 32)
    assert (nin()(x) < 0).any()
    assert (nin(relu_logits=True)(x) >= 0).all()
    assert nin().conv4.conv.weight.std().item() == pytest.approx(0.05, rel=0.01)
    assert [mini_resnet(as_published=p).fc.in_features for p in (False, True)] == [64, 128]
    assert [type(m) for m in fbn_cnn().children()][:4] == [InputScale, Conv2d, nn.ReLU, BatchNorm]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MODELS["alexnet"](shape=(3, 62, 64)), "62x64 .* 63x63"),
        (lambda: fbn_cnn(shape=(1, 28, 28)), "1 channel"),
        (lambda: tiny_cnn(scale=((0.5,), (0.0,))), "std above 0"),
        (lambda: tiny_cnn(width=0), "width 0"),
    ],
)
def test_errors_name_the_remedy(make: Callable[[], object], message: str) -> None:
    with pytest.raises(HardyError, match=message):
        make()
