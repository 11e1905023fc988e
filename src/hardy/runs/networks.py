"""The network that an experiment names or a user gives, as a function of the norm layer."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hardy.config import Table, construct, named
from hardy.core.federation import Federation
from hardy.core.layers import calling
from hardy.core.method import BuildModel
from hardy.errors import HardyError
from hardy.models.convert import adopt
from hardy.registry import find
from hardy.user_code import reference, short

OwnModel = nn.Module | Callable[..., nn.Module]
"""a module, its class, or a function that makes one, with or without `norm`"""
_CLASSES = ("classes", "num_classes")


def model_builder(model: str | Table | OwnModel, data: Federation, width: float | None) -> BuildModel:
    """The network for the classes and images of the data; `width` is that of the method's bases, if it has some.

    A class or function of a user's own gets what it accepts of `norm`, `width`, `classes` (or `num_classes`) and
    `shape`. What takes no norm was written without Hardy's layers, and is adopted.
    """
    if isinstance(model, nn.Module):
        return lambda norm: _checked(adopt(model, norm, shape=data.shape), type(model).__name__, data)
    if isinstance(model, str | dict):
        name, options = named(model, "model")
        factory = find("model", name)
    else:
        name, options, factory = getattr(model, "__name__", type(model).__name__), {}, model
    accepted = inspect.signature(factory).parameters
    given_object = not isinstance(model, str | dict)
    if width is not None and (asked := options.pop("width", width)) != width:
        raise HardyError(
            f"model.width is {asked}, but the bases of this method are ×{width:g}. Leave model.width out, or change "
            "the method's width."
        )
    own = given_object or reference(name) is not None
    if given_object and inspect.isfunction(factory) and _takes_one(accepted):
        return lambda norm: _checked(factory(norm), short(name), data)  # as in `lambda layer: ...`
    known: Table = {key: len(data.classes) for key in _CLASSES if key in accepted}
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    if not known and anything and "norm" not in accepted:
        known = {"num_classes": len(data.classes)}  # as torchvision and timm call it
    known |= {"shape": data.shape} if "shape" in accepted else {}
    given = {key: value for key, value in known.items() if not (own and key in options)}

    def build(norm: Callable[[int], nn.Module], **width: float) -> nn.Module:
        if "norm" in accepted:
            made = construct(factory, options | width, "model", norm=norm, **given)
        else:
            made = construct(factory, options | width, "model", **given)
            made = adopt(made, norm, shape=data.shape) if isinstance(made, nn.Module) else made
        return _checked(made, short(name), data) if own else made

    if "width" in accepted or ("norm" in accepted and anything):
        return build
    return lambda norm: build(norm)  # noqa: PLW0108  (without a width, as its signature says)


def _takes_one(accepted: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a function takes one thing by its place, which has no name that says what it is."""
    known = {"norm", *_CLASSES}
    return len(accepted) == 1 and all(p.kind is p.POSITIONAL_OR_KEYWORD and n not in known for n, p in accepted.items())


def _checked(made: Any, name: str, data: Federation) -> nn.Module:
    """The network, if it takes the images and answers with one number for each class."""
    if not isinstance(made, nn.Module):
        raise HardyError(f"model {name} gives {type(made).__name__}; it must be a torch.nn.Module.")
    training = made.training
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            calling(branch="clean", statistics="running", key=None),
        ):
            out = made.eval()(torch.zeros(2, *data.shape))
    except HardyError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise HardyError(f"model {name} cannot run on images of shape {data.shape}: {said}.") from error
    finally:
        made.train(training)
    wanted = (2, len(data.classes))
    if not isinstance(out, Tensor) or tuple(out.shape) != wanted:
        found = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise HardyError(
            f"model {name} answers two images with {found}; it must be {list(wanted)}, one number for each class. Give "
            "it an argument `classes` or `num_classes`, which is set to the number of classes."
        )
    return made
