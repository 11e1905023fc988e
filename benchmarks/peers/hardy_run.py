"""The work in Hardy; the option names the engine."""

import hardy  # noqa: F401, I001 - first, since it tells torch's threads how to wait

from collections.abc import Iterator, Sequence

import numpy as np
import work

from hardy.config import Experiment
from hardy.core.engine import Trains
from hardy.core.federation import Client, Federation
from hardy.core.messages import Slot, Updates, Work
from hardy.core.server import Cohort
from hardy.core.tensors import Tensors
from hardy.core.training import Training
from hardy.engines import Engine, EngineChoice
from hardy.runs.prepare import prepare


class Counted(Trains):
    """An engine that counts the SGD steps its clients took."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.steps = engine, 0

    def expect(self, round_number: int, slots: Sequence[Slot]) -> None:
        self.engine.expect(round_number, slots)

    def cast(self, values: Tensors) -> Tensors:
        return self.engine.cast(values)

    def train(self, work: Work) -> Iterator[Updates]:
        for updates in self.engine.train(work):
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
