"""What a round costs must not grow with the square of the number of clients; operations are counted, not seconds."""

import dataclasses

import pytest

from conftest import experiment, federation, net
from hardy import papers
from hardy.core import store
from hardy.core.messages import Slot
from hardy.core.training import Training
from hardy.engines import EngineChoice, base
from hardy.runs.prepare import prepare


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_slots_are_not_listed_anew_for_each_client(engine, monkeypatch):
    made = []

    class Counted(Slot):
        def __init__(self, client, base=0):
            made.append(client)
            super().__init__(client, base)

    monkeypatch.setattr(base, "Slot", Counted)
    monkeypatch.setattr(store, "Slot", Counted)
    data = federation(sizes=(4,))
    data = dataclasses.replace(data, clients=data.clients * 60)
    chosen = experiment(
        engine=EngineChoice(name=engine, device="cpu", lane=10 if engine == "vectorised" else None),
        training=Training(rate=0.1, batch=4),
    )
    run = prepare(chosen, method=papers.fedbn(), model=net, data=data)
    run.server.round(run.state, run.engine, 0.1)
    assert len(made) <= 60
