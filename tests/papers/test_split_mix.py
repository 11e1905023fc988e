"""Split-Mix: independent bases within budgets, mixed to any width and robustness."""

import dataclasses
import json
from collections import Counter
from functools import partial

import pytest
import torch

import hardy
from conftest import assert_close, everything, experiment, federation, fit, net, with_momentum
from hardy import papers
from hardy.attacks.autoattack import fab
from hardy.attacks.gradient import pgd
from hardy.config import DataChoice
from hardy.core.cohort import Cohort
from hardy.core.engine import Branches
from hardy.core.federation import Client
from hardy.core.net import Mixture, Net
from hardy.core.partition import Placement
from hardy.core.tensors import gather, select
from hardy.data.capacity import exponential, groups, log_normal, steps, with_capacity
from hardy.data.kinds import with_kinds
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.evaluation.measure import ServedClients, order_of_bases, summarise
from hardy.papers.fedbn import local
from hardy.papers.fedrbn import propagated
from hardy.papers.sfat import slack
from hardy.papers.split_mix import queue
from hardy.parts.adversarial import adversarial, by_kind
from hardy.parts.aggregators.base import pipeline
from hardy.parts.norms import batch, dual
from hardy.parts.objectives import cross_entropy
from hardy.runs import api as evaluation
from hardy.runs.evaluate import evaluate_settings

ROWS = torch.arange(6)
dat = partial(papers.split_mix_dat, attack=pgd(steps=2))


def unlike(capacities=(1.0, 0.25, 0.5, 0.75), data=None):
    data = data or federation()
    clients = (dataclasses.replace(c, capacity=own) for c, own in zip(data.clients, capacities, strict=True))
    return dataclasses.replace(data, clients=tuple(clients))


def bases(run, count):
    plan = run.engine.plan
    held = [gather(run.state.shared, b) for b in range(count)]
    return [Net(plan.model, select(h, plan.trained), select(h, plan.buffers)) for h in held]


def test_one_base_of_width_one_is_fedavg():
    assert_close(everything(fit(papers.fedavg())), everything(fit(papers.split_mix(width=1.0))), 0)


def test_bases_start_apart_and_the_first_as_ever():
    torch.manual_seed(3)
    plain = papers.fedavg().bind(net, (1, 8, 8)).start
    torch.manual_seed(3)
    plan = papers.split_mix(width=0.25, rescale_init=False).bind(net, (1, 8, 8))
    first = plan.first(Placement.SHARED, 4)
    assert_close(plain, gather(first, 0), 0)
    weight = first["conv1.weight"]
    assert len({tuple(row.flatten().tolist()) for row in weight}) == 4


def test_rescaled_first_values_have_the_variance_of_the_x1_network():
    from hardy.models import digits_cnn

    torch.manual_seed(0)
    base, *_ = queue(width=0.25).networks(lambda: digits_cnn(width=0.25))
    whole = digits_cnn()
    for name, narrow in base.named_parameters():
        if "conv" in name or "fc" in name:
            wide = dict(whole.named_parameters())[name]
            if narrow.numel() > 500:
                assert narrow.std().item() == pytest.approx(wide.std().item(), rel=0.1), name


def test_the_queue_gives_every_base_to_every_client():
    budget, clients = queue(width=0.25), unlike().clients
    met, rounds = Counter(), 400
    for round in range(rounds):
        slots = budget.assign(round, range(4), clients, seed=1)
        assert slots == budget.assign(round, range(4), clients, seed=1)
        assert len(set(slots)) == len(slots) and Counter(s.client for s in slots) == {0: 4, 1: 1, 2: 2, 3: 3}
        assert {s.base for s in slots} == set(range(4))  # the queue goes round once
        met.update((s.client, s.base) for s in slots)
    for (client, _), times in met.items():
        assert times / rounds == pytest.approx((4, 1, 2, 3)[client] / 4, abs=0.08)
    assert len(met) == 16


def test_a_base_nobody_trained_keeps_its_value_and_the_others_are_averaged():
    run = fit(papers.split_mix(width=0.25), data=unlike((0.25, 0.25, 0.25, 0.25)), rounds=1, cohort=Cohort(clients=2))
    trained = {slot.base for slot in run.server.ask(0)[2]}
    assert len(trained) == 2
    for name, start in run.server.start().shared.items():
        for base in range(4):
            assert torch.equal(start[base].double(), run.state.shared[name][base]) == (base not in trained), name


def test_engines_agree_and_a_resumed_run_takes_the_queue_up_where_it_was(tmp_path):
    method, data = dat(width=0.25), unlike()
    options = {"data": data, "cohort": Cohort(clients=3)}
    one = fit(method, out=tmp_path / "whole", **options)
    engine = EngineChoice(name="vectorised", device="cpu", precision="float64", lane=3)
    assert_close(everything(one), everything(fit(method, engine=engine, **options)), 1e-9)
    fit(method, out=tmp_path / "half", rounds=2, **options)
    config = tmp_path / "half" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 4"))
    assert_close(
        everything(one),
        everything(hardy.resume(config.parent, method=with_momentum(method), model=net, data=data, quiet=True)),
        0,
    )


def test_a_width_is_the_mean_of_its_first_bases_logits():
    run = fit(papers.split_mix(width=0.25), data=unlike(), rounds=1)
    x = torch.rand(5, 1, 8, 8, dtype=torch.float64)
    logits = torch.stack([base(x) for base in bases(run, 2)])
    torch.testing.assert_close(run.customise(width=0.5)(x), logits.mean(0))
    torch.testing.assert_close(run.customise(width=0.7)(x), logits.mean(0))  # two bases fit into 0.7
    y = run.engine.device_data.y["test"]
    right = run.customise(width=0.5)(run.engine.device_data.images("test", torch.arange(len(y)))).argmax(1) == y
    deployed = ServedClients(run.engine, run.state, "test", Branches(), None, width=0.5)
    for rows, mask in zip(deployed.rows, deployed.standing(), strict=True):
        assert right[torch.from_numpy(rows)].tolist() == mask.tolist()


def test_robustness_zero_and_one_are_the_pure_branches_and_between_layers_mix():
    run = fit(dat(width=0.5), rounds=2)
    x = torch.rand(5, 1, 8, 8, dtype=torch.float64)
    mixed = Mixture(bases(run, 2))
    for robustness, branch in ((0.0, "clean"), (1.0, "adversarial")):
        torch.testing.assert_close(mixed(x, robustness=robustness), mixed(x, branch=branch), rtol=0, atol=1e-12)
    layer = run.engine.plan.model.get_submodule("norm1")
    held = {n.removeprefix("norm1."): t[0] for n, t in run.state.shared.items() if n.startswith("norm1.")}
    from hardy.core.layers import calling

    z, seen = torch.randn(3, 8, 2, 2, dtype=torch.float64), {}
    for key, how in (("clean", {}), ("adversarial", {}), ("mix", {"robustness": torch.tensor(0.3)})):
        with calling(branch="clean" if key == "mix" else key, statistics="running", key=None, **how):
            seen[key] = torch.func.functional_call(layer, held, (z,))
    torch.testing.assert_close(seen["mix"], 0.7 * seen["clean"] + 0.3 * seen["adversarial"])


def test_the_mixture_is_attacked_as_a_whole():
    """The attack is given the gradient of the deployed mixture, at its robustness."""
    run = fit(dat(width=0.5), rounds=1)
    attack = pgd(epsilon=0.1, steps=3)
    deployed = ServedClients(run.engine, run.state, "test", Branches(robustness=0.4), None)
    found = deployed.right(deployed.attacked(attack, deployed.answers(), torch.tensor(5)))
    seen = []

    class Spy(type(attack)):
        def perturb(self, forward, x, y, key):
            seen.append((forward, x))
            return super().perturb(forward, x, y, key)

    deployed.attacked(Spy(epsilon=0.1, steps=3), deployed.answers(), torch.tensor(5))
    for forward, x in seen:
        torch.testing.assert_close(forward(x), Mixture(bases(run, 2))(x, robustness=0.4))
    table = evaluation.evaluate(run, "fgsm", robustness=0.4, width=0.5, checks=False, quiet=True)
    assert table["provenance"]["settings"]["width"] == 0.5 and len(found) == 4


@pytest.mark.parametrize("serving", ["batch", "recomputed"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_norms_served_by_the_batch_and_measured_afterwards(serving, engine):
    chosen = EngineChoice(name=engine, device="cpu", precision="float64")
    run = fit(papers.split_mix(width=0.5, norm=batch(inference_statistics=serving)), rounds=1, engine=chosen)
    deployed = ServedClients(run.engine, run.state, "test", Branches(), None)
    standing = deployed.standing()
    client = run.engine.data.clients[1]
    x = run.engine.device_data.images("test", torch.from_numpy(client.test))
    y = run.engine.device_data.y["test"][torch.from_numpy(client.test)]
    if serving == "batch":
        logits = torch.stack([n(x, statistics="batch") for n in bases(run, 2)]).mean(0)
    else:
        train = run.engine.device_data.images("train", torch.from_numpy(client.train))
        first = bases(run, 1)[0].model.get_submodule("conv1")
        held = {n: t[0] for n, t in run.state.shared.items()}
        seen = torch.func.functional_call(
            first, {"weight": held["conv1.weight"], "bias": held["conv1.bias"]}, ((train - 0.5) / 0.5,)
        )
        torch.testing.assert_close(deployed.own[0]["norm1.clean.mean"][1], seen.mean((0, 2, 3)))
        logits = deployed.network(deployed.common, [gather(own, 1) for own in deployed.own])(x)
    assert (logits.argmax(1) == y).tolist() == standing[1].tolist()


def test_served_by_the_batch_an_attack_faces_all_rows_and_the_red_flag_goes_up():
    run = fit(papers.split_mix(width=0.5, norm=batch(inference_statistics="batch")), rounds=1)
    deployed = ServedClients(run.engine, run.state, "test", Branches(), None)
    standing = deployed.standing()
    left = deployed.right(deployed.attacked(pgd(epsilon=0.0, steps=1), deployed.answers(), torch.tensor(0)))
    assert [m.tolist() for m in left] == [m.tolist() for m in standing]
    near, client = fab(targets=2, steps=5, epsilon=0.5), run.engine.data.clients[1]
    left = deployed.right(deployed.attacked(near, deployed.answers(), torch.tensor(0)))
    x = run.engine.device_data.images("test", torch.from_numpy(client.test))
    y = run.engine.device_data.y["test"][torch.from_numpy(client.test)]
    network = deployed.network(deployed.common, deployed.own)
    alone = network(near.perturb(network, x, y, torch.tensor(0))).argmax(1) == y
    assert (alone.numpy() & standing[1]).tolist() == left[1].tolist() != standing[1].tolist()
    found = evaluation.evaluate(run, "fgsm", quiet=True)
    assert "batch_dependent" in {flag["name"] for flag in found["flags"]}


def test_sorted_bases_are_served_best_first():
    run = fit(papers.split_mix(width=0.25, sort=True), data=unlike(), rounds=2)
    order = order_of_bases(run.engine, run.state)
    alone = []
    for base in order:
        served = ServedClients(run.engine, run.state, "validation", Branches(), width=0.25, order=[base])
        alone.append(summarise(served.standing(), run.engine.data.clients)["mean"])
    assert sorted(order) == [0, 1, 2, 3] and alone == sorted(alone, reverse=True)
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(run.customise(width=0.25)(x), bases(run, 4)[order[0]](x))


def test_capacities():
    def dealt(capacity, clients=8):
        client = Client(domain="", train=ROWS.numpy(), validation=ROWS.numpy(), test=ROWS.numpy())
        made = dataclasses.replace(federation(), clients=(client,) * clients)
        return [c.capacity for c in with_capacity(made, capacity, seed=0).clients]

    assert dealt(exponential(shuffled=False)) == [0.125, 0.125, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0]
    assert Counter(dealt(exponential())) == Counter(dealt(exponential(shuffled=False))) and dealt(
        exponential()
    ) != dealt(exponential(shuffled=False))
    assert dealt(exponential(factor=4, levels=2, shuffled=False)) == [0.25] * 4 + [1.0] * 4
    assert dealt(steps(step=0.25, shuffled=False))[::2] == [0.25, 0.5, 0.75, 1.0]
    assert dealt(groups(widths=(1.0, 0.5), shuffled=False)) == [0.5] * 4 + [1.0] * 4
    drawn = dealt(log_normal(), clients=400)
    assert {w / 0.125 % 1 for w in drawn} == {0.0} and min(drawn) == 0.125 and max(drawn) == 1.0
    assert sorted(drawn)[200] == pytest.approx(0.375, abs=0.01)  # the median, rounded down to a bin


def test_fedrbn_and_sfat_inside_split_mix():
    """BN propagation base by base, and slack base by base: two lines of TOML each."""
    data = federation()
    kinds = tuple(dataclasses.replace(c, kind=k) for c, k in zip(data.clients, ("AT", "ST", "AT", "ST"), strict=True))
    data = unlike(data=dataclasses.replace(data, clients=kinds))
    norm = dual(clean=local(statistics=Placement.REPORTED), adversarial=propagated(), dual_affine=True)
    objective = by_kind(AT=adversarial(attack=pgd(steps=2), branch="adversarial"), ST=cross_entropy())
    run = fit(
        papers.split_mix(width=0.5).replace(norm=norm, objective=objective), data=unlike((1.0, 0.5, 1.0, 0.5), data)
    )
    given = run.state.reported["norm1.adversarial.mean"]
    for base in range(2):
        lo, hi = given[[0, 2], base].amin(0), given[[0, 2], base].amax(0)
        assert ((given[1, base] >= lo - 1e-9) & (given[1, base] <= hi + 1e-9)).all()  # a mixture of the AT clients'
        assert given[1, base].abs().sum() > 0
    assert not torch.equal(given[1, 0], given[1, 1])
    slacked = papers.split_mix(width=0.5).replace(aggregator=pipeline(pre=(slack(alpha=1 / 6),)))
    assert not torch.equal(
        fit(slacked).state.shared["fc.weight"], fit(papers.split_mix(width=0.5)).state.shared["fc.weight"]
    )
    inside = "method = { name = 'fedrbn', budget = { name = 'queue', width = 0.5 } }"
    short = fit(
        hardy.config.method(hardy.config.parse(inside)), data=with_kinds(unlike((1.0, 0.5, 1.0, 0.5)), "rich"), rounds=1
    )
    assert short.state.reported["norm1.adversarial.mean"].shape[:2] == (4, 2)
    text = """
    [method]
    name = "split_mix"
    width = 0.25
    norm = { name = "dual", clean = { name = "local", statistics = "reported" }, adversarial = { name = "propagated" } }
    aggregator = { name = "pipeline", pre = [{ name = "slack" }] }
    """
    made = hardy.config.method(hardy.config.parse(text))
    assert made.norm.adversarial == propagated() and made.budget == queue(width=0.25)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda: fit(papers.split_mix(width=0.25), data=unlike((0.2, 1, 1, 1))),
            r"client 0 can train .* 0\.2, below .* 0\.25",
        ),
        (lambda: papers.split_mix(width=0.0), r"width \(r\) of the bases is 0\.0"),
        (lambda: fit(papers.split_mix(width=0.5)).customise(width=0.2), r"width 0\.2 .* \[0\.5, 1\]"),
        (lambda: fit(papers.split_mix(width=0.5)).customise(width=1.5), r"width 1\.5 .* \[0\.5, 1\]"),
        (lambda: fit(papers.fedavg()).customise(width=0.5), r"width 0\.5 .* one network"),
        (lambda: fit(dat(width=0.5), rounds=1).customise(robustness=1.2), r"robustness is 1\.2.*\[0, 1\]"),
        (lambda: fit(papers.split_mix(width=0.5)).customise(robustness=0.5), r"robustness 0\.5 .*norm dual"),
        (lambda: fit(papers.fedbn()).customise(), r"client"),
        (lambda: exponential(factor=1.0), r"factor > 1"),
        (lambda: dual(clean=batch(inference_statistics="batch")), r"inference_statistics = 'batch'"),
        (
            lambda: hardy.fit(
                experiment(method={"name": "split_mix", "width": 0.5}, model={"name": "tiny_cnn", "width": 1.0}),
                quiet=True,
            ),
            r"model\.width is 1\.0",
        ),
        (
            lambda: hardy.fit(experiment(data=DataChoice(capacity={"name": "groups", "widths": [2.0]})), quiet=True),
            r"capacity widths",
        ),
    ],
)
def test_what_cannot_work_is_refused(wrong, message):
    with pytest.raises(HardyError, match=message):
        wrong()


def test_a_run_folder_tells_of_widths_and_costs(tmp_path):
    """Split-Mix trains everything in every domain; HeteroFL only what the domain's richest client holds."""
    data = unlike((0.25, 0.5, 0.25, 0.5))
    run = fit(dat(width=0.25), data=data, out=tmp_path / "mix", rounds=6)
    table = evaluate_settings(run, robustness=(0.0, 1.0), threats="fgsm")
    assert [(row["width"], row["robustness"]) for row in table[:3]] == [(0.25, 0.0), (0.25, 1.0), (0.5, 0.0)]
    found = json.loads((tmp_path / "mix" / "settings.json").read_text())
    assert found["trained"] == {"even": 1.0, "odd": 1.0}
    one, two = (found["clients"][n] for n in (0, 1))
    assert (
        two["parameters"]
        == 2 * one["parameters"]
        == 2 * sum(t[0].numel() for n, t in run.state.shared.items() if run.engine.plan.tags[n].trained)
    )
    page = (tmp_path / "mix" / "report.html").read_text()
    for title in (
        "Width and robustness",
        "Accuracy under fgsm against standard",
        "Share of all parameters",
        "over time",
    ):
        assert title in page
    slim = fit(papers.heterofl(widths=(0.25, 0.5, 1.0)), data=data, out=tmp_path / "slim", rounds=2)
    trained = json.loads((slim.folder / "settings.json").read_text())["trained"]
    assert 0 < trained["even"] < trained["odd"] < 1


def test_oat_serves_a_level_by_its_branch_and_its_code():
    run = fit(papers.oat(attack=pgd(steps=1), code=8), rounds=2)
    served, x = run.customise(robustness=0.0), torch.rand(4, 1, 8, 8, dtype=torch.float64)
    plain = bases(run, 1)[0]
    torch.testing.assert_close(served(x), plain(x, branch="clean"))
    torch.testing.assert_close(served.customise(robustness=1.0)(x), plain(x, branch="adversarial"))
    near, level = served.customise(robustness=0.4)(x), served.customise(robustness=0.3)(x)
    assert not torch.allclose(near, level)
    each = plain(x, branch="adversarial", robustness=torch.tensor([0.4, 0.3, 0.3, 1.0]))
    torch.testing.assert_close(each[:2], torch.stack([near[0], level[1]]))
    layer = run.engine.plan.model.get_submodule("norm1")
    codes = layer._encode(torch.tensor([0.0, 0.25, 0.2, 0.3], dtype=torch.float64))
    torch.testing.assert_close(codes[1], (codes[2] + codes[3]) / 2)
    torch.testing.assert_close(codes @ codes.T, codes @ codes.T * (codes @ codes.T > 1e-6))  # levels are orthogonal
