"""Rules deal every row once; federations keep train, validation and test apart."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hardy.core import random
from hardy.core.federation import Federation
from hardy.data.dataset import Dataset, Domain
from hardy.data.splits import (
    Rule,
    blocks,
    classes_per_client,
    dirichlet,
    federate,
    gamma_similarity,
    iid,
    natural,
    power_law,
    quantity_skew,
    skew,
)
from hardy.errors import HardyError
from hardy.registry import PARTS

RULES: dict[str, Rule] = {
    "iid": iid(),
    "blocks": blocks(),
    "dirichlet": dirichlet(alpha=1.0, minimum=1),
    "classes_per_client": classes_per_client(classes=3),
    "skew": skew(percent=8.0),
    "gamma_similarity": gamma_similarity(gamma=0.3),
    "power_law": power_law(exponent=0.5),
    "quantity_skew": quantity_skew(sigma=0.5),
    "natural": natural(),
}


def deal(rule: Rule, labels: NDArray[np.int64], clients: int, seed: int = 0) -> list[NDArray[np.int64]]:
    return rule(labels, clients, random.stream(seed, "split", 0))


def labelled(rows: int, classes: int = 10, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(np.arange(rows) % classes)


def domain(name: str, rows: int, tests: int, seed: int) -> Domain:
    """Images that tell domain, split and row apart, so that a wrong index shows in a pixel."""
    x = np.zeros((rows + tests, 2, 4, 3), np.uint8)
    x[:, 0, 0] = np.stack(
        [np.full(rows + tests, seed), np.arange(rows + tests) // 256, np.arange(rows + tests) % 256], 1
    )
    return Domain(
        name=name,
        x_train=x[:rows],
        y_train=labelled(rows, seed=seed),
        x_test=x[rows:],
        y_test=labelled(tests, seed=seed + 50),
    )


@pytest.fixture
def two() -> Dataset:
    domains = (domain("sun", 200, 60, 1), domain("rain", 120, 40, 2))
    return Dataset(name="weather", classes=tuple("0123456789"), domains=domains)


def owned(dataset: Dataset) -> Dataset:
    return replace(
        dataset,
        domains=tuple(
            replace(d, owners_train=np.arange(len(d.y_train)) % 7, owners_test=np.arange(len(d.y_test)) % 6)
            for d in dataset.domains
        ),
    )


def test_every_registered_rule_is_tested_here() -> None:
    assert PARTS["split"].keys() == RULES.keys()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(RULES)),
    rows=st.integers(200, 400),
    clients=st.integers(4, 12),
    seed=st.integers(0, 2**40),
)
def test_rules_deal_every_row_once(name: str, rows: int, clients: int, seed: int) -> None:
    labels = labelled(rows, clients if name == "natural" else 10)
    dealt = deal(RULES[name], labels, clients, seed)
    assert len(dealt) == clients
    assert sorted(np.concatenate(dealt).tolist()) == list(range(rows))


@pytest.mark.parametrize("name", sorted(RULES.keys() - {"blocks", "natural"}))
def test_the_seed_decides(name: str) -> None:
    first, again, other = (deal(RULES[name], labelled(300), 5, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_blocks_are_contiguous_and_the_last_takes_the_residual() -> None:
    dealt = deal(blocks(), labelled(23), 5)
    assert [len(rows) for rows in dealt] == [4, 4, 4, 4, 7]
    assert np.concatenate(dealt).tolist() == list(range(23))


def test_skew_keeps_92_percent_and_gives_2_to_each_other() -> None:
    labels = labelled(5000, classes=5)  # so a chunk is a class
    counts = np.array([np.bincount(labels[rows], minlength=5) for rows in deal(skew(percent=2.0), labels, 5)])
    assert counts.tolist() == (np.full((5, 5), 20) + np.eye(5, dtype=int) * 900).tolist()


def test_skew_gives_of_every_class_in_a_chunk() -> None:
    labels = labelled(5000)
    for rows in deal(skew(percent=2.0), labels, 5):
        assert np.bincount(labels[rows], minlength=10).all()


def test_skew_at_its_limit_keeps_as_much_as_it_gives() -> None:
    labels = labelled(5000, classes=50)
    counts = np.array([np.bincount(labels[rows], minlength=50) for rows in deal(skew(percent=2.0), labels, 50)])
    assert (counts == 2).all()  # SFAT's K = 50 is iid


def test_gamma_from_sorted_to_iid() -> None:
    labels = labelled(1000)
    kinds = [[len(set(labels[rows])) for rows in deal(gamma_similarity(gamma=g), labels, 5)] for g in (0.0, 1.0)]
    assert kinds == [[2] * 5, [10] * 5]
    tenth = deal(gamma_similarity(gamma=0.1), labels, 5)
    assert [len(rows) for rows in tenth] == [200] * 5
    own = [np.isin(labels[rows], [2 * i, 2 * i + 1]).mean() for i, rows in enumerate(tenth)]
    assert min(own) > 0.88 and max(own) < 0.97  # 0.9 sorted + a fifth of 0.1


def test_skew_of_unequal_sizes() -> None:
    labels = np.repeat(np.arange(3), [600, 100, 300])
    dealt = deal(skew(percent=2.0, sizes=(6, 1, 3)), labels, 3)
    counts = np.array([np.bincount(labels[rows], minlength=3) for rows in dealt])
    assert counts.tolist() == [[576, 2, 6], [12, 96, 6], [12, 2, 288]]


def test_dirichlet_alpha_sets_the_skew_and_minimum_holds() -> None:
    labels = labelled(2000)

    def largest(alpha: float) -> float:
        return float(np.mean([np.bincount(labels[r]).max() / len(r) for r in deal(dirichlet(alpha=alpha), labels, 8)]))

    assert largest(0.05) > 0.5 and largest(1000.0) < 0.13
    assert min(map(len, deal(dirichlet(alpha=0.1, minimum=60), labels, 8))) >= 60


def test_classes_per_client_cuts_a_class_evenly_among_its_holders() -> None:
    labels = labelled(1000)
    counts = np.array([np.bincount(labels[r], minlength=10) for r in deal(classes_per_client(classes=3), labels, 10)])
    assert ((counts > 0).sum(1) == 3).all() and ((counts > 0).sum(0) == 3).all()
    assert set(counts[counts > 0].tolist()) == {33, 34}


def test_power_law_gives_the_first_client_most() -> None:
    assert [len(r) for r in deal(power_law(exponent=0.0), labelled(1000), 4)] == [250] * 4
    assert [len(r) for r in deal(power_law(), labelled(1000), 4)] == [480, 240, 160, 120]  # 12 : 6 : 4 : 3


def test_quantity_skew_spreads_sizes_only() -> None:
    assert [len(r) for r in deal(quantity_skew(sigma=0.0), labelled(1000), 4)] == [250] * 4
    sizes = [len(r) for r in deal(quantity_skew(sigma=1.5), labelled(1000), 4)]
    assert max(sizes) > 3 * min(sizes)


@pytest.mark.parametrize("name", sorted(RULES.keys() - {"blocks", "natural"}))
def test_validation_rows_are_like_training_rows(name: str) -> None:
    """A rule that ends sorted would keep a class or two apart for validation."""
    labels = labelled(4000)
    for rows in deal(RULES[name], labels, 5):
        train, kept = (np.bincount(labels[r], minlength=10) / len(r) for r in np.split(rows, [len(rows) // 2]))
        assert np.abs(train - kept).max() < 0.12


def check_disjoint(made: Federation) -> None:
    held = np.concatenate([r for c in made.clients for r in (c.train, c.validation)])
    assert sorted(held.tolist()) == list(range(len(made.y_train)))


def test_federate_pools_domains_and_keeps_clients_in_theirs(two: Dataset) -> None:
    made = federate(two, iid(), clients=4, validation=0.25, seed=0)
    check_disjoint(made)
    assert made.name == "weather" and made.shape == (3, 2, 4) and made.x_train.shape == (320, 3, 2, 4)
    assert [c.domain for c in made.clients] == ["sun"] * 4 + ["rain"] * 4
    assert [(len(c.train), len(c.validation), len(c.test)) for c in made.clients] == [(38, 12, 15)] * 4 + [
        (23, 7, 10)
    ] * 4
    for client in made.clients:
        tag = 1 if client.domain == "sun" else 2
        for x, rows in ((made.x_train, client.train), (made.x_train, client.validation), (made.x_test, client.test)):
            assert (x[rows, 0, 0, 0] == tag).all()
    source = two.domains[1]
    rows = np.arange(200, 320)
    assert np.array_equal(made.x_train[rows].transpose(0, 2, 3, 1), source.x_train)
    assert np.array_equal(made.y_train[rows], source.y_train)
    assert sorted(np.concatenate([c.test for c in made.clients]).tolist()) == list(range(100))


def test_blocks_keep_the_order_and_validation_comes_last(two: Dataset) -> None:
    client = federate(two, blocks(), clients=2, validation=0.29, seed=0).clients[0]
    assert client.train.tolist() == list(range(71)) and client.validation.tolist() == list(range(71, 100))


def test_limit_keeps_the_first_rows_of_each_domain(two: Dataset) -> None:
    made = federate(two, blocks(), clients=2, limit=30, validation=0.0, seed=0)
    assert len(made.y_train) == 60 and all(len(c.train) == 15 and len(c.validation) == 0 for c in made.clients)
    assert np.array_equal(made.y_train[30:], two.domains[1].y_train[:30])
    assert len(federate(two, blocks(), clients=2, limit=150, seed=0).y_train) == 150 + 120


def test_pooled_deals_all_domains_at_once(two: Dataset) -> None:
    made = federate(two, iid(), clients=4, pooled=True, seed=0)
    check_disjoint(made)
    assert len(made.clients) == 4
    for client in made.clients:
        assert client.domain == ("sun" if (client.train < 200).mean() > 0.5 else "rain")
        assert 0 < (client.train < 200).sum() < len(client.train)


def test_pooled_changes_nothing_for_one_domain(two: Dataset) -> None:
    one = replace(two, domains=two.domains[:1])
    first, second = (federate(one, dirichlet(alpha=1.0), clients=3, pooled=p, seed=5) for p in (False, True))
    for a, b in zip(first.clients, second.clients, strict=True):
        assert a.domain == b.domain and np.array_equal(a.train, b.train) and np.array_equal(a.test, b.test)


def test_shared_tests_every_client_on_its_whole_domain(two: Dataset) -> None:
    made = federate(two, iid(), clients=3, test="shared", seed=0)
    for client in made.clients:
        assert client.test.tolist() == (list(range(60)) if client.domain == "sun" else list(range(60, 100)))


def test_matched_tests_follow_the_training_classes() -> None:
    one = Dataset(name="one", classes=tuple("0123456789"), domains=(domain("one", 2000, 1000, 3),))
    made = federate(one, dirichlet(alpha=0.3), clients=5, test="matched", seed=1)

    def counts(labels: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount(labels[rows], minlength=10)

    train = np.array([counts(made.y_train, c.train) for c in made.clients])
    test = np.array([counts(made.y_test, c.test) for c in made.clients])
    assert test.sum() == 1000 == len(np.unique(np.concatenate([c.test for c in made.clients])))
    assert np.abs(test - 100 * train / train.sum(0)).max() < 1


def test_matched_tests_stay_in_their_domain(two: Dataset) -> None:
    made = federate(two, iid(), clients=3, test="matched", seed=0)
    for name, rows in (("sun", range(60)), ("rain", range(60, 100))):
        dealt = np.concatenate([c.test for c in made.clients if c.domain == name])
        assert sorted(dealt.tolist()) == list(rows)


def test_matched_leaves_out_classes_nobody_trains_on(two: Dataset) -> None:
    some = replace(two.domains[0], y_train=np.arange(200) % 4)
    made = federate(replace(two, domains=(some,)), iid(), clients=2, test="matched", seed=0)
    assert set(made.y_test[np.concatenate([c.test for c in made.clients])]) == set(range(4))


def test_natural_makes_a_client_of_each_owner(two: Dataset) -> None:
    for pooled in (False, True):
        made = federate(owned(two), natural(), clients=2, pooled=pooled, seed=0)
        check_disjoint(made)
        assert [c.domain for c in made.clients] == ["sun"] * 7 + ["rain"] * 7
        second = made.clients[8]  # owner 1 of the second domain
        assert ((np.concatenate([second.train, second.validation]) - 200) % 7 == 1).all()
        assert second.test.tolist() == list(range(61, 100, 6))
        assert len(made.clients[6].test) == 0  # owner 6 has training rows only


def test_natural_respects_limit_and_shared(two: Dataset) -> None:
    made = federate(owned(two), natural(), clients=2, limit=5, test="shared", seed=0)
    assert len(made.clients) == 10 and all(len(c.test) in (60, 40) for c in made.clients)


def test_federations_of_one_seed_are_equal(two: Dataset) -> None:
    first, again, other = (federate(two, iid(), clients=2, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.clients[3].train, again.clients[3].train)
    assert not np.array_equal(first.clients[3].train, other.clients[3].train)
    alike = federate(two, iid(), clients=2, limit=100, seed=1).clients
    assert not np.array_equal(alike[0].train, alike[2].train - 100)  # domains draw from streams of their own


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dirichlet(alpha=0.0), ["alpha is 0.0", "(0, 1e6]"]),
        (lambda: dirichlet(alpha=float("nan")), ["alpha is nan"]),
        (lambda: dirichlet(minimum=0), ["minimum is 0", "1 row"]),
        (lambda: classes_per_client(classes=0), ["classes is 0", "1 or more"]),
        (lambda: skew(percent=-1.0), ["percent is -1.0", "[0, 100]"]),
        (lambda: skew(sizes=(1.0, 0.0)), ["sizes is [1.0, 0.0]", "above 0"]),
        (lambda: deal(skew(sizes=(1.0, 2.0)), labelled(600), 3), ["sizes is 2", "must be 3"]),
        (lambda: gamma_similarity(gamma=1.5), ["gamma is 1.5", "[0, 1]"]),
        (lambda: quantity_skew(sigma=-0.5), ["sigma is -0.5", "[0, 10]"]),
        (lambda: deal(skew(percent=2.0), labelled(600), 52), ["percent=2.0", "102 %", "at most 51 clients"]),
        (lambda: deal(classes_per_client(classes=11), labelled(600), 5), ["classes is 11", "at most 10"]),
        (lambda: deal(classes_per_client(classes=3), labelled(600), 3), ["classes is 3", "3 clients", "no holder"]),
        (
            lambda: deal(dirichlet(alpha=0.01, minimum=90), labelled(600), 6),
            ["alpha=0.01", "90 of 600", "larger alpha"],
        ),
        (lambda: deal(dirichlet(minimum=2), labelled(9), 5), ["5 clients", "2 of 9", "fewer clients"]),
    ],
)
def test_rules_refuse_what_cannot_work(make: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(HardyError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clients": 0}, ["clients is 0", "1 or more"]),
        ({"validation": 1.0}, ["validation is 1.0", "[0, 1)"]),
        ({"validation": -0.1}, ["validation is -0.1"]),
        ({"limit": 0}, ["limit is 0", "1 or more"]),
        ({"test": "spilt"}, ["unknown test 'spilt'", "Did you mean 'split'?"]),
        ({"clients": 130}, ["client 130 ", "0 of the 120 training rows of rain", "fewer clients"]),
        ({"rule": natural()}, ["natural()", "weather", "sun", "iid()"]),
    ],
)
def test_federate_refuses_what_cannot_work(two: Dataset, options: dict[str, object], words: list[str]) -> None:
    usual: dict[str, object] = {"rule": blocks(), "clients": 2, "seed": 0}
    with pytest.raises(HardyError) as caught:
        federate(two, **{**usual, **options})  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value
