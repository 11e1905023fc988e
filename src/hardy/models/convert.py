"""Takes in a module that was written without hardy's layers."""

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from hardy.core.layers import BatchNorm, Dropout, Statistics, calling
from hardy.errors import HardyError
from hardy.models.blocks import MakeNorm

_STOCK = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_SIDES = (32, 28, 64, 224)
"""of the square images that a network of unknown input is tried on"""


def adopt(model: nn.Module, norm: MakeNorm = BatchNorm, *, shape: tuple[int, ...] | None = None) -> nn.Module:
    """A copy with norm(features) for every stock batch norm, hardy's Dropout and no in-place activations.

    When `norm` makes a hardy BatchNorm, inference is unchanged. That is checked on random inputs of `shape`, such as
    (3, 32, 32); without a shape, on one guessed from the first layer, if the model can run on it. Functional calls
    (F.dropout) stay.
    """
    holder = nn.ModuleDict({"model": deepcopy(model)})
    renewed: dict[nn.Module, nn.Module] = {}  # a layer used in two places stays one layer
    for path, old in list(holder.named_modules(remove_duplicate=False))[1:]:
        if old not in renewed:
            renewed[old] = _renewed(old, norm, path.removeprefix("model."))
        holder.set_submodule(path, renewed[old])
    norms = [new for old, new in renewed.items() if isinstance(old, _STOCK)]
    if all(isinstance(new, BatchNorm) for new in norms):
        _refuse_changed(model, holder["model"], shape)
    return holder["model"]


def _renewed(old: nn.Module, norm: MakeNorm, path: str) -> nn.Module:
    """What stands in for a layer: itself, unless it keeps its behaviour in flags."""
    if type(old) in _STOCK:
        assert isinstance(old, _BatchNorm)
        new = norm(old.num_features)
        held = next((t for t in (old.running_mean, old.weight) if t is not None), torch.empty(0))
        new = new.to(held.device, held.dtype)
        if isinstance(new, BatchNorm):
            _carry(old, new, path)
        return new
    if isinstance(old, _BatchNorm):
        raise HardyError(
            f"{type(old).__name__} at {path!r} cannot be adopted: it is derived from a stock batch norm, and what it "
            f"adds would be lost. Replace it by nn.{_stock_name(old)} and a layer of its own for what it adds."
        )
    if type(old) is nn.Dropout:
        return Dropout(old.p)
    if isinstance(old, _DropoutNd):
        raise HardyError(
            f"{type(old).__name__} at {path!r} cannot be adopted; only nn.Dropout can. "
            "Replace it by nn.Dropout or hardy.models.Dropout."
        )
    if getattr(old, "inplace", False):
        vars(old)["inplace"] = False
    return old


def _stock_name(layer: nn.Module) -> str:
    return next((stock.__name__ for stock in _STOCK if isinstance(layer, stock)), "BatchNorm2d")


def _carry(old: _BatchNorm, new: BatchNorm, path: str) -> None:
    """The affine, and the running statistics to every branch."""
    if old.running_mean is None or old.running_var is None:
        raise HardyError(
            f"{type(old).__name__} at {path!r} keeps no running statistics, so it infers by the batch. "
            "Set track_running_stats=True, or adopt with a norm without statistics (nn.GroupNorm)."
        )
    new.eps = old.eps
    with torch.no_grad():
        branches = [module for module in new.children() if isinstance(module, Statistics)]
        if old.affine:
            for holder in branches if new.dual_affine else [new]:
                holder.weight.copy_(old.weight)
                holder.bias.copy_(old.bias)
        for branch in branches:
            branch.mean.copy_(old.running_mean)
            branch.var.copy_(old.running_var)


def _refuse_changed(model: nn.Module, adopted: nn.Module, shape: tuple[int, ...] | None) -> None:
    """An error where the two infer differently, on the first shape that the model can run on."""
    for tried in [shape] if shape else _guessed(model):
        try:
            before = _inferred(model, tried)
        except Exception as error:  # another shape than its own makes a model raise anything
            if shape:
                raise HardyError(f"the model cannot run on inputs of shape {shape}: {error}.") from error
            continue
        if before is None:  # no plain tensor of values
            return
        after = _inferred(adopted, tried)
        limit = torch.finfo(before.dtype).eps ** 0.5 * before.abs().max()
        if after is None or after.shape != before.shape or not bool(((after - before).abs() <= limit).all()):
            raise HardyError(
                f"the adopted model infers differently on inputs of shape {tuple(tried)}, though only its batch norms "
                "and dropout were replaced. Does its forward look at their type or attributes? Write the model with "
                "hardy.models.BatchNorm and hardy.models.Dropout instead."
            )
        return


def _guessed(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Input shapes that would fit the first layer."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear | _BatchNorm)), None)
    if isinstance(first, nn.Conv2d):
        yield from ((first.in_channels, side, side) for side in _SIDES)
    elif isinstance(first, nn.Linear):
        yield (first.in_features,)
    elif first is not None:
        yield from ((first.num_features,), (first.num_features, 8, 8))


def _inferred(model: nn.Module, shape: tuple[int, ...]) -> Tensor | None:
    """What a copy of the model answers to random inputs, the same in every call; None: no tensor of values."""
    model = deepcopy(model).eval()
    held = next((tensor for tensor in model.parameters()), torch.empty(0))
    if held.is_meta:
        return None
    with torch.random.fork_rng(), torch.no_grad(), calling(branch="clean", statistics="running", key=None):
        torch.manual_seed(0)
        out = model(torch.rand(2, *shape).to(held.device, held.dtype))
    return out if isinstance(out, Tensor) and out.is_floating_point() and out.numel() else None
