"""SFAT: who is up-weighted, by how much, what the published formula does to the model, and what a lie is worth."""

import dataclasses
import json
import math
import tomllib
from pathlib import Path

import pytest
import torch

import hardy
from conftest import assert_close, everything, federation, fit
from hardy import config, papers
from hardy.attacks.gradient import pgd
from hardy.config import EvaluationChoice
from hardy.core.cohort import Cohort
from hardy.core.messages import Slot, Updates
from hardy.core.partition import Role
from hardy.core.protocols import RoundContext
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.faults.byzantine import tiny_loss
from hardy.faults.injection import Faults
from hardy.papers.scaffold import control_mean
from hardy.papers.sfat import sfat, sfat_prox, sfat_scaffold, slack
from hardy.parts.adversarial import adversarial, mart, trades
from hardy.parts.aggregators.base import by_role, equal_weights, mean, pipeline

EXPERIMENTS = Path(__file__).parents[2] / "experiments" / "sfat"
QUICK = adversarial(attack=pgd(steps=1), mix=1.0)
FREE = {"believed": math.inf, "turns": 1.0}
VECTORISED = EngineChoice(name="vectorised", device="cpu", precision="float64", lane=3)


def updates(losses, weights=None, clients=None, bases=None) -> Updates:
    count = len(losses)
    clients = range(count) if clients is None else clients
    return Updates(
        slots=[Slot(c, b) for c, b in zip(clients, bases or [0] * count, strict=True)],
        shared={"w": torch.eye(count).double(), "count": torch.arange(count)},
        reported={},
        weights=torch.ones(count).double() if weights is None else torch.tensor(weights).double(),
        steps=torch.full((count,), 3),
        loss=torch.tensor(losses).double(),
    )


def context(clients, width=None, *, round=0, kinds=(), bases=1) -> RoundContext:
    shared = {"w": torch.zeros(bases, width or clients).double(), "count": torch.zeros(bases).long()}
    roles = {"w": Role.WEIGHT, "count": Role.COUNTER}
    return RoundContext(shared=shared, roles=roles, bases=bases, clients=clients, round=round, kinds=kinds)


def aggregate(rule, given, at, memory=None):
    """(each client's weight in the result, the memory): client k sends the k-th unit vector."""
    shared, memory = rule.finish(rule.fold(None, given, at), at, memory or rule.memory(at))
    assert shared["count"].tolist() == [len(given.slots) - 1] * at.bases
    return shared["w"][0], memory


def weights(stage, losses, **options):
    given = updates(losses, **options)
    return aggregate(pipeline(pre=(stage,)), given, context(max(s.client for s in given.slots) + 1, len(losses)))[0]


# the slack


def test_the_smallest_loss_gets_the_slack_and_weights_sum_to_one():
    share = weights(slack(alpha=1 / 6), [2.0, 1.0, 3.0, 4.0, 5.0])
    torch.testing.assert_close(share, torch.tensor([1, 1.4, 1, 1, 1]).double() / 5.4)
    two = weights(slack(alpha=1 / 11, chosen=2), [2.0, 1.0, 3.0, 4.0, 5.0])
    torch.testing.assert_close(two, torch.tensor([1.2, 1.2, 1, 1, 1]).double() / 5.4)


def test_losses_are_sorted_by_their_share_of_the_objective():
    losses, sizes = [3.0, 2.0, 1.0, 9.0], [1.0, 2.0, 4.0, 3.0]
    by_size = weights(slack(alpha=0.5), losses, weights=sizes)
    torch.testing.assert_close(by_size, torch.tensor([3.0, 2.0, 4.0, 3.0]).double() / 12)
    by_loss = weights(slack(alpha=0.5, by_size=False), losses, weights=sizes)
    torch.testing.assert_close(by_loss, torch.tensor([1.0, 2.0, 12.0, 3.0]).double() / 18)


def test_reverse_slack():
    """Figure 4 counts the largest loss for more, Table 10 the smallest for less."""
    losses = [2.0, 1.0, 3.0, 4.0, 5.0]
    large = weights(slack(alpha=1 / 6, largest=True), losses)
    torch.testing.assert_close(large, torch.tensor([1, 1, 1, 1, 1.4]).double() / 5.4)
    less = weights(slack(alpha=-1 / 9), losses)
    torch.testing.assert_close(less, torch.tensor([1, 0.8, 1, 1, 1]).double() / 4.8)


@pytest.mark.parametrize(
    ("clients", "chosen", "factor", "total"),
    [
        (5, 1, 1.4, 0.931),
        (5, 1, 1.2, 0.963),
        (20, 4, 1.2, 0.990),
        (50, 10, 1.2, 0.996),
        (5, 1, 0.8, 1.043),
        (5, 1, 0.6, 1.095),
    ],
)
def test_published_weights_do_not_sum_to_one(clients, chosen, factor, total):
    losses, alpha = [1.0 + 0.1 * k for k in range(clients)], (factor - 1) / (factor + 1)
    published = weights(slack(alpha=alpha, chosen=chosen, as_published=True), losses)
    assert round(published.sum().item(), 3) == total
    right = weights(slack(alpha=alpha, chosen=chosen), losses)
    torch.testing.assert_close(right.sum(), torch.tensor(1.0).double())
    torch.testing.assert_close(published / published.sum(), right)  # all it changes is the scale


def test_what_shrinks():
    """The tensors slack was put on: weights alone, or norm layers too. Counters never do."""
    data = federation(sizes=(8, 8, 8, 8))
    control = {
        norms: fit(sfat(slack=slack(alpha=0.0, shrink=0.5), norms=norms, objective=QUICK), data=data, rounds=1)
        for norms in (False, True)
    }
    plain = fit(papers.fedavg(objective=QUICK), data=data, rounds=1)
    for norms, run in control.items():
        for name, value in plain.state.shared.items():
            shrunk = norms or run.engine.plan.roles[name] is Role.WEIGHT
            torch.testing.assert_close(run.state.shared[name], value * (0.5 if shrunk else 1.0))


@pytest.mark.parametrize(
    ("method", "plain"),
    [
        (sfat, papers.fedavg(objective=QUICK)),
        (sfat_prox, papers.fedprox(objective=QUICK)),
        (sfat_scaffold, papers.scaffold(objective=QUICK)),
    ],
)
@pytest.mark.parametrize("norms", [False, True])
def test_without_slack_it_is_the_method_underneath(method, plain, norms):
    made = method(slack=slack(alpha=0.0), norms=norms, objective=QUICK)
    options = {"cohort": Cohort(fraction=0.75), "rounds": 3}
    one, other = fit(made, **options), fit(plain, **options)
    assert_close(one.state.shared, other.state.shared, 1e-12)
    assert_close(one.engine.store, other.engine.store, 1e-12)


def test_scaffold_counts_every_client_the_same_before_the_slack():
    made = sfat_scaffold(slack=slack(alpha=1 / 11))
    assert made.aggregator.control == control_mean() and made.aggregator.default == mean(weigh="uniform")
    share, _ = aggregate(made.aggregator.weight, updates([1.0, 2.0, 3.0], weights=[50.0, 1.0, 7.0]), context(3))
    torch.testing.assert_close(share, torch.tensor([1.2, 1.0, 1.0]).double() / 3.2)
    with pytest.raises(HardyError, match="has no weighted form"):
        pipeline(pre=(slack(),), rule=mean(weigh="uniform"))
    assert pipeline(pre=(equal_weights(), slack())).uses_weights


@pytest.mark.parametrize(
    "objective", [QUICK, trades(attack=pgd(steps=1)), mart(attack=pgd(steps=1))], ids=lambda o: type(o).__name__
)
@pytest.mark.parametrize("method", [sfat, sfat_prox, sfat_scaffold])
def test_works_with_every_optimiser_and_objective(method, objective):
    options = {"rounds": 2, "cohort": Cohort(fraction=0.75)}
    one = fit(method(objective=objective), **options)
    many = fit(method(objective=objective), engine=VECTORISED, **options)
    assert_close(everything(one), everything(many), 1e-9)
    assert one.state.memory["weight.1.turns" if method is sfat_scaffold else "weight.0.turns"].sum() == 2


def test_when_slack_starts_and_how_it_fades():
    late = slack(alpha=1 / 6, start=2)
    assert [round(late.more(now), 9) for now in (1, 2, 3)] == [0.0, 0.4, 0.4]
    fading = slack(alpha=1 / 6, start=2, anneal=4)
    assert [round(1 + fading.more(now), 9) for now in range(1, 8)] == [1.0, 1.4, 1.3, 1.2, 1.1, 1.0, 1.0]
    rule, given = pipeline(pre=(slack(alpha=1 / 6, start=2, shrink=0.5, as_published=True),)), updates([1.0, 2.0, 3.0])
    first, _ = aggregate(rule, given, context(3))
    torch.testing.assert_close(first, torch.ones(3).double() / 3)
    second, _ = aggregate(rule, given, context(3, round=1))
    torch.testing.assert_close(second.sum(), torch.tensor(0.5 * 3.4 / 3.8).double())


def test_ties_and_order():
    given = updates([1.0, 1.0, 1.0, 1.0], clients=[3, 1, 2, 0])
    share, _ = aggregate(pipeline(pre=(slack(),)), given, context(4))
    assert share.argmax() == 3  # the client with the smallest number, wherever it stands


def test_few_clients_get_no_slack_beyond_half_of_them():
    assert weights(slack(alpha=0.5), [1.0]).tolist() == [1.0]
    three = weights(slack(alpha=0.5, chosen=9), [1.0, 2.0, 3.0])
    torch.testing.assert_close(three, torch.tensor([3, 1, 1]).double() / 5)


def test_slack_among_one_kind_of_clients():
    kinds = ("ST", "AT", "ST", "AT", "AT", "")
    given = updates([0.001, 2.0, 0.002, 1.0, 3.0, 4.0])
    rule = pipeline(pre=(slack(alpha=0.5, kind="AT"),))
    share, memory = aggregate(rule, given, context(6, kinds=kinds))
    torch.testing.assert_close(share, torch.tensor([1, 1, 1, 3, 1, 1]).double() / 8)
    assert rule.figures(memory) == {"up_weighted": [3]}
    nobody, memory = aggregate(rule, given, context(6, kinds=("ST",) * 6))
    torch.testing.assert_close(nobody, torch.ones(6).double() / 6)
    assert rule.figures(memory) == {"up_weighted": []}


# the guard


def turns_of(stage, losses, rounds, clients=5):
    """How often each client is up-weighted in some rounds of the same losses."""
    rule, memory = pipeline(pre=(stage,)), None
    for at in range(rounds):
        _, memory = aggregate(rule, updates(losses), context(clients, round=at), memory)
    return memory["0.turns"][0].tolist()


def test_a_tiny_loss_is_not_believed():
    losses = [1.2, 1.0, 1e-6, 1.5, 1.1]
    assert turns_of(slack(**FREE), losses, 4) == [0, 0, 4, 0, 0]
    assert turns_of(slack(turns=1.0), losses, 4) == [0, 4, 0, 0, 0]
    assert turns_of(slack(turns=1.0, largest=True), [1.2, 1.0, 1e6, 1.5, 1.1], 4) == [0, 0, 0, 4, 0]
    two = [1.2, 1e-6, 1e-6, 1.5, 1.1]  # a minority
    assert turns_of(slack(turns=1.0), two, 4) == [0, 0, 0, 0, 4]


def test_honest_clients_of_unlike_domains_are_believed():
    """Losses of ten clients in five domains of mini_digits, after 25 rounds."""
    honest = [0.26, 0.313, 0.345, 0.436, 2.369, 2.369, 2.347, 2.326, 2.291, 2.301]
    assert turns_of(slack(turns=1.0), honest, 1, clients=10)[0] == 1


def test_a_cunning_liar_gets_half_of_the_rounds():
    losses = [1.2, 1.0, 0.5, 1.5, 1.1]  # client 2 always says a little less than the others
    assert turns_of(slack(), losses, 20) == [0, 10, 10, 0, 0]
    assert turns_of(slack(turns=0.2), losses, 20) == [4, 4, 4, 4, 4]
    assert turns_of(slack(**FREE), losses, 20) == [0, 0, 20, 0, 0]


def test_turns_are_counted_over_the_rounds_a_client_took_part_in():
    rule = pipeline(pre=(slack(turns=0.5),))
    memory = None
    for at in range(6):  # client 2 is there in every other round, always with the smallest loss
        clients, losses = ([0, 1, 2], [2.0, 3.0, 1.0]) if at % 2 else ([0, 1, 3], [2.0, 3.0, 4.0])
        given = updates(losses, clients=clients)
        _, memory = aggregate(rule, given, context(4, 3, round=at), memory)
    assert memory["0.asked"][0].tolist() == [6, 6, 3, 3]
    assert memory["0.turns"][0, 2] == 2


def test_attack_and_guard_in_one_federation():
    """Client 1 trains honestly and reports 1e-6."""

    def turns(**guard):
        method = sfat(slack=slack(**guard), objective=QUICK)
        run = fit(method, rounds=6, faults=Faults(hostile=(1,), byzantine=tiny_loss(loss=1e-6)))
        return run.state.memory["weight.0.turns"][0].tolist()

    assert turns(**FREE) == [0, 6, 0, 0]
    assert turns(believed=math.inf)[1] == 3
    guarded = turns()
    assert guarded[1] == 0 and sum(guarded) == 6


# figures


def test_each_base_has_a_memory_and_only_this_round_is_told():
    rule, at = pipeline(pre=(slack(),)), context(4, bases=2)
    given = updates([1.0, 2.0, 3.0, 4.0], bases=[0, 0, 1, 1])
    _, memory = rule.finish(rule.fold(None, given, at), at, rule.memory(at))
    assert rule.figures(memory) == {"up_weighted": [0, 2]}
    later = dataclasses.replace(at, round=1)
    second = updates([1.0, 2.0, 3.0, 4.0], bases=[1, 1, 1, 1])
    _, memory = rule.finish(rule.fold(None, second, later), later, memory)
    assert rule.figures(memory) == {"up_weighted": [0]}
    assert by_role(weight=rule).figures({f"weight.{n}": t for n, t in memory.items()}) == {"up_weighted": [0]}


def test_drift_and_slack_are_in_the_metrics(tmp_path):
    fit(
        sfat(slack=slack(start=2), objective=QUICK),
        data=federation(sizes=(8, 8, 8)),
        rounds=3,
        out=tmp_path / "run",
        evaluation=EvaluationChoice(drift=True),
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [len(line["up_weighted"]) for line in lines] == [0, 1, 1]
    assert all(line["drift"] > 0 and line["variance"] > 0 for line in lines)
    # of equal clients under the plain mean the shared weights are the clients' mean: drift² <= variance
    assert 0.5 < lines[0]["drift"] ** 2 / lines[0]["variance"] <= 1 + 1e-9
    silent = fit(papers.fedavg(), rounds=1, out=tmp_path / "silent")
    assert not {"drift", "variance", "up_weighted"} & json.loads((silent.folder / "metrics.jsonl").read_text()).keys()


def test_drift_by_hand():
    """Of local models that nobody averages, taken from a run of its own."""
    data = federation(sizes=(8, 8))
    run = fit(papers.fedavg(), data=data, rounds=1)
    alone = fit(papers.local_only(), data=data, rounds=1)
    trained = [n for n, tag in run.engine.plan.tags.items() if tag.trained]
    apart = torch.cat([(alone.engine.store[n][0] - alone.engine.store[n][1]).flatten() for n in trained]).norm()
    server = dataclasses.replace(run.server, drift=True)
    start = server.start()
    start = dataclasses.replace(start, shared=run.engine.cast(start.shared))
    _, line = server.round(start, run.engine, run.experiment.training.rate)
    assert line["drift"] == pytest.approx(apart.item() / 2, rel=1e-9)
    assert line["variance"] == pytest.approx(apart.item() ** 2 / 4, rel=1e-9)


# written down


def test_methods_and_their_slack_are_written_in_toml():
    text = '[method]\nname = "sfat"\nslack = { alpha = 0.1, chosen = 4 }\nobjective = "trades"'
    assert config.method(config.parse(text)) == sfat(slack=slack(alpha=0.1, chosen=4), objective=trades())
    short = config.parse("", ["method=sfat_prox", "method.slack.believed=inf", "method.strength=0.1"])
    made = config.method(short)
    assert made.objective.strength == 0.1
    assert made.aggregator.weight == pipeline(pre=(slack(believed=math.inf),))
    staged = 'method.aggregator={ name = "pipeline", pre = [{ name = "slack", kind = "AT" }] }'
    assert config.method(config.parse("", ["method=fatavg", staged])).aggregator == pipeline(pre=(slack(kind="AT"),))


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": 1.0},
        {"alpha": -1.0},
        {"chosen": 0},
        {"start": 0},
        {"anneal": 0},
        {"believed": 1.0},
        {"turns": 0.0},
        {"turns": 1.5},
        {"shrink": 0.0},
    ],
)
def test_bad_options_are_refused(wrong):
    with pytest.raises(HardyError, match=rf"slack {next(iter(wrong))} is .*; it must be"):
        slack(**wrong)


@pytest.mark.parametrize(
    "path", [p for p in EXPERIMENTS.glob("*.toml") if "data" in tomllib.loads(p.read_text())], ids=lambda p: p.stem
)
def test_experiments_can_be_read(path):
    for arm in ([], ["method.slack.as_published=true"], ["method.name=sfat_prox"], ["method.name=sfat_scaffold"]):
        made = config.method(hardy.read(str(path), arm))
        assert made.objective.branches == {"clean"} and made.name.startswith("sfat")
