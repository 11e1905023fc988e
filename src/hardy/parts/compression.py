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
        return (pieces["value"].to(like) * pieces["scale"].to(like)).view(like.shape)


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


half_precision, top_k = HalfPrecision, TopK
__all__ = ["Compression", "half_precision", "top_k"]
