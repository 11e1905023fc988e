"""The work in Hardy; the option names the engine. Under torchrun the clients are shared among its processes."""

import hardy  # noqa: F401, I001 - first, since it tells torch's threads how to wait

from collections.abc import Iterator

import numpy as np
import work

from hardy.config import Experiment
from hardy.core.federation import Client, Federation
from hardy.core.messages import Updates, Work
from hardy.core.ranks import ALONE
from hardy.core.cohort import Cohort
from hardy.core.training import Training
from hardy.engines import Engine, EngineChoice, Sequential, Vectorised
from hardy.engines.process_group import ProcessGroup
from hardy.runs.prepare import prepare
from hardy.runs.workers import serve_first_rank, hand_out, release, torchrun_ranks


STEPS = [0]
"""SGD steps that the clients of this process took"""


def counting(kind: type[Engine]) -> None:
    """Engines of this kind count their steps."""
    train = kind.train

    def counted(self: Engine, work: Work) -> Iterator[Updates]:
        for updates in train(self, work):
            STEPS[0] += int(updates.steps.sum())
            yield updates

    kind.train = counted  # type: ignore[method-assign]


run = work.Run()
for kind in (Sequential, Vectorised):
    counting(kind)
number, world = torchrun_ranks()
ranks = ProcessGroup(number, world) if world > 1 else ALONE
x, y = work.pixels()
nothing = np.arange(0)
federation = Federation(
    name="synthetic",
    classes=tuple("0123456789"),
    x_train=x,
    y_train=y,
    x_test=x[:0],
    y_test=y[:0],
    clients=tuple(
        Client(domain="synthetic", train=rows, validation=nothing, test=nothing)
        for rows in np.arange(len(y)).reshape(work.CLIENTS, work.IMAGES)
    ),
)
experiment = Experiment(
    training=Training(rate=work.RATE, batch=work.BATCH),
    cohort=Cohort(clients=work.COHORT),
    engine=EngineChoice(name=run.option, device="cpu"),
)
prepared = prepare(experiment, model=lambda norm: work.net(), data=federation)
if number:
    serve_first_rank(prepared, ranks)
    ranks.gather(STEPS[0])
    ranks.leave()
    raise SystemExit
name = prepared.engine.name
hand_out(prepared, ranks)
server, state, engine = prepared.server, prepared.state, prepared.engine
run.lap()
for _ in range(work.WARM_UP + work.ROUNDS):
    state, _ = server.round(state, engine, work.RATE)
    run.lap()
release(prepared)
model = work.net()
model.load_state_dict({name: value[0] for name, value in state.shared.items()})
run.report(steps=sum(ranks.gather(STEPS[0])), model=model, packages=("hardy-fl",), engine=name)
if world > 1:
    ranks.leave()
