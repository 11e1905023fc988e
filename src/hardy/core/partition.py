"""Which tensor is whose: its role (by the type of its module, never by its name) and its placement."""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from torch import nn

from hardy.core.layers import BatchNorm, InputScale, Statistics
from hardy.errors import HardyError


class Role(StrEnum):
    WEIGHT = "weight"
    NORM_AFFINE = "norm_affine"
    NORM_MEAN = "norm_mean"
    NORM_VAR = "norm_var"
    NORM_COUNT = "norm_count"
    """How many values the statistics of Federated BatchNorm were taken of."""
    NORM_MIX = "norm_mix"
    """How much of its batch's own statistics a norm takes, beside those of everybody."""
    COUNTER = "counter"
    CONTROL = "control"
    """What an objective or an optimiser adds (SCAFFOLD's variates, FedRobust's shift, momentum that is kept)."""


class Placement(StrEnum):
    SHARED = "shared"
    """One copy on the server, sent down, aggregated up."""
    REPORTED = "reported"
    """Owned by the client; a copy goes up and the server may write back through `exchange`."""
    PRIVATE = "private"
    """Never leaves the client."""


@dataclass(frozen=True)
class Tag:
    """What a tensor is. `branch` names the branch of statistics, and of an affine it has to itself; "" otherwise."""

    role: Role
    branch: str = ""
    trained: bool = False


_AFFINE = (BatchNorm, Statistics, nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d)
_STOCK = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def tags(model: nn.Module) -> dict[str, Tag]:
    """The tag of every tensor of a model that takes part in training; constants are left out."""
    found: dict[str, Tag] = {}
    for path, module in model.named_modules():
        if isinstance(module, _STOCK):
            raise HardyError(
                f"the model holds a stock {type(module).__name__} at {path!r}, whose statistics cannot be placed; "
                "pass the model through hardy.models.adopt first."
            )
        prefix = f"{path}." if path else ""
        role = Role.NORM_AFFINE if isinstance(module, _AFFINE) else Role.WEIGHT
        branch = path.rpartition(".")[2] if isinstance(module, Statistics) else ""
        own = module.roles if isinstance(module, Statistics) else {}
        for name, parameter in module.named_parameters(recurse=False):
            found[prefix + name] = Tag(Role(own.get(name, role)), branch=branch, trained=parameter.requires_grad)
        for name, buffer in module.named_buffers(recurse=False):
            if isinstance(module, InputScale) or name in module._non_persistent_buffers_set:
                continue
            if isinstance(module, Statistics) and buffer.is_floating_point():
                found[prefix + name] = Tag(Role(f"norm_{name}"), branch=branch)
            elif isinstance(module, Statistics):
                found[prefix + name] = Tag(Role.COUNTER, branch=branch)
            else:
                found[prefix + name] = Tag(Role.WEIGHT if buffer.is_floating_point() else Role.COUNTER)
    return found


@lru_cache(maxsize=32)
def branch_paths(model: nn.Module, branch: str) -> tuple[str, ...]:
    """The paths of a branch's statistics in a model."""
    return tuple(
        path
        for path, module in model.named_modules()
        if isinstance(module, Statistics) and path.rpartition(".")[2] == branch
    )
