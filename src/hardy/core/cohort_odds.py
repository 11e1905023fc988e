"""How often a sampled cohort holds more hostile clients than a rule tolerates.

Of cohorts of a fixed size the chance is hypergeometric, of Poisson cohorts binomial.
"""

from dataclasses import dataclass
from math import comb, exp, lgamma, log, log1p

from hardy.core.account import Sampling
from hardy.core.protocols import Aggregator, walk


@dataclass(frozen=True, kw_only=True)
class CohortOdds:
    """The chance that a round is beyond its rule."""

    population: int
    cohort: int
    """clients asked in a round; of Poisson cohorts, expected"""
    tolerated: int
    """f, the least of the aggregator's parts"""
    hostile: int
    """hostile clients of all: those of the experiment, or where it names none, as large a share as f is of a cohort"""
    named: bool
    """whether the experiment names hostile clients"""
    chance: float
    """that a cohort holds more than f of them"""
    majority: float
    """that they are half of the cohort or more; of Poisson cohorts, of the expected one"""

    @property
    def warning(self) -> str | None:
        """What is said before a run."""
        if not self.chance:
            return None
        fix = "Ask more clients (cohort), raise f, or remember the clients that are not asked (delayed_momentum)."
        if self.named:
            return (
                f"{self.hostile} of {self.population} clients are hostile and the rule tolerates f = {self.tolerated} "
                f"in a cohort of {self.cohort}: {self.chance:.1%} of the rounds hold more. {fix}"
            )
        return (
            f"the rule tolerates f = {self.tolerated} in a cohort of {self.cohort}. If as large a share of all clients "
            f"is hostile, {self.hostile} of {self.population}, {self.chance:.1%} of the rounds hold more. {fix}"
        )


def cohort_odds(
    aggregator: Aggregator, hostile: int, cohort: int, population: int, sampling: Sampling = "fixed"
) -> CohortOdds | None:
    """The odds of an aggregator with an f; None: it has none, or nobody is hostile and everybody asked.

    A stage that remembers all clients puts all of them before the rule, whoever is asked.
    """
    parts = list(walk(aggregator))
    if any(getattr(part, "remembers_all", False) for part in parts):
        cohort = population
    tolerated = min((part.f for part in parts if hasattr(part, "f")), default=None)
    if tolerated is None or (cohort == population and not hostile):
        return None
    assumed = hostile or tolerated * population // cohort

    def more_than(f: int) -> float:
        if sampling == "poisson" and cohort < population:
            return sum(_binomial(k, assumed, cohort / population) for k in range(f + 1, assumed + 1))
        return chance_of_more(f, assumed, cohort, population)

    return CohortOdds(
        population=population,
        cohort=cohort,
        tolerated=tolerated,
        hostile=assumed,
        named=hostile > 0,
        chance=more_than(tolerated),
        majority=more_than((cohort + 1) // 2 - 1),
    )


def chance_of_more(f: int, hostile: int, cohort: int, population: int) -> float:
    """That a cohort, drawn without replacement, holds more than f of the hostile clients.

    Of 50 clients with ten hostile ones, a cohort of five holds three or more in
    (C(10,3)·C(40,2) + C(10,4)·C(40,1) + C(10,5)) / C(50,5) of the draws:
    >>> round(chance_of_more(2, 10, 5, 50), 4)
    0.0483
    """
    draws = (comb(hostile, k) * comb(population - hostile, cohort - k) for k in range(f + 1, min(hostile, cohort) + 1))
    return sum(draws) / comb(population, cohort)


def _binomial(k: int, trials: int, share: float) -> float:
    choose = lgamma(trials + 1) - lgamma(k + 1) - lgamma(trials - k + 1)
    return exp(choose + k * log(share) + (trials - k) * log1p(-share))
