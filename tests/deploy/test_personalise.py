"""Networks for those who never took part, and clients that go on alone."""

import dataclasses

import numpy as np
import pytest
import torch

import hardy
from conftest import assert_close, federation, fit
from hardy import papers
from hardy.attacks.gradient import pgd
from hardy.core.partition import Role
from hardy.errors import HardyError
from hardy.papers.fedbn import local
from hardy.parts.norms import dual

SHORT = pgd(steps=2)


def kinds(*given):
    data = federation()
    clients = (dataclasses.replace(c, kind=k) for c, k in zip(data.clients, given, strict=True))
    return dataclasses.replace(data, clients=tuple(clients))


def held(net):
    return {**net.nets[0].trained, **net.nets[0].buffers}


def test_where_all_is_shared_a_newcomer_gets_just_that():
    run = fit(papers.fedavg(), rounds=1)
    assert_close(held(run.network_for_new_client("average")), {n: t[0] for n, t in run.state.shared.items()}, 0)


def test_norms_are_averaged_over_all_or_over_a_domain():
    run = fit(papers.fedbn(), rounds=1)
    for domain, members in ((None, [0, 1, 2, 3]), ("odd", [1, 3])):
        found = held(run.network_for_new_client("average", domain=domain))
        for name, value in run.engine.store.items():
            torch.testing.assert_close(found[name], value[members, 0].mean(0))


def test_statistics_are_measured_on_the_newcomers_images():
    """One pass by measured statistics is one by the batch's own, up to the batch's correction."""
    run = fit(papers.fedbn(), rounds=2)
    pixels = run.engine.data.x_train[:20]
    x = torch.from_numpy(pixels).double() / 255
    for images in (pixels, x, x.numpy()):
        made = run.network_for_new_client("images", images=images)
        by_batch = made.nets[0](x, statistics="batch")
        made = run.network_for_new_client("images", images=images)
        torch.testing.assert_close(made(x), by_batch, rtol=0.05, atol=0.05)
    values = run.engine.plan.model.conv1, run.engine.plan.model.scale
    first = torch.nn.functional.conv2d(
        values[1](x), made.nets[0].trained["conv1.weight"], made.nets[0].trained["conv1.bias"], padding=1
    )
    torch.testing.assert_close(made.nets[0].buffers["norm1.clean.mean"], first.mean((0, 2, 3)))
    torch.testing.assert_close(made.nets[0].buffers["norm1.clean.var"], first.var((0, 2, 3)))


def test_a_newcomer_is_given_robust_statistics_like_any_st_client():
    run = fit(papers.fedrbn(attack=SHORT), data=kinds("ST", "AT", "ST", "ST"), rounds=2)
    before = {n: t.clone() for n, t in run.state.reported.items()}
    found = run.network_for_new_client("average", domain="even").nets[0].buffers  # no AT client there
    for name, value in run.state.reported.items():
        if run.engine.plan.tags[name].branch == "adversarial":
            assert torch.equal(found[name], value[1, 0])
    two = fit(papers.fedrbn(attack=SHORT), data=kinds("AT", "AT", "ST", "ST"), rounds=2)
    images = two.engine.data.x_train[two.engine.data.clients[1].train]
    made = two.network_for_new_client("images", images=images)
    name = "norm1.adversarial.mean"
    ends = two.state.reported[name][:2, 0]
    assert (
        (made.nets[0].buffers[name] - ends[0]).abs() <= (ends[1] - ends[0]).abs() + 1e-12
    ).all()  # a mixture of the two
    assert_close(run.state.reported, before, 0)


def test_without_propagation_the_robust_branch_is_averaged_over_those_who_attack():
    norm = dual(clean=local(), adversarial=local())
    run = fit(papers.fatavg_dbn(attack=SHORT).replace(norm=norm), data=kinds("AT", "ST", "AT", "ST"), rounds=1)
    found = run.network_for_new_client("average").nets[0].buffers
    for name, value in run.engine.store.items():
        members = [0, 2] if run.engine.plan.tags[name].branch == "adversarial" else [0, 1, 2, 3]
        if name in found:
            torch.testing.assert_close(found[name], value[members, 0].mean(0))


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (papers.fedbn, {"statistics": "mean"}, "unknown statistics of a new client 'mean'"),
        (papers.fedbn, {"statistics": "images"}, "'images' of a new client need images"),
        (papers.fedbn, {"statistics": "average", "images": np.zeros((2, 1, 8, 8))}, "take no images"),
        (papers.fedbn, {"statistics": "average", "domain": "evens"}, "Did you mean 'even'?"),
        (papers.fedbn, {"statistics": "images", "images": np.zeros((2, 8, 8, 1))}, r"must be \[N, 1, 8, 8\]"),
        (papers.local_only, {"statistics": "average"}, "shares no network"),
    ],
)
def test_impossible_newcomers_are_refused(method, options, message):
    run = fit(method(), rounds=1)
    with pytest.raises(HardyError, match=message):
        run.network_for_new_client(options.pop("statistics"), **options)


def test_fine_tuning_moves_what_is_not_held_and_leaves_the_run_alone():
    run = fit(papers.fatavg(attack=SHORT), data=kinds("AT", "ST", "AT", "ST"), rounds=1)
    before = {n: t.clone() for n, t in run.state.shared.items()}
    tuned = run.fine_tune(steps=3, freeze=1)
    assert_close(run.state.shared, before, 0)
    for name, value in before.items():
        moved = [not torch.equal(tuned.engine.store[name][c], value) for c in range(4)]
        held_back = name in ("conv1.weight", "conv1.bias", "norm1.weight", "norm1.bias")
        assert moved == [not held_back] * 4, name
    clean = hardy.evaluate(tuned, checks=False, quiet=True)["standard_accuracy"]
    assert clean["mean"] is not None and not tuned.state.shared
    still = run.fine_tune(steps=1, rate=0.0)
    weights = [n for n in before if run.engine.plan.roles[n] is Role.WEIGHT]
    assert_close({n: still.engine.store[n][2] for n in weights}, {n: before[n] for n in weights}, 0)


def test_a_meta_learnt_network_is_made_personal_by_plain_steps():
    run = fit(papers.fatmeta(attack=SHORT), data=kinds("AT", "ST", "AT", "ST"), rounds=1)
    tuned = run.fine_tune(steps=1, rate=0.02)
    assert tuned.engine.plan.method.objective == papers.fatavg(attack=SHORT).objective
    assert not torch.equal(tuned.engine.store["conv1.weight"][0], run.state.shared["conv1.weight"])


def test_impossible_fine_tuning_is_refused():
    with pytest.raises(HardyError, match="the network has 3 layers, so it must be in"):
        fit(papers.fedavg(), rounds=1).fine_tune(steps=1, freeze=3)
    with pytest.raises(HardyError, match="needs the server in every step"):
        fit(papers.scaffold(), rounds=1).fine_tune(steps=1)
