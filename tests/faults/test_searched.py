"""Attacks that choose how far they go, against brute force."""

import numpy as np
import pytest
import torch

from hardy.core.messages import Slot, Updates, Work
from hardy.core.partition import Role
from hardy.errors import HardyError
from hardy.faults.byzantine import a_little_is_enough, corrupt, fall_of_empires, label_flipping, stale
from hardy.faults.searched import adaptive_lie, inner_product_manipulation, min_max, min_sum

ROLES = {"w": Role.WEIGHT, "var": Role.NORM_VAR}


def corrupted(attack, honest, hostile=2, aggregate=None):
    """What the last clients send, and the honest replies; x is 0."""
    rows = torch.cat([honest, honest[:hostile]])
    slots = [Slot(i) for i in range(len(rows))]
    each = torch.ones(len(rows), dtype=torch.float64)
    shared = {"w": rows[:, :-1], "var": rows[:, -1:].abs()}
    updates = Updates(slots=slots, shared=shared, reported={}, weights=each, steps=each, loss=each)
    sent = {"w": torch.zeros(1, rows.shape[1] - 1).double(), "var": torch.zeros(1, 1).double()}
    work = Work(round=0, rate=0.1, slots=slots, shared=sent, reported={})
    lying = set(range(len(honest), len(rows)))
    made = corrupt(attack, updates, work, hostile=lying, roles=ROLES, aggregate=aggregate)
    said = torch.cat([made.shared["w"], made.shared["var"]], 1)
    return said[len(honest) :].numpy(), said[: len(honest)].numpy()


def hidden(kind, forged, honest):
    own = ((honest - forged) ** 2).sum(1)
    each = ((honest[:, None] - honest) ** 2).sum(2)
    return own.max() <= each.max() if kind is min_max else own.sum() <= each.sum(1).max()


def draw(seed, count=6, width=5):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 1


@pytest.mark.parametrize("kind", [min_max, min_sum])
@pytest.mark.parametrize("direction", ["deviation", "unit", "sign"])
@pytest.mark.parametrize("seed", range(3))
def test_as_far_as_the_honest_spread_hides(kind, direction, seed):
    forged, honest = corrupted(kind(direction=direction), draw(seed))
    assert (forged == forged[0]).all()
    mean = honest.mean(0)
    step = forged[0] - mean
    assert hidden(kind, forged[0], honest)
    assert not hidden(kind, mean + 1.001 * step, honest) or forged[0, -1] == 0  # a variance stops at 0
    expected = {"deviation": honest.std(0, ddof=1), "sign": np.sign(mean)}
    if direction in expected:
        free = slice(None, -1)
        ratio = -step[free] / expected[direction][free]
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-9)


@pytest.mark.parametrize("kind", [min_max, min_sum])
def test_a_single_number_is_a_tensor_too(kind):
    """As the counts that norm hybrid shares."""
    replies = torch.tensor([1.0, 2.0, 3.0, 3.0]).double()
    slots = [Slot(i) for i in range(4)]
    updates = Updates(slots=slots, shared={"count": replies}, reported={}, weights=replies, steps=replies, loss=replies)
    work = Work(round=0, rate=0.1, slots=slots, shared={"count": torch.zeros(1).double()}, reported={})
    made = corrupt(kind(), updates, work, hostile={3}, roles={"count": Role.WEIGHT}, aggregate=None)
    assert made.shared["count"][:3].equal(replies[:3])
    assert hidden(kind, made.shared["count"][3:, None].numpy()[0], replies[:3, None].numpy())


def test_by_hand():
    for kind in (min_max, min_sum):
        forged, _ = corrupted(kind(), torch.tensor([[0.0, 0.0], [2.0, 0.0]]).double(), hostile=1)
        np.testing.assert_allclose(forged[0, 0], 0.0, atol=1e-5)
        assert corrupted(kind(factor=0.5), draw(0))[0].shape == (2, 5)


def clipped_mean(limit):
    def aggregate(updates):
        values = updates.shared["w"]
        near = values[values.norm(dim=1) <= limit]
        return {"w": near.mean(0, keepdim=True), "var": updates.shared["var"][:1]}

    return aggregate


def test_inner_product_manipulation_stops_where_the_rule_stops_following():
    forged, honest = corrupted(inner_product_manipulation(), draw(0), aggregate=clipped_mean(4.0))
    assert 3.5 < np.linalg.norm(forged[0, :-1]) <= 4.0
    assert (forged[0, :-1] @ honest.mean(0)[:-1]) < 0
    assert (forged[:, -1] >= 0).all()


def test_the_adaptive_lie_is_the_one_that_reaches_furthest():
    aggregate = clipped_mean(4.0)
    lies = (a_little_is_enough(), inner_product_manipulation(), min_max(), stale())

    def reached(attack):
        forged, honest = corrupted(attack, draw(1), aggregate=aggregate)
        whole = torch.from_numpy(np.concatenate([honest, forged])[:, :-1])
        near = whole[whole.norm(dim=1) <= 4.0].mean(0).numpy()
        return np.linalg.norm(near - honest[:, :-1].mean(0))

    best = max(map(reached, lies))
    assert reached(adaptive_lie(attacks=lies)) == pytest.approx(best, rel=1e-6)
    assert best > min(map(reached, lies))


def test_what_cannot_work_is_refused():
    with pytest.raises(HardyError, match="two or more that change tensors"):
        adaptive_lie(attacks=(stale(), label_flipping()))
    with pytest.raises(HardyError, match="two or more"):
        adaptive_lie(attacks=(fall_of_empires(),))
    with pytest.raises(HardyError, match=r"factor \(γ\).* is -1"):
        min_max(factor=-1.0)
