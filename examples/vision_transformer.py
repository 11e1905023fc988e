"""A vision transformer with LayerNorm: images are cut into patches, which attend to each other."""

from torch import nn
from torch.nn import functional as F

import hardy
from hardy.models import InputScale
from hardy.parts.norms import layer


class Block(nn.Module):
    def __init__(self, width, heads, norm):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, norm(width), norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = F.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, norm, width=32, patch=7, blocks=2):
        super().__init__()
        self.scale, self.cut = InputScale(), nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.Sequential(*(Block(width, 4, norm) for _ in range(blocks)))
        self.norm, self.head = norm(width), nn.Linear(width, 10)

    def forward(self, x):
        tokens = self.cut(self.scale(x)).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(tokens)).mean(1))


if __name__ == "__main__":
    run = hardy.fit(hardy.read("demo", ["rounds=3"]), method=hardy.papers.fedavg(norm=layer()), model=Transformer)
    print(f"{run.summary()['standard_accuracy']['mean']:.1%}")
