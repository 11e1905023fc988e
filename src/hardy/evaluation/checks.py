"""Red flags: signs that a robustness figure is too good to be true, looked for before it is believed.

After Carlini et al., On evaluating adversarial robustness, 2019, and the warnings of Croce and Hein's AutoAttack.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

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
_QUERIES = 300


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One reason not to believe a figure: what was measured, and what to do about it."""

    name: str
    message: str
    advice: str


def _flag(name: str, message: str) -> Flag:
    return Flag(name=name, message=message, advice=ADVICE[name])


@torch.no_grad()
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
    """The red flags of a net, found by short attacks on at most `points` of the images, spread evenly over them;
    without gradients, those that its outputs alone raise."""
    if not len(x) or points < 1 or not 0 < epsilon < math.inf:
        raise HardyError(
            f"checks got {len(x)} images, points={points} and epsilon={epsilon}; "
            "give at least one image and one point, and a finite epsilon above 0."
        )
    chosen = torch.linspace(0, len(x) - 1, min(points, len(x)), device=x.device).long()
    x, y = x[chosen], y[chosen]
    flags = list(_outputs(forward, x))
    if not gradients or any(flag.name == "batch_dependent" for flag in flags):
        return flags  # no image has a fate of its own, and a net that moves its statistics cannot be differentiated
    return [*flags, *_gradients(forward, x, y), *_attacks(forward, x, y, key, epsilon, ball)]


def _outputs(forward: Forward, x: Tensor) -> Iterator[Flag]:
    logits = forward(x)
    largest = float(logits.abs().max()) + 1e-12
    moved = float((forward(x) - logits).abs().max()) / largest
    if moved > _REPEATS:
        yield _flag("random_output", f"Two passes over the same images differ by {moved:.2g} of the largest logit.")
    mixed = forward(torch.cat([x[::2], torch.zeros_like(x[1::2])]))[: len(x[::2])]  # as many, so rounded alike
    strayed = float((mixed - logits[::2]).abs().max()) / largest
    changed = float((mixed.argmax(1) != logits[::2].argmax(1)).double().mean())
    if moved <= _REPEATS < strayed:
        yield _flag(
            "batch_dependent",
            f"When every other image of the batch turns black, the logits of the rest move by {strayed:.2g} of the "
            f"largest and {changed:.1%} of their predictions change.",
        )
    if bool((logits >= 0).all()) and float((logits.sum(1) - 1).abs().max()) < 1e-3:
        yield _flag("probabilities", f"All {len(x)} rows of the output are non-negative and sum to one.")


def _gradients(forward: Forward, x: Tensor, y: Tensor) -> Iterator[Flag]:
    gradient = torch.func.grad(lambda z: F.cross_entropy(forward(z), y, reduction="sum"))(x)
    flat = float((length(gradient, "linf") < _FLAT).double().mean())
    if flat > _SHARE_FLAT:
        yield _flag("zero_gradients", f"The loss of {flat:.1%} of the images has no gradient in the pixels.")


def _attacks(forward: Forward, x: Tensor, y: Tensor, key: Tensor, epsilon: float, ball: Ball) -> Iterator[Flag]:
    def standing(attack: Attack, word: str) -> Tensor:
        return forward(attack.perturb(forward, x, y, random.fold(key, word))).argmax(1) == y

    def ascent(steps: int, epsilon: float) -> Tensor:
        return standing(pgd(epsilon=epsilon, step=min(1.0, 2.5 / steps) * epsilon, steps=steps, ball=ball), "pgd")

    by_steps = {f"{steps} steps": ascent(steps, epsilon) for steps in _STEPS}
    strongest = by_steps[f"{_STEPS[-1]} steps"]
    searched = standing(square(epsilon=epsilon, ball=ball, queries=_QUERIES), "square")
    if _clearly_fewer(searched, strongest):
        yield _flag(
            "black_box_beats_white_box",
            f"Square with {_QUERIES} queries leaves {_share(searched)} standing, "
            f"PGD with {_STEPS[-1]} steps {_share(strongest)}.",
        )
    by_radius = {
        f"radius {factor * epsilon:.3g}": strongest if factor == 1 else ascent(_STEPS[-1], factor * epsilon)
        for factor in (0.5, 1, 2)
    }
    for name, series in (("not_monotone_in_steps", by_steps), ("not_monotone_in_epsilon", by_radius)):
        if any(_clearly_fewer(weaker, stronger) for weaker, stronger in combinations(series.values(), 2)):
            yield _flag(name, f"PGD leaves standing {', '.join(f'{_share(s)} with {w}' for w, s in series.items())}.")
    huge = 1.0 if ball == "linf" else math.sqrt(x[0].numel())
    left = ascent(_STEPS[-1], huge)
    if float(left.double().mean()) > _SHARE_LEFT:
        yield _flag("survives_huge_epsilon", f"PGD leaves {_share(left)} standing with radius {huge:.3g}.")


def _share(standing: Tensor) -> str:
    return f"{float(standing.double().mean()):.1%}"


def _clearly_fewer(a: Tensor, b: Tensor) -> bool:
    """Whether fewer points stand in a than in b, by 0.2 points and twice what chance does to points of unlike fate."""
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    return only_b - only_a > 0.002 * len(a) + 2 * math.sqrt(only_a + only_b)
