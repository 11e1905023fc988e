"""The privacy account: what Gaussian noise on sums of clipped vectors is worth as (ε, δ)-differential privacy.

Rényi divergences (RDP; Mironov, CSF 2017) of the mechanisms of a run are added up order by order and turned into ε. Two
ways of sampling are known, each with the data sets that it tells apart:

- Poisson: each unit is in with the same chance, on its own. Data sets differ by one unit added or removed. The
  divergence (Mironov, Talwar & Zhang, 2019) is integrated numerically, at any order above 1.
- fixed: so many units are drawn without replacement. Data sets differ in what one unit holds. The bound is that of
  Wang, Balle & Kasiviswanathan (AISTATS 2019), Theorems 9 and 27, at whole orders.

Noise is meant to be real numbers; attacks on their rounding (Mironov, CCS 2012) are not accounted for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import expm1, inf, lgamma, log, log1p
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hardy.errors import HardyError

Sampling = Literal["fixed", "poisson"]
Unit = Literal["client", "example"]
Points = NDArray[np.float64]
ORDERS = (*(1 + k / 10 for k in range(1, 100)), *map(float, range(11, 65)), 80.0, 96.0, 128.0, 192.0, 256.0, 512.0)
"""of the Rényi divergences that are looked at"""
_LEAST = 0.1
"""smallest noise for which sampling is counted"""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A noisy sum that was given away a number of times."""

    what: str
    """in words"""
    unit: Unit
    """whose data are protected: all of a client's, or one example"""
    noise: float
    """z, deviation of the noise / most that one unit can change the sum (L2)"""
    share: float = 1.0
    """q, chance that a unit is in the sum"""
    sampling: Sampling = "fixed"
    times: int = 1
    delta: float | None = None
    """δ that the part asks for"""
    simulated: bool = False
    """whether its noise follows from the experiment's seed"""
    on_updates: bool = False
    """whether the server sees clients' updates without noise, and adds it itself"""

    @property
    def adjacency(self) -> str:
        """The data sets that are told apart."""
        return f"one {self.unit} {'added or removed' if self.sampling == 'poisson' else 'replaced by another'}"

    @property
    def rdp(self) -> Points:
        """Rényi divergence at each of `ORDERS`."""
        if not self.times:
            return np.zeros(len(ORDERS))
        if not self.noise:
            return np.full(len(ORDERS), inf)
        return self.times * np.array(_divergences(self.noise, self.share, self.sampling))


def epsilon_of(mechanisms: Sequence[Mechanism], delta: float) -> float:
    """ε of all of them together; ∞ if one has no noise.

    A single Gaussian mechanism of z = 1:
    >>> round(epsilon_of([Mechanism(what="sum", unit="client", noise=1.0)], 1e-5), 2)
    4.73
    """
    total = sum((mechanism.rdp for mechanism in mechanisms), np.zeros(len(ORDERS)))
    return min(_epsilon(order, float(r), delta) for order, r in zip(ORDERS, total, strict=True))


def _epsilon(order: float, divergence: float, delta: float) -> float:
    """Canonne, Kamath & Steinke, NeurIPS 2020, Proposition 12. A divergence so small that total variation stays below
    δ costs nothing."""
    if delta**2 + expm1(-divergence) > 0:
        return 0.0
    return max(0.0, divergence + log1p(-1 / order) - log(delta * order) / (order - 1))


def noise_for(epsilon: float, *, delta: float, times: int, share: float = 1.0, sampling: Sampling = "fixed") -> float:
    """The smallest z, to a thousandth, with which so many sums cost no more than ε. Divide by two what you tell a part
    whose units are replaced, not added: see the page on privacy."""
    if not epsilon > 0 or not 0 < delta < 1:
        raise HardyError(f"no noise gives ε = {epsilon} at δ = {delta}; ε must be above 0, and δ in (0, 1).")

    def costs(noise: float) -> float:
        one = Mechanism(what="", unit="client", noise=noise, share=share, sampling=sampling, times=times)
        return epsilon_of([one], delta)

    low, high = 0.0, 1.0
    while costs(high) > epsilon:
        low, high = high, 2 * high
        if high > 1e6:
            raise HardyError(f"ε = {epsilon} at δ = {delta} needs noise of more than {high:g}. Ask for a larger ε.")
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if costs(middle) > epsilon else (low, middle)
    return high


@lru_cache(maxsize=256)
def _divergences(noise: float, share: float, sampling: Sampling) -> tuple[float, ...]:
    """Of one sum, at each of `ORDERS`."""
    whole = tuple(order / (2 * noise**2) for order in ORDERS)
    if share == 1 or noise < _LEAST:
        return whole
    found = (_poisson if sampling == "poisson" else _fixed)(noise, share)
    return tuple(min(one, other) for one, other in zip(found, whole, strict=True))


def _log_mean(log_f: Callable[[Points], Points], noise: float, top: float) -> float:
    """log E f(x) over x ~ N(0, noise²), where f draws the mass up to `top`. The trapezoid rule converges exponentially
    on such integrands."""
    step = min(noise, noise**2) / 8
    x = np.arange(-14 * noise, top + 14 * noise, step)
    log_terms = log_f(x) - x**2 / (2 * noise**2)
    peak = log_terms.max()
    return float(peak + np.log(np.exp(log_terms - peak).sum()) + log(step / noise) - 0.5 * log(2 * np.pi))


def _poisson(noise: float, share: float) -> list[float]:
    """log E [(1 − q) + q e^{(2x − 1) / 2z²}]^α / (α − 1)"""

    # in units of the sensitivity the noise has deviation z
    def one(order: float) -> float:
        def log_f(x: Points) -> Points:
            return order * np.logaddexp(log1p(-share), log(share) + (2 * x - 1) / (2 * noise**2))

        return max(0.0, _log_mean(log_f, noise, order)) / (order - 1)

    return [one(order) for order in ORDERS]


def _fixed(noise: float, share: float) -> list[float]:
    """Whole orders from 2 on; ∞ at the others."""
    tops = [int(order) for order in ORDERS if order == int(order) and order >= 2]
    powers = _log_powers(noise, max(tops))
    found = dict.fromkeys(ORDERS, inf)
    for order in tops:
        terms = [0.0]
        for j in range(2, order + 1):
            choose = lgamma(order + 1) - lgamma(j + 1) - lgamma(order - j + 1)
            terms.append(j * log(share) + choose + powers[j])
        found[float(order)] = float(np.logaddexp.reduce(terms)) / (order - 1)
    return [found[order] for order in ORDERS]


def _log_powers(noise: float, most: int) -> dict[int, float]:
    """j -> log of what the j-th term of the bound is multiplied by."""
    even = {2 * k: _log_even_moment(noise, 2 * k) for k in range(1, most // 2 + 2)}

    def simple(j: int) -> float:
        return log(2) + j * (j - 1) / (2 * noise**2)

    two = min(log(4) + log(expm1(1 / noise**2)) if noise > 0.05 else inf, simple(2))
    return {2: two} | {
        j: min(simple(j), log(4) + (even[j // 2 * 2] + even[-(-j // 2) * 2]) / 2) for j in range(3, most + 1)
    }


def _log_even_moment(noise: float, power: int) -> float:
    """log E [(e^{(2x − 1) / 2z²} − 1)^power]"""

    def log_f(x: Points) -> Points:
        u = (2 * x - 1) / (2 * noise**2)
        with np.errstate(divide="ignore"):
            return power * np.where(u > 40, u, np.log(np.abs(np.expm1(np.minimum(u, 40.0)))))

    return _log_mean(log_f, noise, power)
