"""Red flags: signs that a robustness figure is too good to be true, looked for before it is believed.

After Carlini et al., On evaluating adversarial robustness, 2019, and the warnings of Croce and Hein's AutoAttack.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hardy.attacks.balls import Ball, length
from hardy.attacks.base import Attack, Forward
from hardy.attacks.gradient import pgd
from hardy.attacks.square import square
from hardy.core import random
from hardy.errors import HardyError

ADVICE = {
    "random_output": "Dropout or noise is left on at inference, or the defence is random by design. Attacks then chase "
    "gradients that do not repeat, and a lucky draw counts as robust. Switch the randomness off or fix its key; a "
    "defence meant to be random has to be attacked through the mean over many draws.",
    "probabilities": "The net ends in a softmax. A cross-entropy that takes its logarithm as if it were logits is "
    "nearly flat, so gradient attacks stall. Hand over the logits from before the softmax, or its logarithm.",
    "zero_gradients": "Logits so large that the softmax saturates, a quantised or clipped input, or another step "
    "without a slope. A gradient attack then goes nowhere, and what it reports is the accuracy under noise. Attack "
    "with a loss that scaling cannot flatten (apgd with loss='dlr'), replace the step by a smooth stand-in in the "
    "backward pass, and believe autoattack only.",
    "black_box_beats_white_box": "An attack that sees only outputs should never beat one that has the gradient. The "
    "gradients are masked, or the white-box attack is too weak. Look for steps without a true slope, give PGD more "
    "steps and restarts, and report autoattack.",
    "not_monotone_in_steps": "More steps should only help the attacker. Either the step is too large for the ball, or "
    "the loss surface is rugged and hides the way up. Report the strongest attack found, with restarts and more steps.",
    "not_monotone_in_epsilon": "A larger ball holds the smaller one, so accuracy can only fall. The optimisation fails "
    "on the larger ball, which is typical of masked gradients and of detectors that act beyond a distance. Report "
    "autoattack, and attack the detector together with the net.",
    "survives_huge_epsilon": "In this ball any image can become any other, so nothing honest survives. The attack does "
    "not work on this net, and its figures at small radii mean nothing. Check that pixels lie in [0, 1], that the "
    "labels fit, and that gradients reach the input.",
    "batch_dependent": "The net normalises by the batch: it was left in training mode, or keeps no running statistics. "
    "An attack then changes an image through its neighbours, and accuracy depends on how the test set is cut. Evaluate "
    "with running statistics (model.eval()).",
}
"""What usually causes a flag, and what to do."""

_REPEATS = 1e-4
"""change between two like passes, relative to the largest logit, that no rounding explains"""
_FLAT = 1e-8
"""largest entry of a gradient that counts as zero"""
_SHARE_FLAT = 0.1
_SHARE_LEFT = 0.05
_STEPS = (1, 5, 20)
_FACTORS = (0.5, 1, 2)
_QUERIES = 300


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One reason not to believe a figure: what was measured, and what to do about it."""

    name: str
    message: str
    advice: str


def _flag(name: str, message: str) -> Flag:
    return Flag(name=name, message=message, advice=ADVICE[name])


class Outputs(NamedTuple):
    """Logits of the same images: twice, and of every other one beside black images."""

    first: Tensor
    second: Tensor
    beside_black: Tensor


class Standing(NamedTuple):
    """Which images are classified rightly after each probe, [N], and whose loss has no gradient."""

    flat: Tensor
    by_steps: tuple[Tensor, ...]
    after_search: Tensor
    by_radius: tuple[Tensor, ...]
    with_huge_radius: Tensor


Probe = Callable[[Forward, Tensor, Tensor, Tensor], Outputs | Standing]
"""(network, images, labels, key) -> what it found; pure, so that it also runs for many networks at once"""


@dataclass(frozen=True, kw_only=True)
class Checks:
    """Looks for red flags by short attacks of this radius. A probe asks a network, a verdict reads what it found: an
    engine can so probe the networks of many clients in one call."""

    epsilon: float = 8 / 255
    ball: Ball = "linf"
    points: int = 128
    """images at most, spread evenly over those given"""

    def __post_init__(self) -> None:
        if self.points < 1 or not 0 < self.epsilon < math.inf:
            raise HardyError(
                f"checks got points={self.points} and epsilon={self.epsilon}; give at least one point, and a finite "
                "epsilon above 0."
            )

    def choose(self, images: int) -> Tensor:
        """The numbers of the images that are looked at."""
        if not images:
            raise HardyError("checks got 0 images; give at least one.")
        return torch.linspace(0, images - 1, min(self.points, images)).long()

    @torch.no_grad()
    def outputs(self, forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> Outputs:
        """The probe that needs no gradient."""
        black = torch.cat([x[::2], torch.zeros_like(x[1::2])])  # as many images, so that they are rounded alike
        return Outputs(forward(x), forward(x), forward(black)[: len(x[::2])])

    @torch.no_grad()
    def standing(self, forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> Standing:
        """The probe by attacks."""

        def after(attack: Attack, word: str) -> Tensor:
            return forward(attack.perturb(forward, x, y, random.fold(key, word))).argmax(1) == y

        def ascent(steps: int, epsilon: float) -> Tensor:
            step = min(1.0, 2.5 / steps) * epsilon
            return after(pgd(epsilon=epsilon, step=step, steps=steps, ball=self.ball), "pgd")

        gradient = torch.func.grad(lambda z: F.cross_entropy(forward(z), y, reduction="sum"))(x)
        by_steps = tuple(ascent(steps, self.epsilon) for steps in _STEPS)
        return Standing(
            flat=length(gradient, "linf") < _FLAT,
            by_steps=by_steps,
            after_search=after(square(epsilon=self.epsilon, ball=self.ball, queries=_QUERIES), "square"),
            by_radius=tuple(
                by_steps[-1] if factor == 1 else ascent(_STEPS[-1], factor * self.epsilon) for factor in _FACTORS
            ),
            with_huge_radius=ascent(_STEPS[-1], self._huge(x[0].numel())),
        )

    def _huge(self, pixels: int) -> float:
        return 1.0 if self.ball == "linf" else math.sqrt(pixels)

    def judge_outputs(self, found: Outputs) -> list[Flag]:
        """The flags that the answers alone raise."""
        flags, logits = [], found.first
        largest = float(logits.abs().max()) + 1e-12
        moved = float((found.second - logits).abs().max()) / largest
        if moved > _REPEATS:
            message = f"Two passes over the same images differ by {moved:.2g} of the largest logit."
            flags.append(_flag("random_output", message))
        strayed = float((found.beside_black - logits[::2]).abs().max()) / largest
        changed = float((found.beside_black.argmax(1) != logits[::2].argmax(1)).double().mean())
        if moved <= _REPEATS < strayed:
            flags.append(
                _flag(
                    "batch_dependent",
                    f"When every other image of the batch turns black, the logits of the rest move by {strayed:.2g} "
                    f"of the largest and {changed:.1%} of their predictions change.",
                )
            )
        if bool((logits >= 0).all()) and float((logits.sum(1) - 1).abs().max()) < 1e-3:
            flags.append(
                _flag("probabilities", f"All {len(logits)} rows of the output are non-negative and sum to one.")
            )
        return flags

    def judge_standing(self, found: Standing, pixels: int) -> list[Flag]:
        """The flags that gradients and attacks raise, on images of so many numbers."""
        flags, strongest = [], found.by_steps[-1]
        if (flat := float(found.flat.double().mean())) > _SHARE_FLAT:
            flags.append(
                _flag("zero_gradients", f"The loss of {flat:.1%} of the images has no gradient in the pixels.")
            )
        if _clearly_fewer(found.after_search, strongest):
            flags.append(
                _flag(
                    "black_box_beats_white_box",
                    f"Square with {_QUERIES} queries leaves {_share(found.after_search)} standing, "
                    f"PGD with {_STEPS[-1]} steps {_share(strongest)}.",
                )
            )
        steps = {f"{steps} steps": stand for steps, stand in zip(_STEPS, found.by_steps, strict=True)}
        radii = {f"radius {f * self.epsilon:.3g}": stand for f, stand in zip(_FACTORS, found.by_radius, strict=True)}
        for name, series in (("not_monotone_in_steps", steps), ("not_monotone_in_epsilon", radii)):
            if any(_clearly_fewer(weaker, stronger) for weaker, stronger in combinations(series.values(), 2)):
                left = ", ".join(f"{_share(stand)} with {how}" for how, stand in series.items())
                flags.append(_flag(name, f"PGD leaves standing {left}."))
        if float(found.with_huge_radius.double().mean()) > _SHARE_LEFT:
            left, radius = _share(found.with_huge_radius), self._huge(pixels)
            flags.append(_flag("survives_huge_epsilon", f"PGD leaves {left} standing with radius {radius:.3g}."))
        return flags


def check(
    forward: Forward,
    x: Tensor,
    y: Tensor,
    key: Tensor,
    *,
    epsilon: float = 8 / 255,
    ball: Ball = "linf",
    points: int = 128,
    gradients: bool = True,
) -> list[Flag]:
    """The red flags of one net, found by short attacks on at most `points` of the images; without gradients, those that
    its outputs alone raise."""
    checks = Checks(epsilon=epsilon, ball=ball, points=points)
    chosen = checks.choose(len(x)).to(x.device)
    given = forward, x[chosen], y[chosen], key
    flags = checks.judge_outputs(checks.outputs(*given))
    if not gradients or not fit_to_attack(flags):
        return flags
    return flags + checks.judge_standing(checks.standing(*given), x[0].numel())


def fit_to_attack(flags: Sequence[Flag]) -> bool:
    """Whether attacks say anything. Where the batch decides, no image has a fate of its own, and a net that moves its
    statistics cannot be differentiated."""
    return all(flag.name != "batch_dependent" for flag in flags)


def _share(standing: Tensor) -> str:
    return f"{float(standing.double().mean()):.1%}"


def _clearly_fewer(a: Tensor, b: Tensor) -> bool:
    """Whether fewer points stand in a than in b, by 0.2 points and twice what chance does to points of unlike fate."""
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    return only_b - only_a > 0.002 * len(a) + 2 * math.sqrt(only_a + only_b)
