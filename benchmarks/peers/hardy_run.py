"""The work in Hardy; the option names the engine."""

import hardy  # noqa: F401, I001 - first, since it tells torch's threads how to wait

from collections.abc import Iterator

import numpy as np
import work

from hardy.core.training import Training
from hardy.config import Experiment
from hardy.core.federation import Client, Federation
from hardy.engines import Engine, EngineChoice
from hardy.runs.prepare import prepare
from hardy.core.messages import Updates, Work
from hardy.core.server import Cohort


class Counted:
    """An engine that counts the SGD steps its clients took."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.cast, self.steps = engine, engine.cast, 0

    def train(self, round: Work) -> Iterator[Updates]:
        for updates in self.engine.train(round):
            self.steps += int(updates.steps.sum())
            yield updates


run = work.Run()
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
server, state, engine = prepared.server, prepared.state, Counted(prepared.engine)
run.lap()
for _ in range(work.WARM_UP + work.ROUNDS):
    state, _ = server.round(state, engine, work.RATE)
    run.lap()
model = work.net()
model.load_state_dict({name: value[0] for name, value in state.shared.items()})
run.report(steps=engine.steps, model=model, packages=("hardy-fl",), engine=prepared.engine.name)
