"""A synthetic population: as many clients as wanted, each a function of the seed and its number.

Nothing is kept of a client that nobody asks for. What client k is follows from hashes of (seed, k): its domain, how
many rows it holds, its kind, capacity and device. Its rows are drawn when they are asked for, out of the rows of its
domain: of each class a run of neighbours in a shuffled list, so that a client holds no row twice. Clients may share
rows. Of the training rows of the data some are kept for validation, so that no client validates on what another one
trains on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from hardy.core import random
from hardy.core.federation import Client, Federation, Labels, Lazy, LazyClients, Rows
from hardy.data.capacity import Capacity
from hardy.data.dataset import Dataset
from hardy.data.kinds import Affording
from hardy.data.shifts import Shift, device, seen
from hardy.data.splits import joined_inputs
from hardy.errors import HardyError, unknown

_KEPT = 20_000
"""clients whose rows are remembered"""
_CAPACITIES = 1000
"""capacities that are dealt, of which each client draws one"""
_SORTS = 64
"""numbers of rows that stand for all"""


@dataclass(frozen=True, kw_only=True)
class PopulationChoice:
    """`[population]`: any number of clients, each drawn by a rule from the rows of [data], which are not dealt out."""

    clients: int = 0
    """how many; 0: none, the rows of [data] are dealt by data.split"""
    smallest: int = 8
    """training rows of the smallest clients"""
    largest: int = 64
    """training rows of the largest"""
    exponent: float = 1.5
    """sizes follow a power law: the share of clients with more than n rows falls as n to minus this; 0: equally many of
    each size"""
    alpha: float = inf
    """a client's shares of the classes are drawn from Dirichlet(alpha); inf: as in the data"""
    devices: int = 0
    """of data.shift, of which each client has one"""

    def __post_init__(self) -> None:
        if self.clients < 0:
            raise HardyError(f"population.clients is {self.clients}; it must be 0 or more.")
        if not self.clients and replace(self, clients=1) != PopulationChoice(clients=1):
            raise HardyError("[population] has no effect while population.clients is 0. Set it, or leave the rest out.")
        if not 2 <= self.smallest <= self.largest:
            raise HardyError(
                f"population.smallest is {self.smallest} and largest {self.largest}; they must be 2 or more, in order."
            )
        if not 0 <= self.exponent < inf:
            raise HardyError(f"population.exponent is {self.exponent}; it must be 0 or more, and finite.")
        if not self.alpha > 0:
            raise HardyError(f"population.alpha is {self.alpha}; it must be above 0, or inf.")
        if self.devices < 0:
            raise HardyError(f"population.devices is {self.devices}; it must be 0 or more.")


class _Examples(Lazy[int]):
    """The training rows of each client."""

    def __init__(self, population: "Population") -> None:
        super().__init__(len(population), population.rows_of)
        self.population = population

    def __array__(self, dtype: object = None, copy: object = None) -> NDArray[np.int64]:
        return self.population.sizes(np.arange(len(self)))


class Population(LazyClients):
    """The clients of a population."""

    def __init__(
        self,
        choice: PopulationChoice,
        pools: Sequence["_Pool"],
        seed: int,
        *,
        adversarial: Affording = None,
        capacity: Capacity | None = None,
    ) -> None:
        super().__init__(choice.clients, lru_cache(maxsize=_KEPT)(self._client))
        self.choice, self.pools = choice, pools
        self._key = random.fold(np.array([seed & (2**62 - 1)]), "population")
        self._seed, self.adversarial = seed, adversarial
        rng = random.stream(seed, "capacity")
        self.capacities = capacity.deal(_CAPACITIES, rng) if capacity else [1.0]
        self.examples = _Examples(self)
        if isinstance(adversarial, tuple) and not all(isinstance(who, str) for who in adversarial):
            raise HardyError("data.adversarial names clients by number; of a population take a share, or domains.")
        named = adversarial if isinstance(adversarial, dict | tuple) else ()
        known = [pool.domain for pool in pools]
        for domain in named:
            if domain not in known:
                raise unknown("domain in data.adversarial", domain, known)

    def _chance(self, word: str, clients: NDArray[np.int64]) -> NDArray[np.float64]:
        """A number in [0, 1) of each client."""
        drawn = random.fold(random.fold(self._key, word), clients) >> 11 & (2**53 - 1)
        chance: NDArray[np.float64] = drawn.astype(np.float64) * 2.0**-53
        return chance

    def sizes(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Training rows of some clients: the power law between the smallest and the largest, by its inverse."""
        low, high, a = self.choice.smallest, self.choice.largest + 1, self.choice.exponent
        u = self._chance("size", clients)
        if a == 0:
            return (low + u * (high - low)).astype(np.int64)
        drawn: NDArray[np.int64] = ((low**-a + u * (high**-a - low**-a)) ** (-1 / a)).astype(np.int64)
        return drawn.clip(low, high - 1)

    def rows_of(self, client: int) -> int:
        return int(self.sizes(np.array([client]))[0])

    def _client(self, number: int) -> Client:
        one = np.array([number])
        at = int(self._chance("domain", one)[0] * len(self.pools))
        pool = self.pools[at]
        camera = int(self._chance("device", one)[0] * max(1, self.choice.devices))
        capacity = self.capacities[int(self._chance("capacity", one)[0] * len(self.capacities))]
        train, validation, test = pool.draw(
            self.rows_of(number), self.choice.alpha, random.stream(self._seed, number, "rows")
        )
        return Client(
            domain=pool.domain,
            train=train + camera * pool.camera_train,
            validation=validation + camera * pool.camera_train,
            test=test + camera * pool.camera_test,
            kind=self._kind(float(self._chance("kind", one)[0]), pool.domain, capacity),
            capacity=capacity,
        )

    def _kind(self, chance: float, domain: str, capacity: float) -> str:
        can = self.adversarial
        if can is None:
            return ""
        if can == "rich":
            return "AT" if capacity == max(self.capacities) else "ST"
        if isinstance(can, dict):
            share = can.get(domain, 0.0)
        else:
            share = float(domain in can) if isinstance(can, tuple) else float(can)
        return "AT" if chance < share else "ST"

    @property
    def sorts(self) -> list[Client]:  # type: ignore[override]
        none = np.zeros(0, np.int64)
        low, high = self.choice.smallest, self.choice.largest
        sizes = np.unique(np.linspace(low, high, min(_SORTS, high - low + 1)).astype(np.int64))
        return [
            Client(
                domain=pool.domain,
                train=np.zeros(size, np.int64),
                validation=none,
                test=none,
                kind=self._kind(chance, pool.domain, capacity),
                capacity=capacity,
            )
            for pool in self.pools
            for chance in (0.0, 1.0)
            for capacity in sorted(set(self.capacities))
            for size in sizes
        ]


@dataclass(frozen=True, kw_only=True)
class _Pool:
    """The rows of a domain, by class and shuffled."""

    domain: str
    train: list[Rows]
    validation: list[Rows]
    test: list[Rows]
    camera_train: int
    """rows between two devices' views of a training image"""
    camera_test: int

    def draw(self, count: int, alpha: float, rng: np.random.Generator) -> tuple[Rows, Rows, Rows]:
        """Training rows of a client, and validation and test rows in the same proportions to those of the pool."""
        held = np.array([len(rows) for rows in self.train])
        shares = held / held.sum()
        if alpha < inf:
            drawn = rng.dirichlet(np.full(len(held), alpha)) * (held > 0)
            shares = drawn / drawn.sum() if drawn.sum() > 0 else shares
        starts = rng.random((3, len(held)))
        found = []
        for part, begin in zip((self.train, self.validation, self.test), starts, strict=True):
            there = np.array([len(rows) for rows in part])
            wanted = count if part is self.train else min(there.sum(), max(1, round(count * there.sum() / held.sum())))
            likely = shares * (there > 0) if (shares * there).any() else there
            counts = rng.multinomial(wanted, likely / likely.sum()) if wanted else there * 0
            found.append(_runs(part, _fitted(counts, there), begin))
        train, validation, test = found
        return rng.permutation(train), validation, test


def _fitted(counts: NDArray[np.int64], there: NDArray[np.int64]) -> NDArray[np.int64]:
    """What is more than a class has comes from those that have most left.

    >>> _fitted(np.array([5, 1, 0]), np.array([3, 9, 4])).tolist()
    [3, 3, 0]
    """
    given: NDArray[np.int64] = np.minimum(counts, there)
    short = int(counts.sum() - given.sum())
    for group in np.argsort(given - there, kind="stable") if short else ():
        more = min(short, int(there[group] - given[group]))
        given[group] += more
        short -= more
    return given


def _runs(groups: Sequence[Rows], counts: NDArray[np.int64], starts: NDArray[np.float64]) -> Rows:
    """So many neighbours of each group from a place in it, round the end."""
    found = [
        rows[(int(start * len(rows)) + np.arange(count)) % len(rows)]
        for rows, count, start in zip(groups, counts, starts, strict=True)
        if count
    ]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def populate(
    dataset: Dataset,
    choice: PopulationChoice,
    *,
    validation: float,
    limit: int | None,
    seed: int,
    adversarial: Affording = None,
    capacity: Capacity | None = None,
    shift: Shift | None = None,
    shift_test: bool = False,
) -> Federation:
    """A federation of so many clients over the rows of a data set."""
    domains = dataset.domains
    x_train = joined_inputs(d.x_train[:limit] for d in domains)
    x_test = joined_inputs(d.x_test for d in domains)
    y_train, y_test = np.concatenate([d.y_train[:limit] for d in domains]), np.concatenate([d.y_test for d in domains])
    bases = len(x_train), len(x_test) if shift_test else 0
    if (shift is None) != (not choice.devices):
        raise HardyError(
            f"population.devices is {choice.devices} and data.shift {'absent' if shift is None else 'given'}: each "
            "client has one of so many devices, and data.shift says how they differ. Give both, or none."
        )
    if shift is not None:
        keys = [device(seed, number) for number in range(choice.devices)]
        x_train = np.concatenate([seen(x_train, shift, key) for key in keys])
        y_train = np.tile(y_train, choice.devices)
        if shift_test:
            x_test = np.concatenate([seen(x_test, shift, key) for key in keys])
            y_test = np.tile(y_test, choice.devices)
    pools, at_train, at_test = [], 0, 0
    for number, domain in enumerate(domains):
        rng = random.stream(seed, "population", number)
        train, kept = _by_class(domain.y_train[:limit], len(dataset.classes), rng, validation)
        test, _ = _by_class(domain.y_test, len(dataset.classes), rng, 0.0)
        if (most := sum(map(len, train))) < choice.largest:
            raise HardyError(
                f"population.largest is {choice.largest}, but {domain.name} has {most} training rows beside those kept "
                "for validation. Lower it, or raise data.limit."
            )
        pools.append(
            _Pool(
                domain=domain.name,
                train=[rows + at_train for rows in train],
                validation=[rows + at_train for rows in kept],
                test=[rows + at_test for rows in test],
                camera_train=bases[0],
                camera_test=bases[1],
            )
        )
        at_train, at_test = at_train + len(domain.y_train[:limit]), at_test + len(domain.y_test)
    return Federation(
        name=dataset.name,
        classes=dataset.classes,
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        clients=Population(choice, pools, seed, adversarial=adversarial, capacity=capacity),
        bounded=dataset.bounded,
    )


def _by_class(labels: Labels, classes: int, rng: np.random.Generator, kept: float) -> tuple[list[Rows], list[Rows]]:
    """Rows of each class, shuffled; and a share of each kept apart."""
    found = [rng.permutation(np.flatnonzero(labels == label)) for label in range(classes)]
    ends = [len(rows) - int(len(rows) * kept + 1e-9) for rows in found]
    return [r[:end] for r, end in zip(found, ends, strict=True)], [r[end:] for r, end in zip(found, ends, strict=True)]


__all__ = ["Population", "PopulationChoice", "populate"]
