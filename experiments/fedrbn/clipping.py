"""The attack of the authors' code, for the rows of clipping.toml.

The release maps pixels to [-1, 1] outside the network and then clips attacked images to [0, 1] of that scale, in
training and in test: its ε is half as large in pixels, and every attacked pixel is at least mid-grey.
"""

from dataclasses import dataclass

from hardy.attacks.gradient import PGD
from hardy.registry import part


@part("attack")
@dataclass(frozen=True, kw_only=True)
class MidGrey(PGD):
    """PGD on a network that sees no pixel darker than mid-grey, since attacked images are clipped there."""

    def perturb(self, forward, x, y, key):
        return super().perturb(lambda z: forward(z.clamp(min=0.5)), x, y, key).clamp(min=0.5)


mid_grey = MidGrey
