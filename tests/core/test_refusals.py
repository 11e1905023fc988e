"""Refused, never ignored: an option or a combination that would have no effect is an error naming both sides."""

import dataclasses
import logging

import pytest
import torch
from torch import nn

import hardy
from conftest import experiment, federation, fit, net
from hardy import config, papers
from hardy.attacks.gradient import pgd
from hardy.config import EvaluationChoice
from hardy.core.cohort import Cohort
from hardy.core.protocols import Objective, Wrapper
from hardy.core.training import Training
from hardy.errors import HardyError
from hardy.faults.byzantine import sign_flipping
from hardy.faults.injection import Faults
from hardy.models import mlp
from hardy.papers.fedavg import proximal
from hardy.papers.heterofl import corners, held_mean
from hardy.papers.oat import conditional, once_for_all
from hardy.papers.per_fedavg import meta
from hardy.parts.adversarial import adversarial, by_kind
from hardy.parts.aggregators.robust import trimmed_mean
from hardy.parts.norms import dual
from hardy.parts.objectives import cross_entropy


def marked(**profile):
    data = federation()
    first, *rest = data.clients
    return dataclasses.replace(data, clients=(dataclasses.replace(first, **profile), *rest))


@pytest.mark.parametrize(
    ("method", "data", "words"),
    [
        (papers.fedavg(), marked(kind="AT"), "no part of method 'fedavg' looks at a client's kind"),
        (papers.sfat(objective=adversarial()), marked(kind="ST"), "looks at a client's kind"),
        (papers.fedavg(), marked(capacity=0.5), "no part of method 'fedavg' looks at a client's capacity"),
        (papers.fed_ensemble(), marked(capacity=0.5), "looks at a client's capacity"),
        (papers.fedavg().replace(budget=corners()), federation(), "counts what a client did not train"),
        (papers.fedavg().replace(aggregator=held_mean()), federation(), "everybody holds all"),
        (papers.fedavg(norm=conditional(), objective=adversarial(branch="adversarial")), federation(), "asks for none"),
        (papers.fedavg(norm=dual(), objective=once_for_all()), federation(), "does not depend on it"),
        (papers.fedavg(norm=dual()), federation(), "never goes through it"),
        (papers.fedavg(objective=adversarial(branch="adversarial")), federation(), "keeps only clean"),
    ],
)
def test_combinations_without_effect(method, data, words):
    with pytest.raises(HardyError, match=words):
        fit(method, data=data)


def test_sfat_honours_kinds():
    data = federation()
    kinds = tuple(dataclasses.replace(c, kind="ST") for c in data.clients)
    plain = fit(papers.fedavg(), data=data, rounds=1)
    standard = fit(papers.sfat(), data=dataclasses.replace(data, clients=kinds), rounds=1)
    # weights summed in another way: not to the last bit on every processor
    torch.testing.assert_close(standard.state.shared, plain.state.shared, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["training.decay=0.5"], "there are no training.milestones"),
        (["training.period=10"], "not 'harmonic'"),
        (["training.steps=2", "training.epochs=3"], "takes the place of epochs"),
        (["training.epochs_every=2"], "epochs_decay is 1"),
        (["training.steps=2", "training.remainder=drop"], "every batch is full"),
        (["cohort.fraction=0.5", "cohort.clients=2"], "one of them has no effect"),
        (["data.shift_test=true"], "there is no data.shift"),
        (["engine.name=sequential", "engine.lane=2"], "has no lanes"),
        (["engine.name=sequential", "network.replies=2"], "no effect with engine 'sequential'"),
        (["faults.affects=weights"], "faults.affects"),
        (["training.momentum=0.9"], 'training.momentum is now optimiser = { name = "sgd"'),
        (["training.weight_decay=0.1"], "training.weight_decay is now"),
        (["faults.lie=mimic"], "faults.lie is now faults.byzantine"),
        (["evaluation.diagnose=true"], "evaluation.diagnose is now evaluation.diagnosis"),
        (["method={name='fedavg',norm={name='batch',serving='post'}}"], "is now method.norm.inference_statistics"),
        (["method={name='fedavg',aggregator={name='chain',stages=[]}}"], "is now"),
        (["method={name='fedavg',optimiser={name='sgd'}}"], r"is the table \[optimiser\]"),
    ],
)
def test_keys_without_effect_and_old_keys(overrides, words):
    with pytest.raises(HardyError, match=words):
        config.parse("", overrides)


def test_width_is_told_once():
    chosen = config.parse("", ["method={name='split_mix',width=0.25}", "engine.device=cpu", "rounds=1"])
    run = hardy.runs.prepare.prepare(chosen)
    assert run.engine.plan.start["conv1.weight"].shape[0] == 4
    twice = config.parse("", ["method={name='split_mix',width=0.25}", "model={name='tiny_cnn',width=0.5}"])
    with pytest.raises(HardyError, match=r"Leave model\.width out"):
        hardy.runs.prepare.prepare(twice)


def test_a_cohort_that_can_hold_too_many_liars_is_warned_of(caplog):
    """50 clients, ten hostile, cohorts of 5, f = 2: 4.8 % of the rounds hold a majority of liars."""
    data = federation(sizes=(4,) * 50)
    chosen = experiment(
        rounds=1,
        training=Training(rate=0.1, batch=4),
        cohort=Cohort(clients=5),
        faults=Faults(hostile=10, byzantine=sign_flipping()),
    )
    method = papers.fedavg().replace(aggregator=trimmed_mean(f=2))
    with caplog.at_level(logging.WARNING, logger="hardy"):
        hardy.runs.prepare.prepare(chosen, method=method, model=net, data=data)
    assert "4.8% of the rounds hold more" in caplog.text


def test_a_wrapper_forwards_whatever_it_does_not_define():
    """proximal(meta()) still meta-learnt alone in version 0.1."""
    assert proximal(inner=meta()).alone() == proximal(inner=cross_entropy())
    both = by_kind(AT=proximal(inner=meta()), ST=meta())
    assert both.alone() == by_kind(AT=proximal(inner=cross_entropy()), ST=cross_entropy())
    assert proximal(inner=both).for_client("ST", 0) == proximal(inner=meta())
    public = [name for name in vars(Objective) if not name.startswith("_")]
    assert public and all(name in vars(Wrapper) for name in public)


def test_auto_is_a_rule():
    """The same command gives the same engine: by device, network and batch alone."""
    names = {hardy.runs.prepare.prepare(hardy.read("demo", ["engine.device=cpu"])).engine.name for _ in range(3)}
    assert names == {"sequential"}
    small = hardy.read("demo", ["engine.device=cpu", "model=mlp", "training.batch=10"])
    assert hardy.runs.prepare.prepare(small).engine.name == "vectorised"


def test_choosing_an_engine_leaves_the_process_as_it_was():
    import torch

    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    fit(papers.fedavg(), rounds=1)
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


def test_split_mix_refuses_a_model_that_is_not_narrower():
    """It would train eight networks of full size and call them ×0.125."""

    def full_size(norm):
        return net(norm)

    with pytest.raises(
        HardyError, match=r"bases of method 'split_mix' are ×0\.125, but the model given takes no width"
    ):
        fit(papers.split_mix(), model=full_size)
    with pytest.raises(HardyError, match=r"ignores its width: 459 parameters at ×0\.125 and 459 at ×1"):
        fit(papers.split_mix(), model=lambda norm, width: net(norm))


@pytest.mark.parametrize("method", [papers.fedbn, papers.fedrbn, papers.fbn, papers.split_mix_dat])
def test_norms_of_their_own_on_a_network_without_norms_are_refused(method):
    def bare(norm, width=1.0):
        return mlp(norm=lambda features: nn.Identity(), shape=(1, 8, 8), classes=3, width=width)

    with pytest.raises(HardyError, match=r"norm '.*' of method '.*' has no effect: the network has no BatchNorm layer"):
        fit(method(), model=bare)
    fit(papers.fedavg(), model=bare, rounds=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fit(papers.fedavg(), evaluation=EvaluationChoice(threats=("pgd-7@8",))), "pgd is 8, .*mean 8/255"),
        (lambda: fit(papers.fatavg(attack=pgd(epsilon=8, step=2))), "pgd is 8, .*mean 8/255"),
        (
            lambda: hardy.evaluate(fit(papers.fedavg(), rounds=1), "autoattack@16", quiet=True),
            "apgd_ce is 16, .*mean 16/255",
        ),
    ],
)
def test_a_radius_above_one_is_refused(make, message):
    with pytest.raises(HardyError, match=message):
        make()
    hardy.evaluate(fit(papers.fedavg(), rounds=1), "pgd-1@l2,eps=2", quiet=True)  # of an L2 ball it may be
