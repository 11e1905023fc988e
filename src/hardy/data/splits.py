"""Who holds which rows: rules that deal a pool of labelled rows to clients, and the federation they make."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from hardy.core import random
from hardy.core.federation import Client, Federation, Labels, Pixels, Rows
from hardy.data.dataset import Dataset, Domain
from hardy.errors import HardyError, unknown
from hardy.registry import part

Rule = Callable[[Labels, int, Generator], list[Rows]]
"""Labels of a pool, number of clients, generator -> the rows of each client, no row twice. A client's last rows become
its validation set, so a rule that sorts must shuffle in the end."""
Testing = Literal["split", "shared", "matched"]

_TRIES = 1000


def federate(
    dataset: Dataset,
    rule: Rule,
    *,
    clients: int,
    pooled: bool = False,
    validation: float = 0.1,
    test: Testing = "split",
    limit: int | None = None,
    held_out: Sequence[str] = (),
    seed: int,
) -> Federation:
    """Deals each domain to `clients` clients; pooled: all domains together, so that a client may hold several.

    `test` rows of a pool: split = cut evenly (natural: each owner's own), shared = all for every client, matched =
    each class dealt in proportion to the clients' training rows of it. `limit` keeps the first training rows of
    each domain. Domains that are `held_out` are dealt to nobody.
    """
    _require(clients >= 1, "clients", clients, "1 or more")
    _require(0 <= validation < 1, "validation", validation, "in [0, 1): the share of a client's rows kept apart")
    _require(limit is None or limit >= 1, "limit", limit, "1 or more training rows a domain, or None for all")
    if test not in get_args(Testing):
        raise unknown("test", test, get_args(Testing))

    domains, dealt_out = _without(dataset, held_out)
    dataset = replace(dataset, domains=domains)
    x_train = joined_inputs(d.x_train[:limit] for d in domains)
    y_train = np.concatenate([d.y_train[:limit] for d in domains])
    y_test = np.concatenate([d.y_test for d in domains])
    home_train = np.repeat(np.arange(len(domains)), [len(d.y_train[:limit]) for d in domains])
    home_test = np.repeat(np.arange(len(domains)), [len(d.y_test) for d in domains])
    by_owner = rule is _by_owner
    keys_train, keys_test = _owners(dataset, limit) if by_owner else (y_train, y_test)

    made: list[Client] = []
    for number in range(1 if pooled else dealt_out):
        pool, pool_test = (
            np.flatnonzero(home < dealt_out if pooled else home == number) for home in (home_train, home_test)
        )
        dealt = rule(keys_train[pool], clients, random.stream(seed, "split", number))
        held = [_part(pool[rows], validation) for rows in dealt]
        name = dataset.name if pooled else domains[number].name
        _refuse_empty([train for train, _ in held], first=len(made), rows=len(pool), name=name)
        if test == "split" and by_owner:
            tests = _owned(pool_test, keys_test, [int(keys_train[train[0]]) for train, _ in held])
        else:
            tests = _tests(test, pool_test, y_test, [y_train[train] for train, _ in held])
        made += [
            Client(
                domain=domains[np.bincount(home_train[train]).argmax()].name,
                train=train,
                validation=kept,
                test=rows,
            )
            for (train, kept), rows in zip(held, tests, strict=True)
        ]
    return Federation(
        name=dataset.name,
        classes=dataset.classes,
        x_train=x_train,
        y_train=y_train,
        x_test=joined_inputs(d.x_test for d in domains),
        y_test=y_test,
        clients=tuple(made),
        bounded=dataset.bounded,
        held_out=tuple(
            Client(
                domain=domains[number].name,
                train=np.flatnonzero(home_train == number),
                validation=np.zeros(0, np.int64),
                test=np.flatnonzero(home_test == number),
            )
            for number in range(dealt_out, len(domains))
        ),
    )


def _without(dataset: Dataset, held_out: Sequence[str]) -> tuple[tuple[Domain, ...], int]:
    """The domains, those that are held out last, and how many are not."""
    known = {domain.name: domain for domain in dataset.domains}
    for name in held_out:
        if name not in known:
            raise unknown("domain in data.held_out", name, known)
        if not len(known[name].y_test):
            raise HardyError(f"data.held_out is {name}, but it has no test rows to measure on. Leave it out.")
    kept = [domain for name, domain in known.items() if name not in held_out]
    if not kept:
        raise HardyError(
            f"data.held_out names all {len(known)} domains, so nobody is left to train. Name fewer of "
            f"{', '.join(known)}."
        )
    return (*kept, *(known[name] for name in dict.fromkeys(held_out))), len(kept)


@part("split")
def iid() -> Rule:
    """Shuffled, in equal parts."""
    return lambda labels, clients, rng: np.array_split(rng.permutation(len(labels)), clients)


@part("split")
def blocks() -> Rule:
    """Equal parts in the order of the data; the last takes the residual (FedBN)."""

    def rule(labels: Labels, clients: int, rng: Generator) -> list[Rows]:
        return np.split(np.arange(len(labels)), len(labels) // clients * np.arange(1, clients))

    return rule


@part("split")
def dirichlet(*, alpha: float = 0.1, minimum: int = 2) -> Rule:
    """Each class cut by shares from Dirichlet(alpha), drawn again until every client has `minimum` rows.

    alpha: the smaller, the fewer classes a client has
    minimum: rows that every client must get
    """
    _require(0 < alpha <= 1e6, "dirichlet's alpha", alpha, "in (0, 1e6]: the smaller, the fewer classes a client has")
    _require(minimum >= 1, "dirichlet's minimum", minimum, "1 row or more")

    def rule(labels: Labels, clients: int, rng: Generator) -> list[Rows]:
        classes = [rng.permutation(rows) for rows in _groups(labels)]
        for _ in range(_TRIES if len(labels) >= minimum * clients else 0):
            shares = rng.dirichlet(np.full(clients, alpha), len(classes))
            dealt = _join(_cut(rows, share) for rows, share in zip(classes, shares, strict=True))
            if min(map(len, dealt)) >= minimum:
                return _shuffled(dealt, rng)
        raise HardyError(
            f"dirichlet(alpha={alpha}) found no way to give each of {clients} clients {minimum} of {len(labels)} rows. "
            "Take fewer clients, a larger alpha or a smaller minimum."
        )

    return rule


@part("split")
def classes_per_client(*, classes: int = 3) -> Rule:
    """Each client takes the next classes of a shuffled, cycled list; each class is cut evenly among its clients
    (Split-Mix).

    classes: classes a client holds
    """
    _require(classes >= 1, "classes_per_client's classes", classes, "1 or more")

    def rule(labels: Labels, clients: int, rng: Generator) -> list[Rows]:
        groups = _groups(labels)
        _require(
            -(-len(groups) // clients) <= classes <= len(groups),
            "classes_per_client's classes",
            classes,
            f"at most {len(groups)}, the classes there are, and at least that over the {clients} clients, or some "
            "class has no holder; change it or the number of clients",
        )
        taken = np.resize(rng.permutation(len(groups)), (clients, classes))
        pieces: list[list[Rows]] = [[] for _ in range(clients)]
        for group, rows in enumerate(groups):
            holders = np.flatnonzero((taken == group).any(1))
            for holder, piece in zip(holders, np.array_split(rng.permutation(rows), len(holders)), strict=True):
                pieces[holder].append(piece)
        return _shuffled(map(np.concatenate, pieces), rng)

    return rule


@part("split")
def skew(*, percent: float = 2.0, sizes: tuple[float, ...] = ()) -> Rule:
    """Sorted by label and cut in one chunk per client, who gives `percent` of it to each of the others (SFAT).

    Chunks are equal, or in proportion to `sizes`.

    percent: of its chunk that a client gives to each of the others
    sizes: of the chunks, one a client; absent: equal ones
    """
    _require(0 <= percent <= 100, "skew's percent", percent, "in [0, 100]")
    _require(all(0 < size < float("inf") for size in sizes), "skew's sizes", list(sizes), "a number above 0 a client")

    def rule(labels: Labels, clients: int, rng: Generator) -> list[Rows]:
        kept = 100 - (clients - 1) * percent
        if kept < 0:
            raise HardyError(
                f"skew(percent={percent}) with {clients} clients gives away {100 - kept:g} % of each chunk; at most "
                f"100 % can be given. Take at most {int(100 // percent) + 1} clients or a smaller percent."
            )
        _require(len(sizes) in (0, clients), "the number of skew's sizes", len(sizes), f"{clients}, one a client")
        ordered = np.argsort(labels, kind="stable")
        chunks = _cut(ordered, sizes) if sizes else np.array_split(ordered, clients)
        shares = np.where(np.eye(clients, dtype=bool), kept, percent)
        dealt = _join(_cut(rng.permutation(chunk), share) for chunk, share in zip(chunks, shares, strict=True))
        return _shuffled(dealt, rng)

    return rule


@part("split")
def gamma_similarity(*, gamma: float = 0.1) -> Rule:
    """A share gamma is dealt iid; the rest is sorted by label and cut in one chunk per client (FBN).

    gamma: the share dealt iid: 0 is sorted by label, 1 is iid
    """
    _require(0 <= gamma <= 1, "gamma_similarity's gamma", gamma, "in [0, 1]: 0 is sorted by label, 1 is iid")

    def rule(labels: Labels, clients: int, rng: Generator) -> list[Rows]:
        alike, rest = _cut(rng.permutation(len(labels)), [gamma, 1 - gamma])
        rest = rest[np.argsort(labels[rest], kind="stable")]
        return _shuffled(_join(np.array_split(rows, clients) for rows in (alike, rest)), rng)

    return rule


@part("split")
def quantity_skew(*, sigma: float = 1.0) -> Rule:
    """Shuffled, in parts of log-normal sizes; sigma 0 makes them equal.

    sigma: deviation of the logarithm of the size
    """
    _require(0 <= sigma <= 10, "quantity_skew's sigma", sigma, "in [0, 10]: the deviation of the logarithm of the size")
    return lambda labels, clients, rng: _cut(rng.permutation(len(labels)), rng.lognormal(0, sigma, clients))


@part("split")
def power_law(*, exponent: float = 1.0) -> Rule:
    """Shuffled, in parts whose sizes fall with a power of their rank: client k holds (k + 1)^−exponent.

    exponent: 0: equal parts; with 1 and ten clients they hold 34, 17, 11, ... 3.4 %
    """
    _require(0 <= exponent < float("inf"), "power_law's exponent", exponent, "0 or more, and finite")
    return lambda labels, clients, rng: _cut(rng.permutation(len(labels)), np.arange(1.0, clients + 1) ** -exponent)


@part("split")
def natural() -> Rule:
    """One client for each owner the data names (LEAF), however many clients are asked for."""
    return _by_owner


def _by_owner(owners: Labels, clients: int, rng: Generator) -> list[Rows]:
    return _groups(owners)


def _require(good: bool, what: str, value: object, limit: str) -> None:
    if not good:
        raise HardyError(f"{what} is {value}; it must be {limit}.")


def _groups(keys: Labels) -> list[Rows]:
    """The rows of each key, in the order of the keys."""
    order = np.argsort(keys, kind="stable")
    return [rows for rows in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1) if len(rows)]


def _cut(rows: Rows, shares: Sequence[float] | NDArray[np.float64]) -> list[Rows]:
    """Consecutive pieces in proportion to the shares; rounding never loses a row."""
    ends = np.cumsum(shares)
    return np.split(rows, np.rint(ends[:-1] / ends[-1] * len(rows)).astype(np.int64))


def _join(pieces: Iterable[list[Rows]]) -> list[Rows]:
    """[source][client] -> [client]"""
    return [np.concatenate(own) for own in zip(*pieces, strict=True)]


def _shuffled(dealt: Iterable[Rows], rng: Generator) -> list[Rows]:
    return [rng.permutation(rows) for rows in dealt]


def _part(rows: Rows, validation: float) -> tuple[Rows, Rows]:
    """Training rows and, at the end, validation rows."""
    kept = len(rows) - int(len(rows) * validation + 1e-9)  # 0.29 of 100 is 29
    return rows[:kept], rows[kept:]


def _refuse_empty(dealt: Sequence[Rows], *, first: int, rows: int, name: str) -> None:
    for client, train in enumerate(dealt, first):
        if not len(train):
            raise HardyError(
                f"client {client} would get 0 of the {rows} training rows of {name}, dealt to {len(dealt)} clients; "
                "it needs 1. Take fewer clients, a higher limit or a more even split."
            )


def _tests(test: Testing, pool: Rows, labels: Labels, trained: Sequence[Labels]) -> list[Rows]:
    """The test rows of clients who trained on these labels."""
    if test == "shared":
        return [pool] * len(trained)
    return _matched(pool, labels, trained) if test == "matched" else np.array_split(pool, len(trained))


def _matched(pool: Rows, labels: Labels, trained: Sequence[Labels]) -> list[Rows]:
    """Test rows of each class by largest remainder; those of a class that nobody trains on go to nobody."""
    dealt: list[list[Rows]] = [[] for _ in trained]
    for rows in _groups(labels[pool]):
        found = pool[rows]
        held = np.array([np.count_nonzero(own == labels[found[0]]) for own in trained])
        if held.any():
            exact = len(found) * held / held.sum()
            counts = exact.astype(np.int64)
            counts[np.argsort(counts - exact, kind="stable")[: len(found) - counts.sum()]] += 1
            for own, piece in zip(dealt, np.split(found, np.cumsum(counts)[:-1]), strict=True):
                own.append(piece)
    return [np.sort(np.concatenate([pool[:0], *own])) for own in dealt]


def _owned(pool: Rows, owners: Labels, wanted: Sequence[int]) -> list[Rows]:
    """Test rows of each wanted owner; none where the owner has only training rows."""
    found = {int(owners[pool[rows[0]]]): pool[rows] for rows in _groups(owners[pool])}
    return [found.get(owner, pool[:0]) for owner in wanted]


def _owners(dataset: Dataset, limit: int | None) -> tuple[Labels, Labels]:
    """The owner of each training and test row, made unlike between domains."""

    def named(domain: Domain) -> tuple[Labels, Labels]:
        if domain.owners_train is None or domain.owners_test is None:
            raise HardyError(
                f"natural() needs an owner for each row, and {dataset.name} names none in {domain.name}. "
                "Take another split, as iid() or dirichlet()."
            )
        return domain.owners_train[:limit], domain.owners_test

    pairs = [named(domain) for domain in dataset.domains]
    width = 1 + max(int(owners.max(initial=0)) for pair in pairs for owners in pair)
    train, test = (
        np.concatenate([owners + width * number for number, owners in enumerate(side)])
        for side in zip(*pairs, strict=True)
    )
    return train, test


def joined_inputs(domains: Iterable[Pixels]) -> Pixels:
    """Of all domains, channels first."""
    x: NDArray[Any] = np.concatenate(list(domains))
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if x.ndim == 4 else x


__all__ = [
    "blocks",
    "classes_per_client",
    "dirichlet",
    "federate",
    "gamma_similarity",
    "iid",
    "joined_inputs",
    "natural",
    "power_law",
    "quantity_skew",
    "skew",
]
