"""What must hold for every aggregator, whoever writes it."""

import dataclasses
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardy.core.messages import Slot, Updates
from hardy.core.partition import Role
from hardy.core.protocols import RoundContext
from hardy.parts.aggregators.base import by_role, mean, pipeline
from hardy.registry import PARTS

ROLES = {"w": Role.WEIGHT, "mean": Role.NORM_MEAN, "count": Role.COUNTER}
EXAMPLES = {"f": 1, "radius": 100.0, "size": 2, "share": 0.4, "clip": 100.0, "noise": 0.0}
"""for what has no default; laws use 7 updates of a base or more, the least any rule needs with one liar"""


def example(factory):
    taken = inspect.signature(factory).parameters
    return factory(**{name: value for name, value in EXAMPLES.items() if name in taken})


ALONE = ("control_mean", "fltrust")
"""fltrust needs an update of the server's own: tests/parts/test_fltrust.py"""
RULES = {name: example(factory) for name, factory in PARTS["aggregator"].items() if name not in ALONE}
RULES |= {f"pipeline({name})": pipeline(pre=(example(stage),)) for name, stage in PARTS["stage"].items()}
WEIGHTED = {
    name: dataclasses.replace(rule, weigh="samples")
    for name, rule in RULES.items()
    if any(field.name == "weigh" for field in dataclasses.fields(rule))
}
WEIGHTED |= {
    f"pipeline({name})": pipeline(pre=(stage(f=1, weigh="samples"),), rule=mean())
    for name, stage in PARTS["stage"].items()
    if "weigh" in inspect.signature(stage).parameters
}
STAGED = {name for name in WEIGHTED if name.startswith("pipeline(")}
RULES |= {f"{name} by samples": rule for name, rule in WEIGHTED.items()}


def updates(slots: int, bases: int = 1, seed: int = 0, spread: float = 1.0) -> Updates:
    draw = torch.Generator().manual_seed(seed)
    centre = torch.randn(4, 3, generator=draw, dtype=torch.float64)
    return Updates(
        slots=[Slot(i, i % bases) for i in range(slots)],
        shared={
            "w": centre + spread * torch.randn(slots, 4, 3, generator=draw, dtype=torch.float64),
            "mean": centre[:, 0] + spread * torch.randn(slots, 4, generator=draw, dtype=torch.float64),
            "count": torch.full((slots,), 7) if spread == 0 else torch.arange(slots) + 5,
        },
        reported={},
        weights=torch.randint(1, 50, (slots,), generator=draw).double(),
        steps=torch.full((slots,), 3),
        loss=torch.rand(slots, generator=draw, dtype=torch.float64),
    )


def context(bases: int = 1, sent: float = 0.0) -> RoundContext:
    shared = {
        "w": torch.full((bases, 4, 3), sent).double(),
        "mean": torch.full((bases, 4), sent).double(),
        "count": torch.zeros(bases).long(),
    }
    return RoundContext(shared=shared, roles=ROLES, bases=bases, clients=40)


def aggregate(rule, parts, bases=1, sent=0.0):
    folded, given_frame = None, context(bases, sent)
    names = [
        n for n in given_frame.shared if n != "count" or not isinstance(rule, PARTS["aggregator"]["normalised_mean"])
    ]
    given_frame = dataclasses.replace(given_frame, shared={n: given_frame.shared[n] for n in names})
    for part in parts:
        folded = rule.fold(folded, part.only(names), given_frame)
    return rule.finish(folded, given_frame, rule.memory(given_frame))[0]


@pytest.fixture(params=sorted(RULES))
def rule(request):
    return RULES[request.param]


def test_identical_updates_aggregate_to_themselves(rule):
    same = updates(7, spread=0.0)
    for name, value in aggregate(rule, [same]).items():
        torch.testing.assert_close(value[0], same.shared[name][0])


def test_weights_sum_to_one(rule):
    """A common shift, also of what was sent down, shifts the result by the same."""
    first = updates(7)
    moved = dataclasses.replace(first, shared={n: t + 3 if n != "count" else t for n, t in first.shared.items()})
    one, other = aggregate(rule, [first]), aggregate(rule, [moved], sent=3.0)
    for name in one.keys() - {"count"}:
        torch.testing.assert_close(other[name] - one[name], torch.full_like(one[name], 3.0))


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(14)), cut=st.integers(1, 13))
def test_order_and_lanes_are_irrelevant(order, cut):
    index = torch.tensor(order)
    whole = updates(14, bases=2)
    shuffled = dataclasses.replace(
        whole,
        slots=[whole.slots[i] for i in order],
        shared={n: t[index] for n, t in whole.shared.items()},
        weights=whole.weights[index],
        steps=whole.steps[index],
        loss=whole.loss[index],
    )
    head = torch.arange(14) < cut
    for rule in RULES.values():
        together = aggregate(rule, [whole], bases=2)
        in_lanes = aggregate(rule, [shuffled.where(head), shuffled.where(~head)], bases=2)
        for name, value in together.items():
            torch.testing.assert_close(value, in_lanes[name])


def points(rows, dtype=torch.float64) -> Updates:
    """An update for each row of twelve numbers, all of equal weight."""
    values = torch.tensor(rows, dtype=dtype)
    count = len(values)
    return Updates(
        slots=[Slot(i) for i in range(count)],
        shared={"w": values.view(count, 4, 3), "mean": values[:, :4].clone(), "count": torch.full((count,), 7)},
        reported={},
        weights=torch.ones(count, dtype=dtype),
        steps=torch.full((count,), 3),
        loss=torch.ones(count, dtype=dtype),
    )


def unit(place, length):
    return [length if i == place else 0.0 for i in range(12)]


TIES = {
    "a cross": [unit(i, s) for i in range(4) for s in (-0.1, 0.1)],
    "two camps": [unit(0, -1.0)] * 4 + [unit(0, 1.0)] * 4,
    "pairs on a line": [unit(0, x) for x in (-3.0, -1.0, -1.0, 0.0, 0.0, 1.0, 1.0, 3.0)],
    "a simplex": [unit(i, 0.7) for i in range(8)],
}
BY_CLIENT = ("pipeline(bucketing)", "pipeline(slack)")
"""buckets are dealt by the clients' numbers, and so are ties of slack"""


@pytest.mark.parametrize("kind", TIES)
@pytest.mark.parametrize("name", sorted(RULES.keys() - set(BY_CLIENT)))
def test_ties_are_not_broken_by_order(name, kind):
    draw = torch.Generator().manual_seed(0)
    whole = points(TIES[kind])
    first = aggregate(RULES[name], [whole])
    for _ in range(10):
        order = torch.randperm(8, generator=draw)
        shuffled = dataclasses.replace(whole, shared={n: t[order] for n, t in whole.shared.items()})
        for tensor, value in aggregate(RULES[name], [shuffled]).items():
            torch.testing.assert_close(value, first[tensor], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [7, 40])
def test_rules_work_in_bfloat16(rule, count):
    """With few updates columns are compared row by row, with many they are sorted."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(count, 12, generator=draw).bfloat16()
    short, exact = points(rows.tolist(), torch.bfloat16), points(rows.tolist())
    one, other = aggregate(rule, [short]), aggregate(rule, [exact])
    for name in ("w", "mean"):
        torch.testing.assert_close(one[name].double(), other[name], rtol=0.05, atol=0.05)


def test_a_base_nobody_trained_keeps_its_value(rule):
    result = aggregate(rule, [updates(14, bases=2)], bases=3)
    for name, value in result.items():
        assert value[2].abs().sum() == 0, name
        assert value[0].abs().sum() > 0, name


def test_nothing_given_is_written_to(rule):
    given_updates, copy = updates(7), updates(7)
    aggregate(rule, [given_updates])
    for name, value in copy.shared.items():
        assert torch.equal(value, given_updates.shared[name])


@pytest.mark.parametrize("name", sorted(WEIGHTED))
@pytest.mark.parametrize("weight", [1.0, 0.37, 600.0])
def test_equal_weights_give_the_plain_rule(name, weight):
    given_updates = updates(9)
    given_updates = dataclasses.replace(given_updates, weights=torch.full((9,), weight, dtype=torch.float64))
    plain = dataclasses.replace(WEIGHTED[name], weigh="uniform") if name in RULES.keys() - STAGED else RULES[name]
    for tensor, value in aggregate(plain, [given_updates]).items():
        torch.testing.assert_close(aggregate(WEIGHTED[name], [given_updates])[tensor], value, rtol=1e-9, atol=1e-9)


COPIES = torch.tensor([2, 1, 1, 2, 1, 2, 1, 1, 2])


@pytest.mark.parametrize("name", sorted(WEIGHTED))
@pytest.mark.parametrize("unit", [1.0, 25.0])
def test_a_client_of_weight_w_counts_like_w_clients(name, unit):
    """Of nine clients the heaviest may lie, of weight 2; of their fifteen copies, two."""
    few = dataclasses.replace(updates(9, seed=4), weights=COPIES * unit)
    index = torch.arange(9).repeat_interleave(COPIES)
    many = dataclasses.replace(
        few.where(torch.zeros(9, dtype=torch.bool)),
        slots=[Slot(i) for i in range(len(index))],
        shared={tensor: value[index] for tensor, value in few.shared.items()},
        weights=torch.full((len(index),), unit, dtype=torch.float64),
        steps=few.steps[index],
        loss=few.loss[index],
    )
    rule, two = WEIGHTED[name], WEIGHTED[name]
    if hasattr(rule, "f"):
        two = dataclasses.replace(rule, f=2)
    elif name in STAGED:
        two = pipeline(pre=(dataclasses.replace(rule.pre[0], f=2),), rule=rule.rule)
    one, other = aggregate(rule, [few]), aggregate(two, [many])
    for tensor in ("w", "mean"):
        torch.testing.assert_close(one[tensor], other[tensor], rtol=1e-9, atol=1e-9)
    uniform = (
        aggregate(RULES[name], [few]) if name not in ("mean", *STAGED) else aggregate(mean(weigh="uniform"), [few])
    )
    assert not torch.allclose(uniform["w"], one["w"], rtol=1e-3), "weights made no difference"


def test_counters_are_never_averaged():
    assert aggregate(mean(), [updates(4)])["count"].tolist() == [8]
    assert aggregate(mean(), [updates(4)])["count"].dtype == torch.int64


def test_samples_and_uniform_weights():
    given_updates = updates(4)
    share = given_updates.weights / given_updates.weights.sum()
    expected = (share[:, None, None] * given_updates.shared["w"]).sum(0)
    torch.testing.assert_close(aggregate(mean(), [given_updates])["w"][0], expected)
    torch.testing.assert_close(
        aggregate(mean(weigh="uniform"), [given_updates])["w"][0], given_updates.shared["w"].mean(0)
    )


def test_by_role_gives_each_role_its_rule():
    given_updates = updates(4)
    result = aggregate(by_role(norm_mean=mean(weigh="uniform")), [given_updates])
    torch.testing.assert_close(result["mean"][0], given_updates.shared["mean"].mean(0))
    torch.testing.assert_close(result["w"], aggregate(mean(), [given_updates])["w"])
