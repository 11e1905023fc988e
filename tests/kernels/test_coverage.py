"""How much of each network runs by the kernels: the table of docs/kernels.md, computed layer by layer at full size.

`python tests/kernels/test_coverage.py` prints it. Layers run on tensors without data (device meta); in place of each
kernel stands what torch has for it, which notes the products and how its input lies in memory.
"""

from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="triton is not installed")

from hardy.core.layers import BatchNorm, calling
from hardy.core.manner import vectorising
from hardy.kernels import functions
from hardy.models import MODELS
from hardy.models.count import MacCounter

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
HEAD = "| network | convolutions | linear layers | left to torch | norms by the kernels | layouts changed |"


class Products:
    """Multiply-accumulates by who does them, and convolutions that read channels first."""

    def __init__(self) -> None:
        self.found, self.counter = Counter(), MacCounter()
        self.read_first = self.norms = self.alone = 0

    def noted(self, kind, work):
        before = self.counter.total
        out = work()
        self.found[kind] += self.counter.total - before
        return out

    def look(self, x):
        plain = x.shape[2] > 4 and x.shape[3] * x.shape[4] > 1
        self.read_first += plain and not x[0].is_contiguous(memory_format=torch.channels_last)

    def convolution(self, x, weight, half, how, precision):
        self.look(x)
        return self.noted("convolution", lambda: last(F.conv2d(x[0], half[0], None, how.stride, how.padding)))[None]

    def served(self, x, weight, half, scale, shift, how, after, precision):
        return following(self.convolution(x, weight, half, how, precision), after)

    def pooling(self, z, scale, shift, after):
        self.look(z)
        return following(z, after)

    def norm(self, z, weight, bias, given, eps, after):
        self.look(z)
        self.norms += 1
        moments = weight.new_empty(len(z), z.shape[2])
        return following(z, after), moments, moments

    def linear(self, x, weight, half):
        return self.noted("linear", lambda: torch.bmm(x, half.transpose(1, 2)))

    def norm_by_torch(self, x):
        self.alone += x.dim() == 4
        return x


def last(x):
    return x.contiguous(memory_format=torch.channels_last)


def following(z, after):
    window = after.window
    out = z.flatten(0, 1)
    if window.size > 1:
        out = F.max_pool2d(out, window.size, window.stride, window.padding, 1, window.ceil)
    return (out.contiguous() if after.flat else last(out)).unflatten(0, z.shape[:2])


def products(name, statistics):
    """A forward pass of two images, as many slots run it."""
    model, seen = MODELS[name]().to("meta"), Products()
    kinds = {"convolution": "convolution", "served": "served", "pooling": "pooling", "norm": "norm", "linear": "linear"}
    patches = [patch.object(functions, f"{kind}_layer", getattr(seen, own)) for kind, own in kinds.items()]
    patches.append(patch.object(BatchNorm, "forward", lambda layer, x: seen.norm_by_torch(x)))
    shape = (3, 256, 256) if name == "alexnet" else (3, 28, 28) if name in SMALL else (3, 32, 32)
    key = torch.zeros((), dtype=torch.int64, device="meta")
    for each in patches:
        each.start()
    try:
        with vectorising("fused"), calling(branch="clean", statistics=statistics, key=key), seen.counter:
            model(torch.zeros(2, *shape, device="meta"))
    finally:
        for each in patches:
            each.stop()
    return seen


SMALL = ("digits_cnn", "mini_convnext", "mlp", "tiny_cnn", "tiny_vit")


def row(name):
    """Products of any pass; norms of images in one that is learnt from (in attacks they are a product and a sum)."""
    seen, learnt = products(name, "running"), products(name, "batch")
    assert seen.found == learnt.found
    total, norms = seen.counter.total, learnt.alone + learnt.norms
    convolutions, linear = seen.found["convolution"], seen.found["linear"]
    shares = (convolutions, linear, total - convolutions - linear)
    cells = [name, *(f"{100 * share / total:.1f} %" for share in shares)]
    cells += [f"{learnt.norms} of {norms}" if norms else "–", str(max(seen.read_first, learnt.read_first))]
    return f"| {' | '.join(cells)} |"


def table():
    return [HEAD, "|---|---|---|---|---|---|", *map(row, MODELS)]


def test_the_page_says_how_much_is_fused():
    assert "\n".join(table()) in PAGE.read_text()


if __name__ == "__main__":
    print("\n".join(table()))
