"""The plain round and the pipelined one agree, bit for bit, refusals included."""

import dataclasses

import pytest

from conftest import assert_close, everything, experiment, federation, net, with_momentum
from hardy.core.admission import Admission
from hardy.core.cohort import Cohort
from hardy.core.server import PipelinedServer, Server
from hardy.engines import EngineChoice
from hardy.faults.byzantine import not_finite
from hardy.faults.injection import Faults
from hardy.runs.prepare import prepare

ENGINE = EngineChoice(name="vectorised", device="cpu", precision="float64", lane=2)


def rounds(method, kind, **changes):
    chosen = experiment(engine=ENGINE, cohort=Cohort(fraction=0.75), **changes)
    run = prepare(chosen, method=with_momentum(method), model=net, data=federation())
    own = {f.name: getattr(run.server, f.name) for f in dataclasses.fields(Server)}
    server, lines = kind(**own), []
    for _ in range(3):
        run.state, line = server.round(run.state, run.engine, 0.1)
        lines.append(line)
    return everything(run), lines


FAULTS = {
    "calm": {},
    "late and lost": {"faults": Faults(dropped=0.1, crashed=0.1, late=0.2)},
    "refused": {"admission": Admission(largest_update=0.15)},
}


@pytest.mark.parametrize("changes", FAULTS.values(), ids=FAULTS)
def test_plain_and_pipelined_rounds_agree(method, changes):
    (one, told), (other, also) = (rounds(method, kind, **changes) for kind in (Server, PipelinedServer))
    assert_close(one, other, 0)
    assert told == also


def test_a_liar_in_the_last_lane_is_left_out_by_both():
    from hardy import papers

    faults = Faults(hostile=(3,), byzantine=not_finite())
    (one, told), (other, also) = (rounds(papers.fedavg(), kind, faults=faults) for kind in (Server, PipelinedServer))
    assert_close(one, other, 0)
    assert told == also
    assert any("refused" in why for line in told for why in line["lost"].values())
