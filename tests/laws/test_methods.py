"""What must hold for every method, whoever writes it."""

import dataclasses

import numpy as np
import pytest
import torch

import hardy
from conftest import assert_close, everything, experiment, federation, fit, net
from hardy import papers
from hardy.core.cohort import Cohort
from hardy.core.messages import Slot
from hardy.core.partition import Placement, Role
from hardy.core.training import Training
from hardy.engines import EngineChoice, sequential
from hardy.engines.vectorised import Vectorised
from hardy.faults.injection import Faults
from hardy.papers.sfat import slack
from hardy.parts.objectives import cross_entropy

VECTORISED = EngineChoice(name="vectorised", device="cpu", precision="float64", lane=3)


def test_engines_agree(method):
    options = {"cohort": Cohort(fraction=0.75), "faults": Faults(dropped=0.1, crashed=0.1, late=0.1)}
    one = fit(method, **options)
    many = fit(method, engine=VECTORISED, **options)
    assert_close(everything(one), everything(many), 1e-9)
    assert one.figures.latest == many.figures.latest


def test_lanes_kept_from_round_to_round_agree(method, monkeypatch):
    """As on a GPU, where captured steps work on the same tensors for good; here they are not captured."""
    monkeypatch.setattr(Vectorised, "fixed", True)
    options = {"cohort": Cohort(fraction=0.75), "faults": Faults(dropped=0.1, crashed=0.1, late=0.1)}
    assert_close(everything(fit(method, **options)), everything(fit(method, engine=VECTORISED, **options)), 1e-9)


def test_mixed_precision_rounds_and_no_more(method):
    """A step in bfloat16 on both engines: what is kept and sent is float32, and moves where the exact step moves it."""
    training = experiment().training.with_steps(1)
    exact, *rounded = (
        fit(method, rounds=1, training=training, engine=EngineChoice(name=name, device="cpu", precision=precision))
        for name, precision in (("sequential", "float32"), ("sequential", "bfloat16"), ("vectorised", "bfloat16"))
    )
    first = hardy.runs.prepare.prepare(experiment(rounds=1), method=method, model=net, data=federation())
    start = everything(first)

    def moved(run):
        names = [name for name, tensor in start.items() if tensor.is_floating_point()]
        return torch.cat([(everything(run)[name] - start[name].float()).flatten() for name in names])

    for run in rounded:
        assert {n: t.dtype for n, t in everything(run).items()} == {n: t.dtype for n, t in everything(exact).items()}
        assert 0 < (moved(run) - moved(exact)).norm() < 0.25 * moved(exact).norm()


def test_resume_is_exact(method, tmp_path):
    options = {"cohort": Cohort(fraction=0.5), "data": federation()}
    whole = fit(method, out=tmp_path / "whole", **options)
    half = tmp_path / "half"
    fit(method, out=half, **{**options, "rounds": 2})
    text = (half / "config.toml").read_text().replace("rounds = 2", "rounds = 4")
    (half / "config.toml").write_text(text)
    resumed = hardy.resume(half, method=method, model=net, data=options["data"], quiet=True)
    for name, tensor in everything(whole).items():
        assert torch.equal(tensor, everything(resumed)[name]), name
    assert whole.figures.best == resumed.figures.best
    assert whole.summary()["bytes_up"] == resumed.summary()["bytes_up"]


def test_order_of_clients_is_irrelevant(method, monkeypatch):
    """The same clients in another order give the same shared tensors. A client's number also picks the order of its
    examples and its noise: here all clients draw the same (and pooled ones train on whole batches)."""
    if method.name == "fed_ensemble":
        pytest.skip("a client's number draws the order in which it trains the models")
    batches, keys = Training.batches, sequential.step_keys
    monkeypatch.setattr(
        Training, "batches", lambda self, rows, rng, round: batches(self, rows, np.random.default_rng(round), round)
    )
    monkeypatch.setattr(
        sequential, "step_keys", lambda seed, round, slots, steps: keys(seed, round, [Slot(0)] * len(slots), steps)
    )
    data = federation()
    order = [2, 0, 3, 1]
    shuffled = dataclasses.replace(data, clients=tuple(data.clients[i] for i in order))
    training = dataclasses.replace(experiment().training, batch=100)
    first = fit(method, data=data, training=training)
    second = fit(method, data=shuffled, training=training)
    assert_close(first.state.shared, second.state.shared, 1e-9)
    mine = {name: tensor[order] for name, tensor in first.engine.store.items()}
    assert_close(mine, second.engine.store, 1e-9)


def test_only_shared_and_reported_tensors_travel(method):
    plan = method.bind(net, (1, 8, 8))
    run = fit(method, rounds=1)
    assert set(run.state.shared) == set(plan.names(Placement.SHARED))
    assert set(run.state.reported) == set(plan.names(Placement.REPORTED))
    assert set(run.engine.store) == set(plan.names(Placement.PRIVATE))


def test_a_client_that_turns_to_nan_changes_nothing_for_the_others(method, monkeypatch):
    """Client 1 holds images of NaN: its reply is refused, and the others get what they get without it."""
    if method.pooled:
        pytest.skip("one pooled client: there are no others")
    from hardy.engines import base

    images = base.DeviceData.images
    data = federation()
    poisoned = torch.from_numpy(data.clients[1].train)

    def broken(self, part, rows):
        x = images(self, part, rows)
        bad = torch.isin(rows, poisoned) if part == "train" else torch.zeros_like(rows, dtype=torch.bool)
        return torch.where(bad[..., None, None, None], torch.nan, x)

    absent = fit(method, data=data, rounds=1, faults=_Always(client=1))
    monkeypatch.setattr(base.DeviceData, "images", broken)
    refused = fit(method, data=data, rounds=1)
    if absent.state.shared:
        assert_close(absent.state.shared, refused.state.shared, 0)
        assert refused.figures.lost == {"refused": 1}
    others = [0, 2, 3]
    for name, tensor in absent.engine.store.items():
        assert torch.equal(tensor[others], refused.engine.store[name][others]), name


@dataclasses.dataclass(frozen=True)
class _Always(Faults):
    client: int = 0

    def sample_faults(self, seed, round, cohort):
        return {self.client: "dropped"}


@pytest.mark.parametrize(
    "degenerate",
    [papers.fedprox(strength=0.0), papers.fednova(), papers.sfat(slack=slack(alpha=0.0), objective=cross_entropy())],
    ids=lambda m: m.name,
)
def test_degenerates_to_fedavg(degenerate):
    data = federation(sizes=(8, 8, 8))  # equal steps, so FedNova has nothing to correct
    assert_close(fit(papers.fedavg(), data=data).state.shared, fit(degenerate, data=data).state.shared, 1e-9)


def test_scaffold_starts_as_fedavg_and_its_variates_average():
    data = federation(sizes=(8, 8, 8))
    run = fit(papers.scaffold(), data=data, rounds=1)
    plain = fit(papers.fedavg(), data=data, rounds=1)
    assert_close(plain.state.shared, {n: run.state.shared[n] for n in plain.state.shared}, 1e-12)
    later = fit(papers.scaffold(), data=data, rounds=3)
    for name in (n for n in later.state.shared if n.startswith("c.")):
        mean = later.engine.store["c_i." + name.removeprefix("c.")].mean(0)
        torch.testing.assert_close(later.state.shared[name], mean)  # c is the mean of c_i under full participation
        assert later.state.shared[name].abs().sum() > 0


def test_fedbn_keeps_norms_at_home_and_shares_the_rest():
    run = fit(papers.fedbn())
    plan = run.engine.plan
    private = {n for n, tag in plan.tags.items() if tag.role is not Role.WEIGHT}
    assert private == set(run.engine.store)
    for tensor in run.engine.store.values():
        assert not torch.equal(tensor[0], tensor[1])


def test_fedavg_averages_running_statistics():
    """Which buffers move is decided by role: under plain BN the server's mean is the mean of the clients'."""
    data = federation(sizes=(8, 8))
    run = fit(papers.fedavg(), data=data, rounds=1)
    alone = fit(papers.local_only(), data=data, rounds=1)
    names = [n for n, tag in run.engine.plan.tags.items() if tag.role in (Role.NORM_MEAN, Role.NORM_VAR)]
    assert names
    for name in names:
        torch.testing.assert_close(run.state.shared[name], alone.engine.store[name].mean(0))


def test_centralised_is_one_client_with_all_rows():
    data = federation()
    merged = dataclasses.replace(data.clients[0], train=np.concatenate([c.train for c in data.clients]))
    one = dataclasses.replace(data, clients=(merged,))
    assert_close(fit(papers.centralised(), data=data).state.shared, fit(papers.fedavg(), data=one).state.shared, 0)


def test_faults_strike_as_asked():
    everyone = fit(papers.fedavg(), rounds=30, faults=Faults(dropped=0.3, crashed=0.2, late=0.2))
    asked = 30 * 4
    for kind, chance in (("dropped", 0.3), ("crashed", 0.2), ("late", 0.2)):
        assert abs(everyone.figures.lost[kind] / asked - chance) < 0.15
    nobody = fit(papers.fedavg(), rounds=2, faults=Faults(dropped=1.0))
    start = nobody.server.start()
    assert_close({n: t.double() for n, t in start.shared.items()}, nobody.state.shared, 0)
