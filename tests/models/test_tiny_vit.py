"""A transformer among the models: any norm on its tokens, many slots at once, attention that is counted."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state
from torch.nn import functional as F

from conftest import SHAPE, assert_close, fit
from hardy import papers
from hardy.core.layers import BatchNorm
from hardy.core.partition import Role, tags
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.models import tiny_vit
from hardy.models.count import macs


class OverLast(nn.LayerNorm):
    """A norm of a user's own, on tokens [N, T, C]."""

    seen: torch.Size

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.shape
        return super().forward(x)


NORMS = [nn.LayerNorm, OverLast, BatchNorm, nn.Identity, lambda features: nn.GroupNorm(4, features)]


def small(norm: Callable[[int], nn.Module] = nn.LayerNorm) -> nn.Module:
    torch.manual_seed(0)
    return tiny_vit(norm=norm, shape=SHAPE, classes=3, width=0.25, blocks=2).double()


@pytest.mark.parametrize("norm", NORMS)
def test_one_vmap_is_a_loop_over_networks_and_second_derivatives_exist(norm):
    nets = [small(norm), small(norm)]
    with torch.no_grad():
        for parameter in nets[1].parameters():
            parameter.mul_(1.1)
    trained, kept = stack_module_state(nets)
    trained = {name: value.detach() for name, value in trained.items()}
    x, y = torch.rand(2, 5, *SHAPE, dtype=torch.float64), torch.randint(3, (2, 5))

    def loss(trained, kept, x, y):
        return F.cross_entropy(functional_call(nets[0], {**trained, **kept}, (x,)), y)

    def steepness(trained, kept, x, y):
        return sum(g.square().sum() for g in grad(loss)(trained, kept, x, y).values())

    for function in (grad(loss), grad(steepness)):
        together = torch.vmap(function)(trained, kept, x, y)
        for slot in range(2):
            one = ({n: t[slot] for n, t in part.items()} for part in (trained, kept))
            alone = function(*one, x[slot], y[slot])
            for name, value in alone.items():
                torch.testing.assert_close(together[name][slot], value, rtol=0, atol=1e-12)
                assert value.isfinite().all() and (value.any() or "bias" in name), name


def test_a_norm_of_features_is_given_tokens():
    model = small(OverLast)
    model(torch.rand(5, *SHAPE, dtype=torch.float64))
    assert {module.seen for module in model.modules() if isinstance(module, OverLast)} == {(5, 4, 16)}
    roles = {name: tag.role for name, tag in tags(model).items()}
    assert roles["block1.norm1.norm.weight"] is Role.NORM_AFFINE and roles["patches.position"] is Role.WEIGHT


def test_tokens_are_told_apart_by_place_and_by_what_they_see():
    model = small()
    x = torch.rand(1, *SHAPE, dtype=torch.float64)
    moved = torch.cat([x[..., 4:], x[..., :4]], -1)  # the same patches elsewhere
    assert not torch.allclose(model(x), model(moved))
    nn.init.zeros_(model.patches.position)
    torch.testing.assert_close(model(x), model(moved))


def test_attention_is_that_of_torch():
    attention, x = small().block1.attention, torch.rand(3, 7, 16, dtype=torch.float64)
    query, key, value = (
        layer(x).unflatten(2, (4, 4)).transpose(1, 2) for layer in (attention.query, attention.key, attention.value)
    )
    expected = attention.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected, rtol=0, atol=1e-12)


def test_attention_is_counted():
    model = tiny_vit(shape=(1, 8, 8), patch=4, blocks=1, heads=2, classes=3, width=0.5)
    tokens, features = 4, 16
    products = 4 * tokens * features**2 + 2 * tokens * features * 2 * features
    assert macs(model, (1, 8, 8)) == tokens * 16 * features + products + 2 * tokens**2 * features + features * 3


def test_engines_agree():
    runs = [
        fit(
            papers.fedavg(),
            model=lambda norm: tiny_vit(norm=norm, shape=SHAPE, classes=3, width=0.25, blocks=1),
            rounds=2,
            engine=EngineChoice(name=name, device="cpu", precision="float64"),
        )
        for name in ("sequential", "vectorised")
    ]
    assert_close(runs[0].state.shared, runs[1].state.shared, 1e-9)


def test_mistakes_are_refused():
    with pytest.raises(HardyError, match=r"heads of tiny_vit is 0; it must be 1 or more"):
        tiny_vit(heads=0)
    with pytest.raises(HardyError, match=r"image of 3x28 is too small: this network needs 4x4"):
        tiny_vit(shape=(1, 3, 28))
