"""The account beside formulas worked out by hand and beside dp-accounting."""

from math import comb, erf, exp, inf, log, sqrt

import numpy as np
import pytest

from hardy.core.account import ORDERS, Mechanism, epsilon_of, noise_for
from hardy.errors import HardyError


def one(noise, share=1.0, sampling="fixed", times=1):
    return Mechanism(what="sum", unit="client", noise=noise, share=share, sampling=sampling, times=times)


@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("share", [0.01, 0.2, 0.9])
def test_poisson_at_whole_orders_is_the_binomial_sum(noise, share):
    """Mironov, Talwar & Zhang 2019, equation (13): a sum over k of C(α, k) (1 − q)^(α−k) q^k e^((k² − k) / 2z²)."""
    found = dict(zip(ORDERS, one(noise, share, "poisson").rdp, strict=True))
    for order in (2, 3, 7, 20):
        terms = [
            log(comb(order, k)) + (order - k) * log(1 - share) + k * log(share) + (k * k - k) / (2 * noise**2)
            for k in range(order + 1)
        ]
        assert found[order] == pytest.approx(np.logaddexp.reduce(terms) / (order - 1), rel=1e-9, abs=1e-13)


def test_orders_between_whole_ones_lie_between_them():
    """Divergences rise with their order, and (α − 1) times them is convex."""
    for mechanism in (one(0.8, 0.1, "poisson"), one(3.0, 0.01, "poisson")):
        values = mechanism.rdp
        assert (np.diff(values) > 0).all()
        tenths = (np.array(ORDERS[:99]) - 1) * values[:99]
        assert (np.diff(tenths, 2) > -1e-9).all()


@pytest.mark.parametrize("noise", [1.0, 3.0])
@pytest.mark.parametrize("share", [0.01, 0.1])
def test_fixed_cohorts_by_alternating_sums(noise, share):
    """Wang et al. 2019, Theorem 27, with its moments written out as the alternating sums of its proof."""

    def moment(power):
        return sum((-1) ** (power - i) * comb(power, i) * exp(i * (i - 1) / (2 * noise**2)) for i in range(power + 1))

    found = dict(zip(ORDERS, one(noise, share).rdp, strict=True))
    for order in (2, 3, 6):
        total = 1.0
        for j in range(2, order + 1):
            simple = 2 * exp(j * (j - 1) / (2 * noise**2))
            if j == 2:
                factor = min(4 * (exp(1 / noise**2) - 1), simple)
            else:
                factor = min(simple, 4 * sqrt(moment(j // 2 * 2) * moment(-(-j // 2) * 2)))
            total += comb(order, j) * share**j * factor
        assert found[order] == pytest.approx(log(total) / (order - 1), rel=1e-6)


@pytest.mark.parametrize("noise", [0.7, 1.0, 2.0, 6.0])
def test_no_epsilon_is_below_the_exact_one(noise):
    """Of a single Gaussian mechanism δ(ε) is known (Balle & Wang, ICML 2018): no account may promise less."""

    def below(x):
        return (1 + erf(x / sqrt(2))) / 2

    epsilon = epsilon_of([one(noise)], 1e-5)
    exact = below(1 / (2 * noise) - epsilon * noise) - exp(epsilon) * below(-1 / (2 * noise) - epsilon * noise)
    assert exact <= 1e-5
    tighter = 0.8 * epsilon
    assert below(1 / (2 * noise) - tighter * noise) - exp(tighter) * below(-1 / (2 * noise) - tighter * noise) > 1e-5


def test_what_an_account_must_do():
    base = epsilon_of([one(1.0, 0.1, "poisson", times=50)], 1e-5)
    assert base == epsilon_of([one(1.0, 0.1, "poisson", times=20), one(1.0, 0.1, "poisson", times=30)], 1e-5)
    assert epsilon_of([one(1.2, 0.1, "poisson", times=50)], 1e-5) < base < epsilon_of([one(1.0, 0.1, times=50)], 1e-5)
    assert epsilon_of([one(1.0, 0.05, "poisson", times=50)], 1e-5) < base
    assert epsilon_of([one(1.0, 1.0, "poisson", times=50)], 1e-5) == epsilon_of([one(1.0, times=50)], 1e-5)
    assert epsilon_of([], 1e-5) == epsilon_of([one(1.0, times=0)], 1e-5) == 0.0
    assert epsilon_of([one(0.0)], 1e-5) == inf


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_noise_for_an_epsilon(sampling, epsilon):
    noise = noise_for(epsilon, delta=1e-5, times=100, share=0.05, sampling=sampling)
    assert 0.99 * epsilon < epsilon_of([one(noise, 0.05, sampling, times=100)], 1e-5) <= epsilon
    with pytest.raises(HardyError, match="above 0"):
        noise_for(0.0, delta=1e-5, times=1)


STORED = {
    ("poisson", 1.0, 0.01, 1000): 2.1014,
    ("poisson", 2.0, 0.1, 100): 2.5806,
    ("poisson", 0.6, 0.001, 100): 2.2334,
    ("fixed", 1.0, 0.1, 100): 14.0538,
    ("fixed", 2.0, 0.01, 100): 0.4347,
    ("fixed", 2.0, 0.1, 100): 5.3790,
}
"""(sampling, z, q, times) -> ε at δ = 1e-5 of dp-accounting 0.6.0, RdpAccountant with its own orders"""


@pytest.mark.parametrize("asked", STORED, ids=str)
def test_dp_accounting_gave_the_same(asked):
    sampling, noise, share, times = asked
    assert epsilon_of([one(noise, share, sampling, times)], 1e-5) == pytest.approx(STORED[asked], rel=0.01)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("noise", [0.8, 1.5, 3.0])
@pytest.mark.parametrize("share", [0.01, 0.1])
def test_dp_accounting_gives_the_same(sampling, noise, share):
    event = pytest.importorskip("dp_accounting.dp_event", reason="dp-accounting is not installed")
    from dp_accounting.privacy_accountant import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    relation = "ADD_OR_REMOVE_ONE" if sampling == "poisson" else "REPLACE_ONE"
    orders = [order for order in ORDERS if sampling == "poisson" or (order >= 2 and order == int(order))]
    theirs = RdpAccountant(orders, NeighboringRelation[relation])
    summed = event.GaussianDpEvent(noise)
    if sampling == "poisson":
        theirs.compose(event.PoissonSampledDpEvent(share, summed), 100)
    else:
        theirs.compose(event.SampledWithoutReplacementDpEvent(1000, round(1000 * share), summed), 100)
    assert epsilon_of([one(noise, share, sampling, 100)], 1e-5) == pytest.approx(theirs.get_epsilon(1e-5), rel=0.01)


@pytest.mark.parametrize("noise", [0.8, 2.0])
def test_opacus_gives_the_same(noise):
    rdp = pytest.importorskip("opacus.accountants.analysis.rdp", reason="opacus is not installed")
    theirs = rdp.compute_rdp(q=0.05, noise_multiplier=noise, steps=1, orders=list(ORDERS[5:99]))
    np.testing.assert_allclose(one(noise, 0.05, "poisson").rdp[5:99], theirs, rtol=1e-6)
