"""Networks with a mind of their own: training flags, random numbers, layers that cannot be vectorised."""

import logging
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hardy
from conftest import SHAPE, assert_close, everything, experiment, federation, fit
from hardy import papers
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.models import adopt

VECTORISED = EngineChoice(name="vectorised", device="cpu", precision="float64")
AUTO = EngineChoice(name="auto", device="cpu", precision="float64")


class Functional(nn.Module):
    """Dropout by hand, as many models have it."""

    def __init__(self):
        super().__init__()
        self.norm, self.first, self.last = nn.BatchNorm2d(1), nn.Linear(64, 16), nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.first(self.norm(x).flatten(1)).relu()
        return self.last(F.dropout(hidden, 0.5, self.training))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.last = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.rows(x[:, 0])[0][:, -1])


class Decides(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(64, 3)

    def forward(self, x):
        logits = self.last(x.flatten(1))
        return logits if logits.sum() > 0 else 2 * logits


class PythonRandom(Decides):
    def forward(self, x):
        return self.last(x.flatten(1)) * (random.random() if self.training else 1.0)


class OwnStatistics(Decides):
    def __init__(self):
        super().__init__()
        self.own = nn.InstanceNorm2d(1, track_running_stats=True)

    def forward(self, x):
        return self.last(self.own(x).flatten(1))


def adopted(kind):
    return lambda norm: adopt(kind(), norm, shape=SHAPE)


@pytest.mark.parametrize(
    ("kind", "why"), [(Functional, "Functional draws random numbers"), (Recurrent, "GRU|gru|lstm|rnn"), (Decides, "")]
)
def test_what_cannot_be_vectorised_runs_sequentially(kind, why, caplog):
    with caplog.at_level(logging.WARNING, logger="hardy"):
        run = fit(papers.fedavg(), model=adopted(kind), rounds=1, engine=AUTO)
    lines = [r.getMessage() for r in caplog.records if "one after another" in r.getMessage()]
    assert run.engine.name == "sequential" and len(lines) == 1 and "\n" not in lines[0]
    with pytest.raises(HardyError, match=rf"engine vectorised cannot train this network: .*{why}.*auto or sequential"):
        fit(papers.fedavg(), model=adopted(kind), rounds=1, engine=VECTORISED)
    assert fit(papers.fedavg(), rounds=1, engine=AUTO).engine.name == "vectorised"


def test_functional_dropout_is_off_at_evaluation_and_repeats_in_training(tmp_path):
    run = fit(papers.fedavg(), model=adopted(Functional), rounds=4, out=tmp_path / "whole")
    figures = [hardy.evaluate(run, "pgd-2", quiet=True, checks=False) for _ in range(3)]
    assert figures[0] == figures[1] == figures[2]
    x = torch.rand(40, *SHAPE, dtype=torch.float64)
    served = run.customise()
    assert torch.equal(served(x), served(x)) and torch.equal(served.train()(x), served(x))
    torch.manual_seed(7)
    again = fit(papers.fedavg(), model=adopted(Functional), rounds=4)
    assert_close(everything(again), everything(run), 0)
    half = tmp_path / "half"
    fit(papers.fedavg(), model=adopted(Functional), rounds=2, out=half)
    config = half / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 4"))
    from conftest import with_momentum

    resumed = hardy.resume(
        half, method=with_momentum(papers.fedavg()), model=adopted(Functional), data=federation(), quiet=True
    )
    assert_close(everything(resumed), everything(run), 0)


def test_functional_dropout_drops_in_training():
    """With p = 1 nothing but the last bias learns."""

    class All(Functional):
        def forward(self, x):
            return self.last(F.dropout(self.first(self.norm(x).flatten(1)), 1.0, self.training))

    run = fit(papers.fedavg(), model=adopted(All), rounds=1, training=hardy.Training(rate=0.1, batch=4))
    start = run.engine.plan.start
    assert torch.equal(run.state.shared["first.weight"][0], start["first.weight"].double())
    assert not torch.equal(run.state.shared["last.bias"][0], start["last.bias"].double())


def test_a_draw_of_another_thread_is_not_the_models(monkeypatch):
    """A node has a heartbeat, which draws the time it waits from Python's generator."""
    from hardy.core import modes

    states, real = iter(["a", "b"]), modes._other_generators
    monkeypatch.setattr(modes, "_other_generators", lambda: next(states, None) or real())
    fit(papers.fedavg(), model=adopted(Decides), rounds=1)


def test_frozen_layers_stay_frozen():
    def model(norm):
        net = Functional()
        net.first.requires_grad_(False)
        return adopt(net, norm, shape=SHAPE)

    run = fit(papers.fedavg(), model=model, rounds=2)
    start = run.engine.plan.start
    torch.testing.assert_close(run.state.shared["first.weight"][0], start["first.weight"].double())
    assert not torch.allclose(run.state.shared["last.weight"][0], start["last.weight"].double())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (PythonRandom, "draws random numbers from Python's or numpy's generator"),
        (OwnStatistics, "InstanceNorm2d at 'own' changes its buffer 'own.running_mean' in training"),
        (nn.Identity, r"answers two images with \[2, 1, 8, 8\]; it must be \[2, 3\]"),
    ],
)
def test_models_that_keep_what_nobody_places_are_refused(kind, message):
    with pytest.raises(HardyError, match=message):
        hardy.fit(experiment(), method=papers.fedavg(), model=lambda norm: kind(), data=federation(), quiet=True)
