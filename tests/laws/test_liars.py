"""What must hold for every lie, and of every reply that cannot be right."""

import dataclasses

import pytest
import torch

import hardy
from conftest import assert_close, everything, experiment, federation, fit, net, with_momentum
from hardy import papers
from hardy.core.admission import Admission
from hardy.core.cohort import Cohort
from hardy.core.engine import Trains
from hardy.core.messages import Updates
from hardy.engines import EngineChoice
from hardy.faults.injection import Faults
from hardy.registry import PARTS
from hardy.runs.prepare import prepare
from test_hostile_replies import BAD, FLOAT32, Outside, assert_same, ended, spoiling, without

VECTORISED = EngineChoice(name="vectorised", device="cpu", precision="float64", lane=2)


@pytest.fixture(params=sorted(PARTS["byzantine_attack"]))
def lie(request):
    return PARTS["byzantine_attack"][request.param]()


def test_engines_agree(lie):
    options = {"faults": Faults(hostile=2, byzantine=lie, late=0.1), "cohort": Cohort(fraction=0.75)}
    one, many = fit(papers.scaffold(), **options), fit(papers.scaffold(), engine=VECTORISED, **options)
    assert_close(everything(one), everything(many), 1e-9)
    assert one.figures.lost == many.figures.lost


def test_resume_is_exact(lie, tmp_path):
    options = {"faults": Faults(hostile=2, byzantine=lie), "cohort": Cohort(fraction=0.75), "data": federation()}
    method = papers.afl()
    whole = fit(method, **options)
    fit(method, out=tmp_path / "half", **{**options, "rounds": 2})
    text = (tmp_path / "half" / "config.toml").read_text().replace("rounds = 2", "rounds = 4")
    (tmp_path / "half" / "config.toml").write_text(text)
    resumed = hardy.resume(tmp_path / "half", method=with_momentum(method), model=net, data=options["data"], quiet=True)
    for name, tensor in everything(whole).items():
        assert torch.equal(tensor, everything(resumed)[name]), name


def test_only_the_liars_replies_change(lie):
    """Nothing of an engine is written to, and the honest are heard as they are."""
    if type(lie).__name__ in ("LabelFlipping", "Backdoor"):
        pytest.skip("its replies are honest")
    run = prepare(
        experiment(faults=Faults(hostile=(1,), byzantine=lie)), method=papers.fedavg(), model=net, data=federation()
    )
    heard = []

    class Listening(Trains):
        def train(self, work):
            honest = Updates.join(list(run.engine.train(work)))
            heard.append((honest, copy(honest)))
            yield honest

    server = dataclasses.replace(run.server, admission=Recording(heard=heard))
    server.round(run.state, Listening(), 0.1)
    honest, before = heard[0]
    said = heard[-1]
    for name, value in before.shared.items():
        assert torch.equal(honest.shared[name], value)
        assert torch.equal(said.shared[name][[0, 2, 3]], value[[0, 2, 3]])
    liars = [t[1] for t in (*said.shared.values(), said.weights, said.loss)]
    own = [t[1] for t in (*before.shared.values(), before.weights, before.loss)]
    assert not all(torch.equal(a, b) for a, b in zip(liars, own, strict=True))


def copy(updates):
    return dataclasses.replace(updates, shared={n: t.clone() for n, t in updates.shared.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording(Admission):
    heard: list

    def judge(self, updates, work, roles=None, usual=None):
        self.heard.append(updates)
        return super().judge(updates, work, roles, usual)


def test_a_bad_reply_never_changes_what_honest_clients_get(method):
    """Whatever a client answers that cannot be right: the round is the one in which it never answered."""
    run = prepare(experiment(engine=FLOAT32), method=method, model=net, data=federation(sizes=(8, 12, 16, 8, 20)))
    outside = Outside(run)
    if len({answer.slot.client for answer in outside.answers}) < 5 or not run.state.shared:
        pytest.skip("nobody else, or nothing sent")
    expected, _ = ended(run, outside, without(BAD))
    for name in ("all NaN", "1e38", "renamed", "wrong shape", "examples 0", "steps 0", "loss 0", "round 0"):
        left, line = ended(run, outside, spoiling(name))
        assert_same(expected, left)
        assert line["lost"].keys() == {str(BAD)}, name
