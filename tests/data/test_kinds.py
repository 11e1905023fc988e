"""Who can afford adversarial training."""

import pytest

import hardy
from conftest import federation
from hardy.data.capacity import groups, with_capacity
from hardy.data.kinds import with_kinds
from hardy.errors import HardyError


@pytest.mark.parametrize(
    ("adversarial", "able"),
    [
        (None, None),
        (0.0, []),
        (1.0, [0, 1, 2, 3, 4, 5]),
        (0.4, [0, 1]),  # one of three in each domain
        (("odd",), [1, 3, 5]),
        ((4, 1), [1, 4]),
        ({"odd": 0.7}, [1, 3]),
        ({"even": 1.0, "odd": 0.4}, [0, 1, 2, 4]),
    ],
)
def test_who_can_afford_adversarial_training(adversarial, able):
    data = with_kinds(federation(sizes=(5,) * 6), adversarial)
    kinds = [client.kind for client in data.clients]
    assert kinds == ([""] * 6 if able is None else ["AT" if n in able else "ST" for n in range(6)])


def test_a_share_of_pooled_rows_is_one_of_all_clients():
    """Pooled clients carry the domain most of their rows are from, of which each may be the only one."""
    kinds = [client.kind for client in with_kinds(federation(sizes=(5,) * 6), 0.2, pooled=True).clients]
    assert kinds == ["AT"] + ["ST"] * 5
    with pytest.raises(HardyError, match=r"one of the 6 clients of the pool, .* Take 0.17 or more"):
        with_kinds(federation(sizes=(5,) * 6), 0.1, pooled=True)


def test_the_rich_are_those_of_the_largest_capacity():
    data = with_capacity(federation(sizes=(5,) * 6), groups(widths=(0.25, 0.5), shuffled=False), seed=0)
    rich = [client.capacity == 0.5 for client in data.clients]
    assert [client.kind == "AT" for client in with_kinds(data, "rich").clients] == rich and any(rich) and not all(rich)


def test_kinds_are_written_in_toml_and_come_back():
    for text in ("0.2", '"rich"', '["pen"]', "[0, 3]", "{ pen = 0.5, mail = 1.0 }"):
        chosen = hardy.config.parse(f"[data]\nadversarial = {text}")
        assert hardy.config.parse(chosen.to_toml()) == chosen


@pytest.mark.parametrize(
    ("adversarial", "message"),
    [
        ((6,), "a client's number in data.adversarial is 6; it must be 0 to 5"),
        (0.3, "data.adversarial is 0.3, which is less than one of the 3 clients of a domain, .* Take 0.34 or more"),
        (("square",), "unknown domain in data.adversarial 'square'"),
        ({"odd": 1.5}, r"the share of odd in data.adversarial is 1.5; it must be in \[0, 1\]"),
    ],
)
def test_mistakes_are_refused(adversarial, message):
    with pytest.raises(HardyError, match=message):
        with_kinds(federation(sizes=(5,) * 6), adversarial)
