"""A small vision transformer."""

import torch
from torch import Tensor, nn

from hardy.core.layers import BatchNorm
from hardy.core.tensors import ImageShape
from hardy.errors import HardyError
from hardy.models.blocks import HALF, MakeNorm, Scale, cells, entrance, named_sequential, widen
from hardy.models.stacked import Conv2d


class _Patches(nn.Module):
    """Images [N, C, H, W] -> tokens [N, T, D]: a linear map of each patch, plus what stands for its place."""

    def __init__(self, shape: ImageShape, features: int, patch: int) -> None:
        super().__init__()
        self.conv = Conv2d(shape[0], features, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn(cells(shape, patch), features))

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.conv(x).flatten(2).transpose(1, 2) + self.position
        return tokens


class _TokenNorm(nn.Module):
    """A norm on tokens [N, T, D]. Norms that have the features second are given [N, D, T]."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, tokens: Tensor) -> Tensor:
        if isinstance(self.norm, BatchNorm | nn.GroupNorm):
            out: Tensor = self.norm(tokens.transpose(1, 2)).transpose(1, 2)
        else:
            out = self.norm(tokens)
        return out


class _Attention(nn.Module):
    """Self-attention of several heads. Its size is that of its weights, so that a narrower network can be cut out."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(features, features) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = (
            layer(tokens).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        # plain products: torch's fused attention has no batching rule on a CPU and no second derivatives
        weights = (query @ key.transpose(2, 3) * query.shape[3] ** -0.5).softmax(3)
        out: Tensor = self.out((weights @ value).transpose(1, 2).flatten(2))
        return out


class _EncoderBlock(nn.Module):
    """norm, attention; plus its input; norm, two linear layers; plus their input."""

    def __init__(self, features: int, heads: int, norm: MakeNorm) -> None:
        super().__init__()
        self.norm1 = _TokenNorm(norm(features))
        self.attention = _Attention(features, heads)
        self.norm2 = _TokenNorm(norm(features))
        self.hidden = named_sequential(
            fc1=nn.Linear(features, 2 * features), gelu=nn.GELU(), fc2=nn.Linear(2 * features, features)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.norm1(tokens))
        out: Tensor = tokens + self.hidden(self.norm2(tokens))
        return out


class _MeanToken(nn.Module):
    """[N, T, D] -> [N, D]"""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.mean(1)


def tiny_vit(
    *,
    norm: MakeNorm = nn.LayerNorm,
    width: float = 1.0,
    classes: int = 10,
    shape: ImageShape = (3, 28, 28),
    scale: Scale = HALF,
    patch: int = 4,
    blocks: int = 3,
    heads: int = 4,
) -> nn.Module:
    """A vision transformer (Dosovitskiy et al. 2021) with the norms first and the mean of the tokens last: 107 k
    parameters, 5.9 M MACs. `width` scales the 16 features of each head; what does not fill a patch is left out.

    patch: side of a patch, in pixels
    blocks: transformer blocks
    heads: attention heads of a block
    """
    for name, value in (("patch", patch), ("blocks", blocks), ("heads", heads)):
        if value < 1:
            raise HardyError(f"{name} of tiny_vit is {value}; it must be 1 or more.")
    features = heads * widen(width, 16)[0]
    return named_sequential(
        scale=entrance(shape, scale, smallest=patch),
        patches=_Patches(shape, features, patch),
        **{f"block{number}": _EncoderBlock(features, heads, norm) for number in range(1, blocks + 1)},
        norm=_TokenNorm(norm(features)),
        mean=_MeanToken(),
        fc=nn.Linear(features, classes),
    )
