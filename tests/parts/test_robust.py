"""Robust rules and stages against short references, and what a liar may not do to them."""

import dataclasses
import doctest
import itertools

import numpy as np
import pytest
import torch

import hardy
from conftest import assert_close, everything, federation, fit, net, with_momentum
from hardy import config, papers
from hardy.core.cohort import Cohort
from hardy.core.messages import Slot, Updates
from hardy.core.partition import Role
from hardy.core.protocols import RoundContext
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.papers.afl import agnostic
from hardy.parts.aggregators import columns, distances
from hardy.parts.aggregators.base import by_role, mean, pipeline
from hardy.parts.aggregators.robust import (
    bulyan,
    centred_clipping,
    coordinate_median,
    geometric_median,
    krum,
    minimum_diameter,
    multi_krum,
    trimmed_mean,
)
from hardy.parts.aggregators.stages import (
    adaptive_clipping,
    bucketing,
    clipping,
    nearest_neighbour_mixing,
    truncated_weights,
)

RULES = {  # name -> rule that holds against f liars among updates of a given scale
    "coordinate_median": lambda f, scale: coordinate_median(),
    "trimmed_mean": lambda f, scale: trimmed_mean(f=f),
    "geometric_median": lambda f, scale: geometric_median(),
    "krum": lambda f, scale: krum(f=f),
    "multi_krum": lambda f, scale: multi_krum(f=f),
    "bulyan": lambda f, scale: bulyan(f=f),
    "minimum_diameter": lambda f, scale: minimum_diameter(f=f),
    "centred_clipping": lambda f, scale: centred_clipping(radius=3 * scale, iterations=3),
    "mixing": lambda f, scale: pipeline(pre=(nearest_neighbour_mixing(f=f),), rule=trimmed_mean(f=f)),
    "bucketing": lambda f, scale: pipeline(pre=(bucketing(size=2),), rule=trimmed_mean(f=f)),
    "clipping": lambda f, scale: pipeline(pre=(clipping(radius=3 * scale),)),
    "adaptive_clipping": lambda f, scale: pipeline(pre=(adaptive_clipping(f=f),), rule=trimmed_mean(f=f)),
}
WIDTH = 7


@pytest.fixture(params=sorted(RULES))
def rule(request):
    return RULES[request.param]


def draw(count: int, seed: int = 0, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def updates(matrix: torch.Tensor, clients=None, weights=None) -> Updates:
    count = len(matrix)
    return Updates(
        slots=[Slot(int(client)) for client in (range(count) if clients is None else clients)],
        shared={"w": matrix[:, 1:].reshape(count, -1, 1), "b": matrix[:, :1], "count": torch.arange(count)},
        reported={},
        weights=torch.ones(count, dtype=matrix.dtype) if weights is None else weights,
        steps=torch.full((count,), 3),
        loss=torch.rand(count, dtype=matrix.dtype),
    )


def context(sent: torch.Tensor) -> RoundContext:
    shared = {"w": sent[None, 1:, None].clone(), "b": sent[None, :1].clone(), "count": torch.tensor([1])}
    roles = {"w": Role.WEIGHT, "b": Role.NORM_MEAN, "count": Role.COUNTER}
    return RoundContext(shared=shared, roles=roles, bases=1, clients=len(sent), seed=5)


def aggregate(rule, matrix, sent=None, **options) -> torch.Tensor:
    """The combined row; names and counters are checked on the way."""
    given = context(torch.zeros_like(matrix[0]) if sent is None else sent)
    shared, _ = rule.finish(rule.fold(None, updates(matrix, **options), given), given, rule.memory(given))
    assert shared["count"].tolist() == [max(1, len(matrix) - 1)]
    assert shared["count"].dtype == torch.int64
    return torch.cat([shared["b"].flatten(), shared["w"].flatten()])


def staged(stage, matrix, sent=None) -> Updates:
    after, _ = stage.apply(updates(matrix), context(torch.zeros_like(matrix[0]) if sent is None else sent), {})
    rebuilt = torch.cat([after.shared["b"], after.shared["w"].flatten(1)], 1)
    assert torch.equal(after.matrix, rebuilt)
    return after


# references


def naive_scores(matrix, f):
    count = len(matrix)
    return [sorted(((matrix - row) ** 2).sum(1))[1 : count - f - 1] for row in matrix]


def naive_krum(matrix, f):
    return matrix[int(np.argmin([np.sum(score) for score in naive_scores(matrix, f)]))]


def naive_multi_krum(matrix, f):
    best = np.argsort([np.sum(score) for score in naive_scores(matrix, f)])
    return matrix[best[: len(matrix) - f]].mean(0)


def naive_bulyan(matrix, f):
    left, chosen = list(matrix), []
    while len(left) >= 2 * f + 3:
        best = int(np.argmin([np.sum(score) for score in naive_scores(np.array(left), f)]))
        chosen.append(left.pop(best))
    chosen = np.array(chosen)
    nearest = np.argsort(np.abs(chosen - np.median(chosen, 0)), 0)[: len(chosen) - 2 * f]
    return np.take_along_axis(chosen, nearest, 0).mean(0)


def naive_minimum_diameter(matrix, f):
    def spread(rows):
        squares = [((matrix[i] - matrix[j]) ** 2).sum() for i, j in itertools.combinations(rows, 2)]
        return max(squares), sum(squares)

    return matrix[list(min(itertools.combinations(range(len(matrix)), len(matrix) - f), key=spread))].mean(0)


def naive_trimmed_mean(matrix, f):
    return np.sort(matrix, 0)[f : len(matrix) - f].mean(0)


def naive_mixing(matrix, f):
    def mixed(row):
        return matrix[np.argsort(((matrix - row) ** 2).sum(1))[: len(matrix) - f]].mean(0)

    return np.array([mixed(row) for row in matrix])


REFERENCES = {
    krum: naive_krum,
    multi_krum: naive_multi_krum,
    bulyan: naive_bulyan,
    minimum_diameter: naive_minimum_diameter,
    trimmed_mean: naive_trimmed_mean,
}


@pytest.mark.parametrize("factory", REFERENCES)
@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_its_definition(factory, seed):
    for f in (1, 2):
        matrix = draw(11, seed)
        expected = REFERENCES[factory](matrix.numpy(), f)
        result = aggregate(factory(f=f), matrix, sent=draw(1, 99)[0])
        torch.testing.assert_close(result, torch.from_numpy(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 31, 32, 33, 64])
def test_median_and_trimmed_mean_by_network_and_by_sorting(count):
    matrix = draw(count, width=101)
    result = aggregate(coordinate_median(), matrix)
    torch.testing.assert_close(result, torch.from_numpy(np.median(matrix.numpy(), 0)), rtol=0, atol=1e-15)
    for f in {0, (count - 1) // 3, (count - 1) // 2}:
        expected = torch.from_numpy(naive_trimmed_mean(matrix.numpy(), f))
        torch.testing.assert_close(aggregate(trimmed_mean(f=f), matrix), expected)
        torch.testing.assert_close(columns._by_sorting(matrix, f), expected)  # the way of a GPU


@pytest.mark.parametrize("count", range(1, 11))
def test_a_network_that_sorts_zeros_and_ones_sorts_everything(count):
    cases = torch.tensor(list(itertools.product([0.0, 1.0], repeat=count))).T.contiguous()
    for trim in range((count + 1) // 2):
        expected = cases.sort(0).values[trim : count - trim].mean(0)
        torch.testing.assert_close(columns.middle_mean(cases, trim), expected)


def test_geometric_median_is_where_the_directions_cancel():
    matrix = draw(9)
    result = aggregate(geometric_median(iterations=200), matrix)
    directions = matrix - result
    assert (directions / directions.norm(dim=1, keepdim=True)).sum(0).norm() < 1e-8


def test_geometric_median_is_not_held_by_a_client_that_sends_back_what_it_got():
    """Started at what was sent down, Weiszfeld's steps would stay there: its weight is 1/ν."""
    matrix = draw(9) + 5
    matrix[0] = 0
    assert (aggregate(geometric_median(), matrix) - matrix[1:].median(0).values).norm() < 2


def test_weights_count_as_copies():
    matrix, copies = draw(5), torch.tensor([3, 1, 1, 2, 1])
    repeated = matrix.repeat_interleave(copies, 0)
    for rule in (
        geometric_median(weigh="samples", iterations=200),
        centred_clipping(radius=1.0, iterations=2, weigh="samples"),
    ):
        weighted = aggregate(rule, matrix, weights=copies.double())
        torch.testing.assert_close(weighted, aggregate(rule, repeated))


@pytest.mark.parametrize("module", [columns, distances])
def test_examples_in_docstrings(module):
    failed, tried = doctest.testmod(module)
    assert tried and not failed


def test_a_weighted_median_and_trimmed_mean_by_hand():
    rows, weights = torch.tensor([[0.0], [1.0], [2.0], [5.0]]).double(), torch.tensor([2.0, 1.0, 1.0, 1.0]).double()
    assert columns.weighted_trimmed_mean(rows, weights, torch.tensor(2.0)).tolist() == [1.0]
    assert columns.weighted_trimmed_mean(rows, weights, torch.tensor(0.5)).tolist() == [(1.5 * 0 + 1 + 2 + 0.5 * 5) / 4]
    assert columns.weighted_median(rows, weights).tolist() == [1.0]
    assert columns.weighted_median(rows, torch.tensor([0.3, 0.1, 0.1, 0.1], dtype=torch.float64)).tolist() == [0.5]
    assert columns.weighted_median(rows, torch.tensor([0.1, 0.0, 0.0, 0.3]).double()).tolist() == [5.0]


HEAVY = torch.tensor([10.0, 2.0, 2.0, 3.0, 4.0, 4.0, 5.0, 6.0, 4.0, 3.0]).double()
"""the first client has 23 % of the rows"""
BY_SAMPLES = {
    "coordinate_median": coordinate_median(weigh="samples"),
    "trimmed_mean": trimmed_mean(f=2, weigh="samples"),
    "geometric_median": geometric_median(weigh="samples"),
    "multi_krum": multi_krum(f=2, weigh="samples"),
    "krum": krum(f=2, weigh="samples"),
    "mixing": pipeline(pre=(nearest_neighbour_mixing(f=2, weigh="samples"),), rule=trimmed_mean(f=2, weigh="samples")),
    "truncated": pipeline(pre=(truncated_weights(f=2, share=0.25),), rule=trimmed_mean(f=2, weigh="samples")),
}


@pytest.mark.parametrize("name", BY_SAMPLES)
@pytest.mark.parametrize("liars", [(0, 7), (0, 1), (1, 2)])
def test_weighted_rules_hold_against_the_heaviest(name, liars):
    """The two heaviest weigh 37 %, less than half; a weighted mean goes wherever they like."""
    matrix = draw(10)
    honest = [i for i in range(10) if i not in liars]
    spread = (matrix[honest] - matrix[honest].mean(0)).norm(dim=1).max()
    for far in (1e2, 1e6):
        matrix[list(liars)] = far
        result = aggregate(BY_SAMPLES[name], matrix, weights=HEAVY)
        assert (result - matrix[honest].mean(0)).norm() < 10 * spread, far
        assert (aggregate(pipeline(), matrix, weights=HEAVY) - matrix[honest].mean(0)).norm() > far / 10


def test_f_clients_of_too_much_weight_change_nothing():
    """Two clients with 60 % would be trimmed as a majority: the base keeps its value."""
    matrix, sent, heavy = draw(10), draw(1, 1)[0], HEAVY.clone()
    heavy[[0, 7]] = torch.tensor([30.0, 20.0]).double()
    rule = trimmed_mean(f=2, weigh="samples")
    shared, _ = rule.finish([updates(matrix, weights=heavy)], context(sent), {})
    assert torch.equal(shared["w"].flatten(), sent[1:])
    assert not torch.equal(aggregate(BY_SAMPLES["truncated"], matrix, sent, weights=heavy), sent)


@pytest.mark.parametrize("seed", range(20))
def test_truncated_weights_end_at_the_largest_cap(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 12))
    f = int(rng.integers(1, count))
    share = float(rng.uniform(f / count + 1e-3, 0.999))
    weights = torch.from_numpy(rng.choice([1.0, 2.0, rng.uniform(0.1, 1000)], count) * rng.pareto(1.0, count) + 0.1)
    left = truncated_weights(f=f, share=share).reweigh(weights)

    def of_the_heaviest(some):
        return float(some.sort(descending=True).values[:f].sum() / some.sum())

    if of_the_heaviest(weights) <= share:
        assert torch.equal(left, weights)
    else:
        assert of_the_heaviest(left) == pytest.approx(share, abs=1e-12)
        assert torch.equal(left, weights.clamp_max(left.max()))


def test_sizes_that_a_weighted_rule_cannot_stand_are_refused_before_training():
    data = federation(sizes=(80, 6, 6, 6, 6))
    weighted = papers.fedavg().replace(aggregator=trimmed_mean(f=1, weigh="samples"))
    with pytest.raises(HardyError, match=r"1 heaviest have 77% of those of a cohort of 5.*truncated_weights \(f = 1"):
        fit(weighted, rounds=1, data=data)
    one_role = by_role(weight=trimmed_mean(f=1, weigh="samples"), norm_mean=coordinate_median())
    with pytest.raises(HardyError, match="1 heaviest have 77%"):
        fit(papers.fedavg().replace(aggregator=one_role), rounds=1, data=data)
    cut = pipeline(pre=(truncated_weights(f=1, share=0.3),), rule=trimmed_mean(f=1, weigh="samples"))
    assert fit(papers.fedavg().replace(aggregator=cut), rounds=1, data=data).state.round == 1
    with pytest.raises(HardyError, match="needs 4 updates or more, but the cohort has 3"):
        fit(papers.fedavg().replace(aggregator=cut), rounds=1, data=data, cohort=Cohort(clients=3))


@pytest.mark.parametrize("rule", [coordinate_median(weigh="samples"), geometric_median(weigh="samples")])
def test_a_client_of_more_than_half_of_the_weight_decides_a_median_alone(rule):
    data = federation(sizes=(80, 6, 6, 6, 6))
    method = papers.fedavg().replace(aggregator=rule)
    with pytest.raises(HardyError, match=r"heaviest has 77% of those of a cohort of 5: what it sends is the result"):
        fit(method, rounds=1, data=data)
    with pytest.raises(HardyError, match="heaviest has 87% of those of a cohort of 3"):
        fit(method, rounds=1, data=data, cohort=Cohort(clients=3))
    cut = pipeline(pre=(truncated_weights(f=1, share=0.3),), rule=rule)
    plain = dataclasses.replace(rule, weigh="uniform")
    for fine in (cut, plain, by_role(default=mean(), weight=plain)):
        assert fit(papers.fedavg().replace(aggregator=fine), rounds=1, data=data).state.round == 1
    with pytest.raises(HardyError, match="what it sends is the result"):
        fit(papers.fedavg().replace(aggregator=by_role(default=plain, weight=rule)), rounds=1, data=data)
    assert fit(method, rounds=1, data=federation(sizes=(20, 6, 6, 6, 6))).state.round == 1


def test_centred_clipping_step_by_step():
    matrix, sent, radius = draw(8) * 4, draw(1, 1)[0], 3.0
    centre = sent
    for iterations in (1, 2, 3):
        moves = matrix - centre
        centre = centre + (moves * (radius / moves.norm(dim=1, keepdim=True)).clamp_max(1)).mean(0)
        torch.testing.assert_close(
            aggregate(centred_clipping(radius=radius, iterations=iterations), matrix, sent), centre
        )


def test_mixing_takes_the_nearest():
    matrix = draw(11)
    after = staged(nearest_neighbour_mixing(f=3), matrix, sent=draw(1, 4)[0])
    torch.testing.assert_close(after.matrix, torch.from_numpy(naive_mixing(matrix.numpy(), 3)))


def test_mixing_shrinks_the_spread_of_the_honest():
    """What NNM is for: of honest updates and far liars, the honest ones come out closer together."""
    matrix = torch.cat([draw(8), draw(3, 1) + 100])
    after = staged(nearest_neighbour_mixing(f=3), matrix).matrix[:8]
    torch.testing.assert_close(after, matrix[:8].mean(0).expand(8, -1))


@pytest.mark.parametrize("size", [1, 2, 3, 11, 20])
def test_buckets_hold_every_update_once(size):
    after = staged(bucketing(size=size), draw(11))
    sizes = [size] * (11 // size) + [11 % size] * (11 % size > 0)
    total = (after.matrix * torch.tensor(sizes)[:, None]).sum(0)
    assert len(after.slots) == len(after.loss) == len(sizes)
    torch.testing.assert_close(total, draw(11).sum(0))
    torch.testing.assert_close(after.steps, torch.full_like(after.loss, 3.0))


def test_buckets_change_with_the_round_and_the_seed():
    given = context(torch.zeros(WIDTH, dtype=torch.float64))
    dealt = [
        bucketing(size=2).apply(updates(draw(11)), dataclasses.replace(given, **change), {})[0].matrix
        for change in ({}, {}, {"round": 1}, {"seed": 6})
    ]
    assert torch.equal(dealt[0], dealt[1])
    assert not torch.equal(dealt[0], dealt[2])
    assert not torch.equal(dealt[0], dealt[3])


def test_clipping_cuts_moves_and_leaves_the_short_ones():
    matrix, sent = draw(6) * torch.tensor([0.1, 1, 1, 3, 3, 9])[:, None], draw(1, 1)[0]
    after = staged(clipping(radius=2.0), matrix + sent, sent).matrix - sent
    lengths = matrix.norm(dim=1, keepdim=True)
    torch.testing.assert_close(after, torch.where(lengths > 2, 2 / lengths, 1) * matrix)
    assert torch.equal(staged(clipping(radius=1e3), matrix, sent).matrix, matrix)


def test_adaptive_clipping_cuts_the_longest_to_the_next():
    matrix = draw(10) * torch.arange(1, 11)[:, None]
    lengths = matrix.norm(dim=1)
    after = staged(adaptive_clipping(f=2), matrix).matrix.norm(dim=1)  # 2 · 2/10 · 8 = 3.2: three are cut
    limit = lengths.sort().values[6]
    torch.testing.assert_close(after, lengths.clamp_max(limit))
    assert (lengths > limit).sum() == 3
    assert torch.equal(staged(adaptive_clipping(f=0), matrix).matrix, matrix)


# what holds for all


@pytest.mark.parametrize("seed", range(3))
def test_order_shift_and_scale_carry_over(rule, seed):
    matrix, sent = draw(11, seed), draw(1, seed + 50)[0]
    plain = aggregate(rule(2, 1.0), matrix, sent)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(aggregate(rule(2, 1.0), matrix[order], sent, clients=order), plain)
    torch.testing.assert_close(aggregate(rule(2, 1.0), matrix + 9, sent + 9), plain + 9)
    torch.testing.assert_close(aggregate(rule(2, 20.0), matrix * 20, sent * 20), plain * 20, rtol=1e-5, atol=1e-5)


def test_identical_updates_stay_as_they_are(rule):
    same = draw(1).repeat(11, 1)
    torch.testing.assert_close(aggregate(rule(2, 5.0), same), same[0], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dtype, largest", [(torch.float32, 1e15), (torch.float64, 1e100)])
@pytest.mark.parametrize("attack", ["together", "apart", "one coordinate"])
def test_the_error_stays_bounded_however_far_liars_go(rule, attack, dtype, largest):
    """For every f the rule allows, up to n/2."""
    for f in (f for f in range(1, 6) if rule(f, 1.0).min_updates <= 11):
        honest = draw(11 - f).to(dtype)
        spread = (honest - honest.mean(0)).norm(dim=1).max()
        direction = {
            "together": torch.ones(f, WIDTH),
            "apart": draw(f, 7).sign(),
            "one coordinate": torch.eye(WIDTH)[:1].repeat(f, 1),
        }[attack].to(dtype)
        for size in (1e1, 1e4, largest):
            result = aggregate(rule(f, 1.0), torch.cat([direction * size, honest]))
            assert (result - honest.mean(0)).norm() < 11 / (11 - 2 * f) * 2 * spread, (f, size)


def test_blocks_do_not_change_the_result(rule, monkeypatch):
    matrix, sent = draw(11), draw(1, 1)[0]
    whole = aggregate(rule(2, 1.0), matrix, sent)
    monkeypatch.setitem(columns._MIB, "cpu", 0)  # a column a block
    torch.testing.assert_close(aggregate(rule(2, 1.0), matrix, sent), whole, rtol=1e-12, atol=1e-12)


def test_blocks_cover_every_column_within_the_budget():
    for count, width in ((3, 10_000_000), (200, 100_001), (5, 0)):
        matrix = torch.empty(count, 1).expand(count, width)
        blocks = columns.column_blocks(matrix)
        assert sum(len(range(width)[block]) for block in blocks) == width
        assert all(len(range(width)[block]) * count * 4 <= 4 * 2**20 for block in blocks)


def test_nothing_given_is_written_to(rule):
    matrix, sent = draw(11) * 50, draw(1, 1)[0]
    given, around = updates(matrix.clone()), context(sent)
    rule(2, 1.0).finish([given], around, {})
    assert torch.equal(torch.cat([given.shared["b"], given.shared["w"].flatten(1)], 1), matrix)
    assert torch.equal(given.matrix, matrix)
    assert torch.equal(torch.cat([around.shared["b"].flatten(), around.shared["w"].flatten()]), sent)


def test_counters_alone_are_combined_too(rule):
    given = context(torch.zeros(WIDTH, dtype=torch.float64))
    only = dataclasses.replace(given, shared={"count": given.shared["count"]})
    shared, _ = rule(2, 1.0).finish([updates(draw(11)).only(["count"])], only, {})
    assert shared["count"].tolist() == [10]


# how many updates


LEAST = {
    "coordinate_median": 1,
    "trimmed_mean": 5,
    "geometric_median": 1,
    "krum": 7,
    "multi_krum": 7,
    "bulyan": 11,
    "minimum_diameter": 5,
    "centred_clipping": 1,
    "mixing": 5,
    "bucketing": 9,
    "clipping": 1,
    "adaptive_clipping": 5,
}


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_base_with_too_few_updates_is_left_untouched(name):
    rule, sent = RULES[name](2, 1.0), draw(1, 1)[0]
    assert rule.min_updates == LEAST[name]
    assert not torch.equal(aggregate(rule, draw(rule.min_updates), sent), sent)
    if rule.min_updates > 1:
        given = context(sent)
        shared, _ = rule.finish([updates(draw(rule.min_updates - 1))], given, {})
        assert all(torch.equal(shared[name], value) for name, value in given.shared.items())


def test_keeping_more_updates_needs_more():
    assert multi_krum(f=2, keep=9).min_updates == 11
    assert by_role(norm_mean=trimmed_mean(f=3)).min_updates == 7


def test_a_cohort_too_small_for_the_rule_is_refused_before_training():
    robustly = papers.fedavg().replace(aggregator=trimmed_mean(f=2))
    with pytest.raises(HardyError, match=r"TrimmedMean\(f=2\) needs 5 updates or more, but the cohort has 4 clients"):
        fit(robustly, rounds=1)
    with pytest.raises(HardyError, match="needs 3 updates or more, but the cohort has 2 clients"):
        fit(papers.fedavg().replace(aggregator=trimmed_mean(f=1)), rounds=1, cohort=Cohort(clients=2))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: trimmed_mean(f=-1), r"f is -1 in TrimmedMean\(f=-1, "),
        (lambda: nearest_neighbour_mixing(f=-2), "f is -2"),
        (lambda: multi_krum(f=1, keep=0), "keep is 0"),
        (lambda: minimum_diameter(f=17), "f is 17; it must be 16 or less"),
        (lambda: centred_clipping(radius=0.0), "radius"),
        (lambda: geometric_median(iterations=0), "iterations"),
        (lambda: bucketing(size=0), "size"),
        (lambda: truncated_weights(f=1, share=1.0), r"share in \(0, 1\)"),
        (lambda: truncated_weights(f=0, share=0.3), "f must be 1 or more"),
        (lambda: multi_krum(f=1, keep=3, weigh="samples"), "keep is 3 .* a weight that is kept"),
        (lambda: pipeline(pre=(truncated_weights(f=1, share=0.3),), rule=krum(f=1)), "'TruncatedWeights' weighs"),
        (lambda: clipping(radius=-1.0), "radius"),
        (lambda: pipeline(pre=(agnostic(),), rule=trimmed_mean(f=1)), "'Agnostic' weighs"),
        (lambda: pipeline(pre=(agnostic(), bucketing(size=2)), rule=coordinate_median()), "'Agnostic' weighs"),
    ],
)
def test_what_cannot_work_is_refused(make, words):
    with pytest.raises(HardyError, match=words):
        make()


def test_weighing_goes_with_a_rule_that_has_a_weighted_form():
    pipeline(pre=(agnostic(), nearest_neighbour_mixing(f=1)), rule=geometric_median(weigh="samples"))


def test_many_liars_are_told_apart_in_time():
    """2^f choices at worst, not n over f: here that would be 10^18."""
    matrix = torch.cat([draw(104, width=3), draw(16, 1, width=3) * 30])
    expected = matrix[:104].mean(0)
    assert (aggregate(minimum_diameter(f=16), matrix) - expected).norm() < 0.3


# in a run


def test_both_engines_and_resuming_agree(tmp_path):
    rule = pipeline(pre=(bucketing(size=2), adaptive_clipping(f=1)), rule=by_role(weight=coordinate_median()))
    method, data = papers.fedavg().replace(aggregator=rule), federation(sizes=(6, 7, 8, 5, 6, 7))
    whole = fit(method, data=data)
    many = fit(method, data=data, engine=EngineChoice(name="vectorised", device="cpu", precision="float64", lane=4))
    assert_close(everything(whole), everything(many), 1e-9)
    fit(method, data=data, rounds=2, out=tmp_path)
    settings = tmp_path / "config.toml"
    settings.write_text(settings.read_text().replace("rounds = 2", "rounds = 4"))
    resumed = hardy.resume(tmp_path, method=with_momentum(method), model=net, data=data, quiet=True)
    for name, tensor in everything(whole).items():
        assert torch.equal(tensor, everything(resumed)[name]), name


def test_written_in_toml():
    text = """
[method]
name = "fedavg"
[method.aggregator]
name = "pipeline"
pre = [{ name = "nearest_neighbour_mixing", f = 3 }]
rule = { name = "by_role", default = "coordinate_median", norm_var = { name = "krum", f = 2 } }
"""
    expected = pipeline(
        pre=(nearest_neighbour_mixing(f=3),), rule=by_role(default=coordinate_median(), norm_var=krum(f=2))
    )
    assert config.method(config.parse(text)).aggregator == expected
