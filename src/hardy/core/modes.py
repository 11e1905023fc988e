"""Training mode, and random numbers that a model draws by itself: arguments of the call too.

Hardy's layers are told by the call how to behave. A layer or a functional call of a user's own looks at `self.training`
and draws from torch's generator, as in `F.dropout(x, 0.5, self.training)`. Such a model is in training mode where the
call has a key, and its generator starts from that key: evaluations repeat, and a resumed run draws the same numbers.
"""

import random as python_random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from hardy.core.layers import Statistics, calling
from hardy.core.tensors import ImageShape, Tensors
from hardy.errors import HardyError


def call_model(model: nn.Module, tensors: Tensors, images: Tensor, *, key: Tensor | None) -> Tensor:
    """The logits of a model with these tensors; in training mode if there is a key. A layer that replaces one finds its
    new value in `tensors`. As `torch.func.functional_call`, which takes a twentieth of a small step to find its way."""
    set_mode(model, training=key is not None)
    places = _places(model)
    taken = [(held, at, held[at]) for name in tensors for held, at in places.get(name, ())]
    try:
        for name, tensor in tensors.items():
            for held, at in places.get(name, ()):
                held[at] = tensor
        with _drawing(model, key):
            logits: Tensor = model(images)
    finally:
        for name in tensors.keys() & places.keys():
            held, at = places[name][0]
            tensors[name] = held[at]
        for held, at, own in taken:
            held[at] = own
    return logits


def _places(model: nn.Module) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """Name of a tensor -> where layers look for it: in several places if they share it. Looked up once."""
    known: dict[str, list[tuple[dict[str, Any], str]]] | None = vars(model).get("places")
    if known is None:
        found = [
            (f"{path}.{at}" if path else at, held, at, tensor)
            for path, layer in model.named_modules(remove_duplicate=False)
            for held in (layer._parameters, layer._buffers)
            for at, tensor in held.items()
            if tensor is not None
        ]
        shared: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for _, held, at, tensor in found:
            shared.setdefault(id(tensor), []).append((held, at))
        known = {name: shared[id(tensor)] for name, _, _, tensor in found}
        vars(model)["places"] = known
    return known


def set_mode(model: nn.Module, *, training: bool) -> None:
    """Sets the mode of a model and all its layers, unless it has it already."""
    if model.training is not training:
        model.train(training)


def drawing_layer(model: nn.Module) -> str | None:
    """The first layer that draws random numbers by itself, as `examine` found it."""
    found: str | None = vars(model).get("drawing_layer")
    return found


def classifier(model: nn.Module) -> nn.Module:
    """The layer that makes the logits of a representation: the last linear layer or convolution that ran in
    `examine`."""
    path: str | None = vars(model).get("classifier")
    if path is None:
        raise HardyError(
            f"{type(model).__name__} has no linear layer and no convolution, so it has no representation before a "
            "classifier. Take another network, or a method that asks for none."
        )
    return model.get_submodule(path)


@contextmanager
def _drawing(model: nn.Module, key: Tensor | None) -> Iterator[None]:
    if key is None or key.is_meta or drawing_layer(model) is None:
        yield
        return
    generator = torch.cuda if key.is_cuda else torch.default_generator
    with torch.random.fork_rng(devices=[key.device] if key.is_cuda else []):
        generator.manual_seed(int(key))
        yield


_PASSES = 5
"""of a model that seems to draw from a generator of the whole process"""


@torch.no_grad()
def examine(model: nn.Module, shape: ImageShape) -> None:
    """Runs a training pass on random images, and notes on the model which layer draws random numbers by itself, and
    which makes the logits. Refuses a model that keeps statistics or random numbers where nobody can place them."""
    set_mode(model, training=True)
    held = next((tensor for tensor in model.parameters()), torch.empty(0))
    state = {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    kept = {name: state[name] for name in model.state_dict() if name in dict(model.named_buffers())}
    before = {name: tensor.clone() for name, tensor in kept.items()}
    key = torch.tensor(0, device=held.device)
    for _ in range(_PASSES):
        elsewhere = _other_generators()
        call = calling(branch="clean", statistics="batch", key=key)
        with torch.random.fork_rng(), call, _watched(model) as (drew, ran):
            images = torch.rand(4, *shape).to(held.device, held.dtype)
            logits = functional_call(model, state, (images,))
        if unmoved := _other_generators() == elsewhere:
            break  # else it may have been another thread, such as a heartbeat that waits for a random time
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        said = f"a tensor of shape {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise HardyError(f"the model answers with {said}; it must be logits, [images, classes].")
    if not unmoved:
        raise HardyError(
            "the model draws random numbers from Python's or numpy's generator in training, so that runs would not "
            "repeat. Draw them with torch."
        )
    for name, tensor in before.items():
        path = name.rpartition(".")[0]
        owner = model.get_submodule(path)
        if not isinstance(owner, Statistics) and not torch.equal(state[name], tensor):
            raise HardyError(
                f"{type(owner).__name__} at {path!r} changes its buffer {name!r} in training, and no part of a method "
                "says whose it is. Replace the layer by one without statistics of its own, or by a batch norm."
            )
    vars(model)["drawing_layer"] = drew[0] if drew else None
    vars(model)["classifier"] = ran[-1] if ran else None


def _other_generators() -> tuple[object, ...]:
    return python_random.getstate(), str(np.random.get_state())  # noqa: NPY002


@contextmanager
def _watched(model: nn.Module) -> Iterator[tuple[list[str], list[str]]]:
    """The layers that draw from torch's generator in the passes inside, innermost first; and the paths of linear layers
    and convolutions, in the order in which they ran."""
    found: list[str] = []
    ran: list[str] = []
    entered: list[Tensor] = []
    hooks = []
    for path, layer in model.named_modules():
        name = f"{type(layer).__name__} at {path!r}" if path else type(layer).__name__

        def leave(layer: nn.Module, *_: object, name: str = name, path: str = path) -> None:
            if isinstance(layer, nn.Linear | nn.Conv2d):
                ran.append(path)
            if not torch.equal(entered.pop(), torch.random.get_rng_state()):
                found.append(name)

        hooks.append(layer.register_forward_pre_hook(lambda *_: entered.append(torch.random.get_rng_state())))
        hooks.append(layer.register_forward_hook(leave))
    try:
        yield found, ran
    finally:
        for hook in hooks:
            hook.remove()
