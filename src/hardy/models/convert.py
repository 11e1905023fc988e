"""Takes in a module that was written without hardy's layers."""

from copy import deepcopy

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from hardy.core.layers import BatchNorm, Dropout, Statistics
from hardy.errors import HardyError
from hardy.models.blocks import MakeNorm

_Stock = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


def _carry(old: _Stock, new: BatchNorm, path: str) -> None:
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


def _renewed(old: nn.Module, norm: MakeNorm, path: str) -> nn.Module:
    """What stands in for a layer: itself, unless it keeps its behaviour in flags."""
    if isinstance(old, _Stock):
        new = norm(old.num_features)
        held = next((t for t in (old.running_mean, old.weight) if t is not None), torch.empty(0))
        new = new.to(held.device, held.dtype)
        if isinstance(new, BatchNorm):
            _carry(old, new, path)
        return new
    if isinstance(old, nn.Dropout):
        return Dropout(old.p)
    if isinstance(old, _DropoutNd):
        raise HardyError(
            f"{type(old).__name__} at {path!r} cannot be adopted; only nn.Dropout can. "
            "Replace it by nn.Dropout or hardy.models.layers.Dropout."
        )
    if getattr(old, "inplace", False):
        vars(old)["inplace"] = False
    return old


def adopt(model: nn.Module, norm: MakeNorm = BatchNorm) -> nn.Module:
    """A copy with norm(features) for every stock batch norm, hardy's Dropout and no in-place activations.

    When `norm` makes a hardy BatchNorm, inference is unchanged. Functional calls (F.dropout) stay.
    """
    holder = nn.ModuleDict({"model": deepcopy(model)})
    renewed: dict[nn.Module, nn.Module] = {}  # a layer used in two places stays one layer
    for path, old in list(holder.named_modules(remove_duplicate=False))[1:]:
        if old not in renewed:
            renewed[old] = _renewed(old, norm, path.removeprefix("model."))
        holder.set_submodule(path, renewed[old])
    return holder["model"]
