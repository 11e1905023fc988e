"""The floor: the same SGD steps on one model, with no framework, nothing sent and nothing averaged."""

import numpy as np
import work

run, model, steps = work.Run(), work.net(), 0
rng = np.random.default_rng(0)
work.tensors()
run.lap()
for _ in range(work.WARM_UP + work.ROUNDS):
    for client in rng.choice(work.CLIENTS, work.COHORT, replace=False):
        steps += work.epoch(model, *work.client(client))
    run.lap()
run.report(steps=steps, model=model)
