"""Randomised smoothing: accuracy that is certified against every change up to an L2 radius, with stated confidence.

Cohen, Rosenfeld & Kolter, Certified Adversarial Robustness via Randomized Smoothing, ICML 2019, Algorithm Certify.

f a client's network as it is served · σ deviation of the noise, in pixels of [0, 1] · ξ standard normal noise · Φ the
normal distribution · α chance of a wrong certificate · n0, n noisy copies of an image
1. c is the class that f gives most often to n0 copies x + σ ξ, cut off at 0 and 1 where inputs have a range: that is
   a part of f.
2. k is how many of n further copies it gives to c.
3. p is a lower bound of the chance of c at confidence 1 − α (Clopper & Pearson): Bin(n, p) is k or more with chance α.
4. If p > 1/2, the smoothed network answers c on every image within R = σ Φ⁻¹(p) of x; else it abstains.
Certified accuracy at a radius r: the share of rows with c right and R of at least r.

The certificate is of the smoothed network, which answers with the vote over noisy copies, whatever the attack. Of all
rows at most a share α is expected to bear a wrong certificate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from hardy.core import random
from hardy.core.net import Mixture
from hardy.errors import HardyError, unknown
from hardy.evaluation.measure import ServedClients, figures

BLOCK = 100
"""copies between two notes on disk"""
_CURVE = 24
"""steps of the curve over radii"""


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """How rows are certified, such as sigma=0.25,n=1000."""

    sigma: float
    """σ, deviation of the noise; train with data.augmentation = pixel_noise of the same"""
    n0: int = 100
    """copies that choose the class"""
    n: int = 1000
    """copies that bound its chance: the radius can be at most σ Φ⁻¹(α^(1/n)), with these 2.5 σ"""
    alpha: float = 0.001
    """α, chance that a certificate is wrong"""
    radii: tuple[float, ...] = ()
    """L2 radii of the figures; absent: 0, σ and 2 σ"""

    def __post_init__(self) -> None:
        if not (self.sigma > 0 and math.isfinite(self.sigma)):
            raise HardyError(f"sigma of a certificate is {self.sigma}; it must be above 0.")
        if self.n0 < 1 or self.n < 1 or not 0 < self.alpha < 0.5:
            raise HardyError(
                f"a certificate has n0 = {self.n0}, n = {self.n} and alpha = {self.alpha}; n0 and n must be 1 or more, "
                "alpha in (0, 0.5)."
            )
        least = math.ceil(math.log(self.alpha) / math.log(0.5))
        if self.n <= least:
            raise HardyError(
                f"a certificate with n = {self.n} copies never holds at alpha = {self.alpha:g}: even if all agree, the "
                f"chance of the class may be below 1/2. Take n of {least + 1} or more."
            )
        if any(not 0 <= radius < math.inf for radius in self.radii):
            raise HardyError(f"radii of a certificate are {self.radii}; each must be 0 or more.")
        if not self.radii:
            object.__setattr__(self, "radii", (0.0, self.sigma, 2 * self.sigma))

    @property
    def name(self) -> str:
        """What its figures go by."""
        usual = Smoothing(sigma=self.sigma)
        given = (
            f"{key}={getattr(self, key):g}" for key in ("n0", "n", "alpha") if getattr(self, key) != getattr(usual, key)
        )
        return ",".join([f"sigma={self.sigma:g}", *given])

    @property
    def largest_radius(self) -> float:
        """What a row gets whose copies all agree."""
        return self.sigma * NormalDist().inv_cdf(self.alpha ** (1 / self.n))


def parse_smoothing(text: str) -> Smoothing:
    """What a text such as sigma=0.25,n=1000,radii=0:0.25:0.5 says."""
    kinds = {field.name: field.type for field in fields(Smoothing)}
    given: dict[str, Any] = {}
    for word in text.split(","):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals or key not in kinds:
            raise unknown(f"option of certificate {text!r}:", key, kinds)
        try:
            if key == "radii":
                given[key] = tuple(map(float, value.split(":")))
            else:
                given[key] = int(value) if key in ("n", "n0") else float(value)
        except ValueError:
            raise HardyError(f"{key} of certificate {text!r} is {value!r}; it must be a number.") from None
    if "sigma" not in given:
        raise HardyError(f"certificate {text!r} has no sigma; write for example sigma=0.25,n=1000.")
    return Smoothing(**given)


def count_votes(served: ServedClients, smoothing: Smoothing, first: int, last: int, key: Tensor) -> list[Tensor]:
    """How often each client's rows are given each class, [row, class], among the copies first ... last − 1."""
    if served.together:
        raise HardyError(
            "a network whose norms use the statistics of its batch (inference_statistics = batch) cannot be certified: "
            "its answer to an image depends on the others. Take running or recomputed."
        )

    bounded = served.engine.data.bounded

    def votes(net: Mixture, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        forward, counts = served.predicting(net), None
        for copy in range(first, last):
            noise = random.normal(random.fold(key, copy), x.shape, torch.float32).to(x.dtype)
            noisy = x + smoothing.sigma * noise
            logits = forward(noisy.clamp(0.0, 1.0) if bounded else noisy)
            given = logits.argmax(-1)[..., None] == torch.arange(logits.shape[-1], device=x.device)
            counts = given.float() if counts is None else counts + given.float()
        assert counts is not None
        return counts

    return [counts.round().to(torch.int64) for counts in served.ask(served.rows, votes, key)]


def certified_figures(
    served: ServedClients, smoothing: Smoothing, chosen: Sequence[Tensor], counted: Sequence[Tensor], round_number: int
) -> dict[str, Any]:
    """Lines 1 to 4 for every row, as figures of the clients, from the votes of n0 and of n copies."""
    clients, images = served.engine.data.profiles, [len(rows) for rows in served.rows]
    radii: list[Tensor] = []
    abstained: list[float | None] = []
    for first, votes, labels in zip(chosen, counted, served.labels, strict=True):
        own = torch.tensor(
            [row_radius(smoothing, int(row[top])) for row, top in zip(votes, first.argmax(-1).tolist(), strict=True)]
            if len(labels)
            else [],
            dtype=torch.float64,
        )
        abstained.append(float((own < 0).double().mean()) if len(own) else None)
        right = first.argmax(-1) == labels if len(labels) else torch.zeros(0, dtype=torch.bool)
        radii.append(torch.where(right, own, -1.0))

    def at(radius: float) -> list[float | None]:
        return [float((own >= radius - 1e-9).double().mean()) if len(own) else None for own in radii]

    known = torch.cat(radii).clamp_min(0.0)
    steps = [smoothing.largest_radius * step / _CURVE for step in range(_CURVE + 1)]
    curve = [[round(r, 6), _mean(at(r))] for r in steps]
    return {
        "sigma": smoothing.sigma,
        "n0": smoothing.n0,
        "n": smoothing.n,
        "alpha": smoothing.alpha,
        "norm": "l2",
        "round": round_number,
        "largest_radius": smoothing.largest_radius,
        "average_radius": float(known.mean()) if len(known) else None,
        "abstained": _mean(abstained),
        "radii": {f"{r:g}": figures(at(r), clients, images, round_number) for r in smoothing.radii},
        "curve": curve,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def row_radius(smoothing: Smoothing, votes: int) -> float:
    """Lines 3 and 4: the radius of a row whose class got so many votes of n; −1: abstains."""
    p = chance_bound(votes, smoothing.n, smoothing.alpha)
    return smoothing.sigma * NormalDist().inv_cdf(p) if p > 0.5 else -1.0


@cache
def chance_bound(hits: int, draws: int, alpha: float) -> float:
    """The lower bound of Clopper and Pearson for a chance that hit so often in independent draws.

    99 of 100 hits: at 0.947 the chance of 99 or more is 0.025.
    >>> round(chance_bound(99, 100, 0.025), 3)
    0.946
    """
    if hits == 0:
        return 0.0
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        if incomplete_beta(hits, draws - hits + 1, middle) > alpha:
            high = middle
        else:
            low = middle
    return low


def incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), the share of the beta distribution below x: the chance that Bin(a + b − 1, x) is a or more. By its
    continued fraction (Abramowitz & Stegun, 26.5.8), with Lentz's method."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    found, upper, lower = 1.0, 1.0, 0.0
    for step in range(100_000):
        half = step // 2
        if step == 0:
            term = 1.0
        elif step % 2:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        lower = 1.0 / ((1.0 + term * lower) or tiny)
        upper = (1.0 + term / upper) or tiny
        found *= upper * lower
        if step and abs(1.0 - upper * lower) < 1e-15:
            break
    return front * (found - 1.0)


__all__ = ["BLOCK", "Smoothing", "certified_figures", "chance_bound", "count_votes", "parse_smoothing"]
