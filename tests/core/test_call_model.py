"""A model is called on tensors that are passed in, and is left as it was."""

import pytest
import torch
from torch import Tensor, nn

from hardy.core.modes import call_model


class Counting(nn.Module):
    """Two layers that share a weight, and a buffer that each pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.passes = self.passes + 1
        if not len(x):
            raise ValueError("no images")
        return self.second(self.first(x))


def given(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach() + 1 for n, t in (*model.named_parameters(), *model.named_buffers())}


def test_shared_tensors_and_new_values_of_buffers_as_torch_has_them():
    model = Counting()
    ours, theirs, x = given(model), given(model), torch.ones(2, 3)
    assert ours.keys() == {"first.weight", "first.bias", "passes"}
    logits = call_model(model, ours, x, key=None)
    assert torch.equal(logits, torch.func.functional_call(model, theirs, (x,)))
    assert ours["passes"] == theirs["passes"] == 2


def test_a_model_is_as_it_was_after_an_error():
    model = Counting()
    before = dict(model.state_dict(keep_vars=True))
    held = given(model)
    with pytest.raises(ValueError, match="no images"):
        call_model(model, held, torch.ones(0, 3), key=None)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is before[name] for name in before) and model.second.weight is model.first.weight


def test_gradients_reach_what_is_passed_in():
    model = Counting()
    held = {name: t.requires_grad_() if t.is_floating_point() else t for name, t in given(model).items()}
    call_model(model, held, torch.ones(2, 3), key=None).sum().backward()
    assert held["first.weight"].grad is not None and model.first.weight.grad is None
