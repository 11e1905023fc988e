"""Masks that vanish in a sum, and nowhere else."""

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the flower extra is not installed")

from hardy.errors import HardyError
from hardy.flower.masking import KeyPair, decode, encode, join, mask, pair_mask, seal, split, unmask, unseal


def test_sums_of_encoded_numbers_are_exact():
    """Against Python's integers: no rounding but the one of each number, also where the modulus is passed."""
    draw = np.random.default_rng(0)
    rows = [draw.normal(size=500) * 10.0 ** draw.integers(-12, 6, 500) for _ in range(40)]
    total = sum((encode(row) for row in rows), np.zeros(500, np.uint64))
    for at in range(500):
        exact = sum(round(float(row[at]) * 2**32) for row in rows)
        assert int(total.view(np.int64)[at]) == exact
    np.testing.assert_allclose(decode(total), np.sum(rows, 0), atol=40 * 2.0**-33, rtol=1e-12)
    np.testing.assert_array_equal(decode(encode(np.array([-1.5, 2.0**-32, 0.0]))), [-1.5, 2.0**-32, 0.0])
    for value in (2.0**30, -(2.0**30), np.inf, np.nan):
        with pytest.raises(HardyError, match="cannot be masked"):
            encode(np.array([value]))


def test_shares_give_the_secret_and_fewer_give_nothing():
    secret = bytes(range(32))
    shares = dict(enumerate(split(secret, 5, 3), 1))
    for chosen in ((1, 2, 3), (5, 3, 1), (2, 4, 5), (1, 2, 3, 4, 5)):
        assert join({x: shares[x] for x in chosen}) == secret
    with pytest.raises(HardyError, match="do not fit together"):
        join({x: shares[x] for x in (1, 2)})


def test_keys_agree_and_sealed_words_cannot_be_changed():
    one, two, third = KeyPair.new(), KeyPair.new(), KeyPair.new()
    assert one.agree(two.public, "share", 1) == two.agree(one.public, "share", 1)
    assert len({one.agree(two.public, "share", n) for n in (1, 2)} | {one.agree(third.public, "share", 1)}) == 3
    assert KeyPair.of(one.private) == one
    key = one.agree(two.public, "x")
    assert unseal(key, seal(key, b"words")) == b"words"
    with pytest.raises(HardyError, match="changed on its way"):
        unseal(key, seal(key, b"words")[:-1] + b"?")


@pytest.mark.parametrize("lost", [(), (2,), (0, 4)], ids=str)
def test_masks_vanish_in_the_sum_alone(lost):
    clients, size = range(5), 2000
    keys = {c: KeyPair.new() for c in clients}
    public = {c: pair.public for c, pair in keys.items()}
    own = {c: bytes([c]) * 32 for c in clients}
    values = {c: encode(np.random.default_rng(c).normal(size=size)) for c in clients}
    masked = {c: mask(values[c], c, keys[c], own[c], public, "a") for c in clients}
    stayed = [c for c in clients if c not in lost]
    found = unmask(
        [masked[c] for c in stayed],
        size,
        own=[own[c] for c in stayed],
        lost={c: keys[c].private for c in lost},
        stayed={c: public[c] for c in stayed},
        attempt="a",
    )
    np.testing.assert_array_equal(found, sum((values[c] for c in stayed), np.zeros(size, np.uint64)))
    for c in clients:  # what the server sees of one is noise: uniform bits, whatever one of the two masks
        for seen in (masked[c], masked[c] - mask(values[c] * 0, c, keys[c], own[c], {}, "a")):
            assert abs((seen >> np.uint64(63)).mean() - 0.5) < 0.06
            assert abs(np.corrcoef(seen.view(np.int64), values[c].view(np.int64))[0, 1]) < 0.1


def test_two_clients_masks_cancel():
    one, two = KeyPair.new(), KeyPair.new()
    total = pair_mask(3, 7, one, two.public, "a", 10) + pair_mask(7, 3, two, one.public, "a", 10)
    assert not total.any()
    again = pair_mask(3, 7, one, two.public, "b", 10)
    assert (again != pair_mask(3, 7, one, two.public, "a", 10)).all()
