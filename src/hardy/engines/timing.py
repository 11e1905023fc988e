"""How long a slot takes."""

import time

import torch

from hardy.core import tensors
from hardy.core.messages import Slot, Work
from hardy.core.partition import Placement
from hardy.core.store import MemoryStore
from hardy.engines.base import Engine

_SLOTS = 16
"""slots of a timed turn"""


def seconds_per_slot(engine: Engine, *, slots: int = _SLOTS, steps: int = 2) -> float:
    """The measured time of a slot's local steps in a round like the run's own, leaving the engine as it was."""
    plan, training, store = engine.plan, engine.training, engine.store
    bases = plan.method.budget.bases
    work = Work(
        round=0,
        rate=0.0,
        slots=[Slot(i % len(engine.train_rows), i % bases) for i in range(min(slots, len(engine.train_rows) * bases))],
        shared=engine.cast(plan.first(Placement.SHARED, bases)),
        reported=engine.new_store(plan.first(Placement.REPORTED, bases), len(engine.data.clients)),
    )
    try:
        engine.training = training.with_steps(steps)
        engine.store = MemoryStore(tensors.apply(torch.clone, store))
        _synchronise(engine.device)
        began = time.perf_counter()
        for _ in engine.train(work):
            pass
        _synchronise(engine.device)
        return (time.perf_counter() - began) / len(work.slots)
    finally:
        engine.training, engine.store = training, store


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
