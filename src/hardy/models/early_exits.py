"""Exits on the way through a network: a classifier of its own after every block."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from hardy.core.tensors import ImageShape
from hardy.errors import HardyError
from hardy.models.blocks import MakeNorm, named_sequential
from hardy.models.stacked import Conv2d, Linear, in_turn

ExitAnswer = Literal["ensemble", "deepest"]
_all_exits: ContextVar[bool] = ContextVar("hardy_all_exits", default=False)


class EarlyExits(nn.Module):
    """A network in blocks with an exit after each. It runs as deep as it has tensors: those of deeper blocks are empty.

    It answers with the mean of its exits' logits, or with those of the deepest one; inside `all_exits` with those of
    all, side by side, [N, exits · classes].
    """

    def __init__(self, blocks: Sequence[nn.Module], exits: Sequence[nn.Module], answer: ExitAnswer) -> None:
        super().__init__()
        self.blocks, self.exits, self.answer = nn.ModuleList(blocks), nn.ModuleList(exits), answer

    def forward(self, x: Tensor) -> Tensor:
        logits: list[Tensor] = []
        for block, leave in zip(self.blocks, self.exits, strict=True):
            if not next(leave.parameters()).numel():
                break
            x = in_turn(x, block)
            logits.append(in_turn(x, leave))
        if _all_exits.get():
            return torch.cat(logits, 1)
        return torch.stack(logits).mean(0) if self.answer == "ensemble" else logits[-1]


@contextmanager
def all_exits() -> Iterator[None]:
    token = _all_exits.set(True)
    try:
        yield
    finally:
        _all_exits.reset(token)


def with_exits(model: nn.Module, make_norm: MakeNorm, shape: ImageShape, most: int, answer: ExitAnswer) -> EarlyExits:
    """A plain network in at most so many blocks. One begins at a layer with weights; its own last layer is the deepest
    exit. Any other exit is a depthwise separable convolution of stride 2, a norm, a ReLU, the mean over the image and a
    linear layer; behind layers without an image, the linear layer."""
    steps: list[tuple[str, nn.Module]] = list(model.named_children()) if isinstance(model, nn.Sequential) else []
    heavy = [at for at, (_, layer) in enumerate(steps) if any(p.dim() > 1 for p in layer.parameters())]
    if len(heavy) < 3 or not isinstance(last := steps[-1][1], nn.Linear):
        raise HardyError(
            f"exits cannot be put into {type(model).__name__}: they take an nn.Sequential of 3 or more layers "
            "with weights, the last one nn.Linear. Write the network so, or take another budget."
        )
    trunk = heavy[:-1]
    count = min(most, len(trunk))
    begins = [0, *trunk[len(trunk) - count + 1 :], len(steps) - 1]
    blocks = [named_sequential(**dict(steps[a:b])) for a, b in pairwise(begins)]
    seen, x = [], torch.zeros(2, *shape, dtype=last.weight.dtype)
    with torch.no_grad():
        for block in blocks:
            x = block(x)
            seen.append(x.shape[1:])
    exits = [_exit(own, make_norm, last.out_features) for own in seen[:-1]]
    return EarlyExits(blocks, [*exits, named_sequential(fc=last)], answer)


def _exit(shape: torch.Size, make_norm: MakeNorm, classes: int) -> nn.Module:
    channels = shape[0]
    if len(shape) == 1:
        return named_sequential(fc=Linear(channels, classes))
    return named_sequential(
        depthwise=Conv2d(channels, channels, 3, stride=2, padding=1, groups=channels, bias=False),
        pointwise=Conv2d(channels, channels, 1, bias=False),
        norm=make_norm(channels),
        relu=nn.ReLU(),
        average=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        fc=Linear(channels, classes),
    )
