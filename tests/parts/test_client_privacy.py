"""Client-level differential privacy: what the stage does to numbers, what it promises, and what it refuses."""

import dataclasses
import json
from math import inf, sqrt

import pytest
import torch

import hardy
from conftest import assert_close, everything, experiment, federation, fit, net
from hardy import papers
from hardy.config.experiment import ServerChoice
from hardy.core.account import Mechanism, epsilon_of
from hardy.core.admission import Admission
from hardy.core.cohort import Cohort
from hardy.core.messages import Slot, Updates
from hardy.core.partition import Role
from hardy.core.protocols import RoundContext
from hardy.core.spending import privacy_spent
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.faults.injection import Faults
from hardy.papers.sfat import slack
from hardy.parts.aggregators.base import mean, pipeline
from hardy.parts.aggregators.client_privacy import client_level_dp
from hardy.parts.aggregators.memories import client_momentum, delayed_momentum
from hardy.parts.aggregators.robust import trimmed_mean
from hardy.parts.aggregators.stages import bucketing, nearest_neighbour_mixing
from hardy.parts.aggregators.trust import fltrust
from hardy.parts.norms import group
from hardy.runs.prepare import prepare
from hardy.runs.workers import refuse_workers

OPEN = {"admission": Admission(largest_ratio=inf)}


def method(rule=None, *more, norm=None, **options):
    stage = client_level_dp(**{"clip": 0.5, "noise": 0.4, "delta": 0.01, **options})
    aggregator = pipeline(pre=(stage, *more), rule=rule or mean())
    return papers.fedavg(norm=norm or group()).replace(aggregator=aggregator)


def given(rows, cohort=0):
    """Updates of these rows, and the round they came in: zeros were sent down."""
    values = torch.tensor(rows, dtype=torch.float64)
    each = torch.ones(len(rows), dtype=torch.float64)
    updates = Updates(
        slots=[Slot(client) for client in range(len(rows))],
        shared={"w": values},
        reported={},
        weights=7 * each,
        steps=each,
        loss=each,
    )
    shared = {"w": torch.zeros(1, values.shape[1], dtype=torch.float64)}
    return updates, RoundContext(shared=shared, roles={"w": Role.WEIGHT}, bases=1, clients=50, cohort=cohort, seed=3)


def result(stage, rows, cohort=0):
    updates, context = given(rows, cohort)
    rule = pipeline(pre=(stage,))
    shared, memory = rule.finish(rule.fold(None, updates, context), context, rule.memory(context))
    return shared["w"][0], memory


def test_moves_are_cut_and_divided_by_the_cohort():
    """(3, 4) is 5 long and cut to (0.6, 0.8); (0, 0.5) stays; two of four clients have answered."""
    found, _ = result(client_level_dp(clip=1.0, noise=0.0), [[3.0, 4.0], [0.0, 0.5]], cohort=4)
    torch.testing.assert_close(found, torch.tensor([0.15, 0.325], dtype=torch.float64))


@pytest.mark.parametrize("entropy", ["seed", "system"])
def test_the_noise_on_the_mean_is_as_large_as_said(entropy):
    size = 40_000
    stage = client_level_dp(clip=2.0, noise=1.5, entropy=entropy)
    found, _ = result(stage, [[0.0] * size] * 5, cohort=10)
    assert found.std().item() == pytest.approx(2.0 * 1.5 / 10, rel=0.03)
    assert abs(found.mean().item()) < 5 * 0.3 / sqrt(size)
    again, _ = result(stage, [[0.0] * size] * 5, cohort=10)
    assert torch.equal(found, again) is (entropy == "seed")


def test_each_update_has_noise_of_its_own():
    updates, context = given([[0.0] * 20_000] * 3)
    left, _ = client_level_dp(clip=2.0, noise=1.5, on="updates").apply(updates, context, {})
    rows = left.shared["w"]
    assert rows.std(1).tolist() == pytest.approx([3.0] * 3, rel=0.03)
    assert torch.corrcoef(rows).triu(1).abs().max() < 0.03
    assert left.weights.tolist() == left.steps.tolist() == [1.0] * 3 and left.loss.tolist() == [0.0] * 3


def test_the_clip_follows_a_quantile():
    """Three of four moves are below 1: the clip shrinks by e^(−0.2 (0.75 − 0.5))."""
    stage = client_level_dp(clip=1.0, noise=0.0, quantile=0.5)
    _, memory = result(stage, [[0.1], [0.2], [0.3], [9.0]], cohort=4)
    assert memory["0.clip"].item() == pytest.approx(0.951229, abs=1e-6)
    assert stage.figures({"clip": memory["0.clip"]}) == {"clip": pytest.approx(0.951229, abs=1e-6)}


def test_a_clip_that_is_sought_costs_noise():
    """Andrew et al. 2021, Theorem 1: z = 1 and σ_b = 2 leave (1 − 1/16)^(−1/2) = 1.0328 for the moves."""
    stage = client_level_dp(clip=1.0, noise=1.0, quantile=0.5, count_noise=2.0)
    found, _ = result(stage, [[0.0] * 40_000] * 4, cohort=4)
    assert found.std().item() == pytest.approx(1.0328 / 4, rel=0.02)


def test_no_client_moves_the_model_further_than_the_account_says():
    """The premise of the account, on whole rounds: other data at one client, at most twice the clip over the cohort."""
    data = federation()
    rows = data.clients[1].train
    other = dataclasses.replace(data, x_train=data.x_train.copy(), y_train=data.y_train.copy())
    other.x_train[rows] = 255 - other.x_train[rows]
    other.y_train[rows] = (other.y_train[rows] + 1) % 3
    one, two = (fit(method(clip=0.05), data=given, rounds=1, **OPEN) for given in (data, other))
    moved = torch.cat([(one.state.shared[n] - t).flatten() for n, t in two.state.shared.items()])
    assert 0.25 * 0.05 / 4 < moved.norm().item() <= 2 * 0.05 / 4 + 1e-9


@pytest.mark.parametrize("rule", [None, trimmed_mean(f=1)], ids=["sum", "updates"])
def test_engines_agree_and_resuming_is_exact(rule, tmp_path):
    chosen = method(rule, on="updates" if rule else "sum", **({} if rule else {"quantile": 0.5, "count_noise": 1.0}))
    options = {**OPEN, "data": federation(), "faults": Faults(late=0.1)}
    one = fit(chosen, **options)
    many = fit(chosen, engine=EngineChoice(name="vectorised", device="cpu", precision="float64", lane=3), **options)
    assert_close(everything(one), everything(many), 1e-9)
    fit(chosen, out=tmp_path / "half", rounds=2, **options)
    config = tmp_path / "half" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 4"))
    bound = one.engine.plan.method
    resumed = hardy.resume(tmp_path / "half", method=bound, model=net, data=options["data"], quiet=True)
    assert_close(everything(one), everything(resumed), 0)
    assert resumed.summary()["privacy"] == one.summary()["privacy"]


def test_what_a_run_has_spent(tmp_path):
    data = federation(sizes=(6,) * 12)
    run = fit(method(clip=1.0), data=data, rounds=3, cohort=Cohort(clients=3), out=tmp_path / "run", **OPEN)
    by_hand = epsilon_of([Mechanism(what="", unit="client", noise=0.2, share=0.25, times=3)], 0.01)
    (spent,) = run.summary()["privacy"]
    assert spent["epsilon"] == by_hand and spent["delta"] == 0.01
    assert spent["adjacency"] == "one client replaced by another"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"] == [spent]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    epsilons = [line["client_epsilon"] for line in lines]
    assert epsilons[-1] == by_hand and epsilons == sorted(epsilons) and epsilons[0] > 0
    report = (tmp_path / "run" / "report.html").read_text()
    assert "Differential privacy" in report and f"{by_hand:.3g}" in report


def test_poisson_cohorts():
    data = federation(sizes=(2,) * 60)
    cohort = Cohort(fraction=0.4, sampling="poisson")
    sizes = [len(cohort.sample(0, number, 60)) for number in range(200)]
    assert len(set(sizes)) > 5 and sum(sizes) / 200 == pytest.approx(24, abs=1.5)
    run = prepare(experiment(cohort=cohort, **OPEN), method=method(), model=net, data=data)
    by_hand = Mechanism(what="", unit="client", noise=0.4, share=0.4, sampling="poisson", times=5)
    (spent,) = privacy_spent(run.server, 5)
    assert spent["epsilon"] == epsilon_of([by_hand], 0.01)
    assert spent["adjacency"] == "one client added or removed"
    with pytest.raises(HardyError, match=r"is empty with a chance of 0\.0039"):
        prepare(
            experiment(cohort=Cohort(fraction=0.8, sampling="poisson"), **OPEN),
            method=method(),
            model=net,
            data=federation(),
        )


def test_without_noise_there_is_no_bound():
    run = fit(method(noise=0.0), rounds=1, **OPEN)
    assert run.summary()["privacy"][0]["epsilon"] is None
    assert fit(papers.fedavg(), rounds=1).summary()["privacy"] == []


STATISTICS = {"noise": 0.5, "bound": 2.0}


def test_reported_statistics_are_counted_and_end_the_amplification():
    """FedRBN × trimmed mean: every client was asked in both rounds or in one; 3 rows a step, 2 branches."""
    aggregator = method(trimmed_mean(f=1), on="updates").aggregator
    kinds = ("AT", "ST") * 3
    data = federation(sizes=(6,) * 6)
    data = dataclasses.replace(
        data, clients=tuple(dataclasses.replace(c, kind=k) for c, k in zip(data.clients, kinds, strict=True))
    )
    run = prepare(
        experiment(cohort=Cohort(clients=4), **OPEN),
        method=papers.fedrbn(**STATISTICS).replace(aggregator=aggregator),
        model=net,
        data=data,
    )
    (spent,) = privacy_spent(run.server, 2)
    updates, *statistics = (m for m in reversed(spent["mechanisms"]))
    assert (updates["share"], updates["times"]) == (1.0, 2)
    layers, steps = len(run.engine.plan.names(hardy.core.partition.Placement.REPORTED)) // 5, 2 * 2
    assert [m["times"] for m in statistics] == [2 * layers * 2 * steps] * 2
    assert [m["noise"] for m in statistics] == [0.5 / (2 * 0.1 * 2.0)] * 2
    alone = prepare(experiment(), method=papers.fedrbn(**STATISTICS), model=net, data=data)
    (spent,) = privacy_spent(alone.server, 2)
    assert spent["covers"] == "reported statistics alone, not the weights"


def test_who_reports_cannot_be_added_or_removed_unseen():
    """With Poisson cohorts too a client is then replaced, at the weights as at the statistics: a sum moves by 2 C."""
    data = federation(sizes=(6,) * 40)
    data = dataclasses.replace(
        data, clients=tuple(dataclasses.replace(c, kind="AT" if at % 2 else "ST") for at, c in enumerate(data.clients))
    )
    run = prepare(
        experiment(cohort=Cohort(fraction=0.5, sampling="poisson"), **OPEN),
        method=papers.fedrbn(**STATISTICS).replace(aggregator=method(clip=1.0).aggregator),
        model=net,
        data=data,
    )
    (spent,) = privacy_spent(run.server, 3)
    weights = next(one for one in spent["mechanisms"] if one["what"] == "sum of the clients' moves")
    assert spent["adjacency"] == "one client replaced by another"
    assert (weights["noise"], weights["sampling"], weights["share"]) == (0.2, "fixed", 1.0)
    assert weights["times"] == max(run.server.networks_asked(3))


def test_a_run_that_was_changed_is_no_longer_accounted(tmp_path):
    """ε is worked out from config.toml for all rounds: a change would be taken for what the first rounds did."""
    folder, data = tmp_path / "run", federation()
    fit(method(noise=0.4), data=data, rounds=2, out=folder, **OPEN)
    config = folder / "config.toml"
    before = config.read_text()
    config.write_text(before.replace("rounds = 2", "rounds = 4").replace("rate = 0.1", "rate = 0.05"))
    given = {"method": method(noise=0.4), "model": net, "data": data, "quiet": True, "allow_change": True}
    assert hardy.resume(folder, **given).summary()["privacy"][0]["mechanisms"][0]["times"] == 4
    config.write_text(
        config.read_text().replace("rounds = 4", "rounds = 6").replace("fraction = 1.0", "fraction = 0.5")
    )
    with pytest.raises(HardyError, match=r"cohort.fraction was 1.0, is 0.5. The privacy account takes all rounds"):
        hardy.resume(folder, **given)
    with pytest.raises(HardyError, match="The privacy account takes all rounds"):
        hardy.resume(folder, **{**given, "method": papers.fedavg(norm=group())})


def test_a_warm_start_says_that_its_past_is_not_counted(caplog):
    first = fit(papers.fedavg(norm=group()), rounds=1)
    options = {"model": net, "data": federation(), "quiet": True, "init": first}
    hardy.fit(experiment(rounds=1), method=papers.fedavg(norm=group()), **options)
    assert "privacy" not in caplog.text
    hardy.fit(experiment(rounds=1, **OPEN), method=method(), **options)
    assert "the privacy account is of this run alone" in caplog.text


def test_rows_that_the_server_takes_from_clients_are_covered_by_no_noise():
    chosen = method(fltrust(), on="updates")
    with pytest.raises(HardyError, match=r"server.rows is 4: the server takes them from the clients, and no noise"):
        prepare(experiment(server=ServerChoice(rows=4), **OPEN), method=chosen, model=net, data=federation())


def test_workers_would_draw_other_noise():
    run = prepare(experiment(**OPEN), method=method(entropy="system"), model=net, data=federation())
    refuse_workers(run)
    two = dataclasses.replace(run.experiment.engine, workers=2)
    run.experiment = dataclasses.replace(run.experiment, engine=two)
    with pytest.raises(HardyError, match="with entropy = system each would draw other noise"):
        refuse_workers(run)


def test_stages_that_remember_clients_end_the_amplification():
    """What they make of an update tells whose it is, and so who was asked."""
    shares = []
    for more in ((), (client_momentum(momentum=0.5),), (delayed_momentum(momentum=0.5),)):
        chosen = method(trimmed_mean(f=1), *more, on="updates")
        few = experiment(cohort=Cohort(clients=4), **OPEN)
        (spent,) = privacy_spent(prepare(few, method=chosen, model=net, data=federation(sizes=(6,) * 6)).server, 3)
        (mechanism,) = spent["mechanisms"]
        shares.append(mechanism["share"])
    assert shares == [4 / 6, 1.0, 1.0] and mechanism["times"] <= 3


def test_a_batch_says_no_more_than_the_bound():
    layer = papers.fedbn().norm.layer(3)
    layer.clean.bound, layer.clean.momentum = 0.5, 0.1
    x = 40 * torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(0)) + 7
    from hardy.core.layers import calling

    with calling(branch="clean", statistics="batch", key=torch.tensor(1)):
        layer(x)
    moved = torch.stack([layer.clean.mean, layer.clean.var - 1])
    assert moved.norm().item() == pytest.approx(0.1 * 0.5, rel=1e-5)


REFUSED = {
    "running statistics can make a variance negative": (method(norm=papers.fedavg().norm), {}),
    "reports clients' statistics without an account": (papers.fedrbn().replace(aggregator=method().aggregator), {}),
    "is enough for a sum, but TrimmedMean": (method(trimmed_mean(f=1)), {}),
    "is enough for a sum, but NearestNeighbourMixing": (method(None, nearest_neighbour_mixing(f=1)), {}),
    "stage Bucketing": (method(trimmed_mean(f=0), bucketing(size=2), on="updates"), {}),
    "stage Slack": (method(None, slack(), on="updates"), {}),
    "must be the first stage": (
        papers.fedavg(norm=group()).replace(
            aggregator=pipeline(pre=(nearest_neighbour_mixing(f=1), client_level_dp(clip=1.0, noise=1.0)))
        ),
        {},
    ),
    "is in more than one sum": (papers.split_mix().replace(aggregator=method().aggregator, norm=group()), {}),
    "clients send no weights": (papers.local_only().replace(aggregator=method().aggregator, norm=group()), {}),
    "it must be below 0.25": (method(delta=0.3), {}),
    "must be above half of noise": (method(quantile=0.5, noise=1.0), {}),
    "which Poisson cohorts must not": (
        method(trimmed_mean(f=1), on="updates"),
        {"cohort": Cohort(fraction=0.75, sampling="poisson")},
    ),
    "Set it to inf": (method(), {"admission": Admission()}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_would_leak_is_refused(why):
    chosen, changes = REFUSED[why]
    with pytest.raises(HardyError, match=why):
        prepare(experiment(**{**OPEN, **changes}), method=chosen, model=net, data=federation())


@pytest.mark.parametrize(
    "options", [{"clip": 0.0}, {"noise": -1.0}, {"delta": 1.0}, {"quantile": 1.0}, {"clip_rate": 0.5}]
)
def test_values_outside_their_limits_are_refused(options):
    with pytest.raises(HardyError, match="client_level_dp"):
        client_level_dp(**{"clip": 1.0, "noise": 1.0, **options})
