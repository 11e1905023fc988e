"""Numbers from keys."""

import pytest
import torch

from hardy.core import random


@pytest.mark.parametrize("p", [0.0, 0.25, 0.9])
def test_a_chance_comes_as_often_as_it_should_and_is_the_same_for_a_stack_of_keys(p):
    keys = torch.arange(4)
    drawn = torch.stack([random.chance(key, (101, 99), p) for key in keys])
    assert torch.equal(torch.vmap(lambda key: random.chance(key, (101, 99), p))(keys), drawn)
    assert drawn.double().mean().item() == pytest.approx(p, abs=4 * (p * (1 - p) / drawn.numel()) ** 0.5)
    assert p == 0 or not torch.equal(drawn[0], drawn[1])
