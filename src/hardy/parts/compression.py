"""Compression of what clients send: the change of each trained tensor in fewer bytes, and what was lost sent later.

A client keeps the difference between the change it meant and the one it sent, and adds it to its next (error feedback:
Seide et al., INTERSPEECH 2014; Karimireddy et al., ICML 2019). Statistics and counters are few and travel whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.registry import kind, part


@kind("compression")
@dataclass(frozen=True, kw_only=True)
class Compression:
    """The part between a client's update and the wire."""

    def compress(self, change: Tensor) -> Tensors:
        """The pieces that are sent of a change, by name."""
        raise NotImplementedError

    def expand(self, pieces: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The change again, of the shape and type of `like`; KeyError, RuntimeError or IndexError if it cannot be."""
        raise NotImplementedError


@part("compression")
@dataclass(frozen=True, kw_only=True)
class HalfPrecision(Compression):
    """Sixteen bits a number, scaled by the largest of its tensor."""

    def compress(self, change: Tensor) -> Tensors:
        scale = change.abs().amax().clamp_min(torch.finfo(change.dtype).tiny)
        return {"value": (change / scale).half(), "scale": scale}

    def expand(self, pieces: Mapping[str, Tensor], like: Tensor) -> Tensor:
        value, scale = _piece(pieces, "value", like.numel()), _piece(pieces, "scale", 1)
        return (value.to(like) * scale.to(like)).view(like.shape)


@part("compression")
@dataclass(frozen=True, kw_only=True)
class EightBit(Compression):
    """Eight bits a number: 255 equal steps from minus to plus the largest of each block of numbers.

    >>> sent = EightBit(block=2).compress(torch.tensor([1.0, -0.5, 0.001, 0.0]))
    >>> sent["value"].tolist(), sent["scale"].tolist()
    ([127, -64, 127, 0], [1.0, 0.0010000000474974513])
    """

    block: int = 1024
    """numbers that share a scale: fewer are more exact, and cost more"""

    def __post_init__(self) -> None:
        if self.block < 1:
            raise HardyError(f"block of eight_bit is {self.block}; it must be 1 or more.")

    def compress(self, change: Tensor) -> Tensors:
        flat = change.flatten()
        rows = torch.nn.functional.pad(flat, (0, -len(flat) % self.block)).view(-1, self.block)
        scale = rows.abs().amax(1).float().clamp_min(torch.finfo(torch.float32).tiny)
        steps = (rows / scale[:, None].to(rows) * 127).round().clamp(-127, 127)
        return {"value": steps.flatten()[: len(flat)].to(torch.int8), "scale": scale}

    def expand(self, pieces: Mapping[str, Tensor], like: Tensor) -> Tensor:
        steps = _piece(pieces, "value", like.numel()).to(like)
        scale = _piece(pieces, "scale", -(-like.numel() // self.block)).to(like)
        return (steps * (scale / 127).repeat_interleave(self.block)[: len(steps)]).view(like.shape)


@part("compression")
@dataclass(frozen=True, kw_only=True)
class TopK(Compression):
    """Only the largest changes of each tensor, with their places."""

    share: float = 0.01
    """of a tensor's numbers that is sent"""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise HardyError(f"share of top_k is {self.share}; it must be in (0, 1].")

    def compress(self, change: Tensor) -> Tensors:
        flat = change.flatten()
        index = flat.abs().topk(max(1, round(self.share * flat.numel()))).indices
        return {"value": flat[index], "index": index.int()}

    def expand(self, pieces: Mapping[str, Tensor], like: Tensor) -> Tensor:
        flat = torch.zeros_like(like).flatten()
        flat[pieces["index"].long()] = pieces["value"].to(like)
        return flat.view(like.shape)


def _piece(pieces: Mapping[str, Tensor], name: str, count: int) -> Tensor:
    """A piece of so many numbers; another number could unpack to far more memory than came."""
    if pieces[name].numel() != count:
        raise IndexError(f"{name} holds {pieces[name].numel()} numbers, must hold {count}")
    return pieces[name].flatten()


half_precision, eight_bit, top_k = HalfPrecision, EightBit, TopK
__all__ = ["Compression", "eight_bit", "half_precision", "top_k"]
