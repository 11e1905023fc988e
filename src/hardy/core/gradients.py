"""Gradients of one slot's step, or of many at once under vmap."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.func import grad_and_value

from hardy.core import tensors
from hardy.core.tensors import Tensors


def gradients(
    function: Callable[..., tuple[Tensor, tuple[Tensor, Tensors]]], given: tuple[Tensors, ...], wanted: Collection[int]
) -> tuple[list[Tensors], Tensor, Tensors]:
    """The gradients of function(*given) = (value, (figure, tensors)) to its arguments `wanted`, figure and tensors.

    Outside of vmap autograd is asked directly: torch.func wraps every tensor, which takes a fifth of a small step.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        found, (_, (figure, moved)) = grad_and_value(function, tuple(wanted), has_aux=True)(*given)
        return list(found), figure, moved
    leaves = [tensors.apply(_leaf, values) if at in wanted else values for at, values in enumerate(given)]
    with torch.enable_grad():
        value, (figure, moved) = function(*leaves)
    asked = [leaf for at in wanted for leaf in leaves[at].values()]
    slopes = iter(torch.autograd.grad(value, asked, materialize_grads=True))
    by_argument = [dict(zip(leaves[at], slopes, strict=False)) for at in wanted]
    return by_argument, figure.detach(), tensors.apply(Tensor.detach, moved)


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_()
