"""Diagnoses: figures of the training itself, asked of some clients between two rounds."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardy.core import random, tensors
from hardy.core.federation import Rows
from hardy.core.messages import Slot
from hardy.core.metric import Diagnosis, DiagnosisContext
from hardy.core.net import Net
from hardy.core.protocols import Batch
from hardy.core.state import ServerState
from hardy.core.tensors import Tensors
from hardy.engines.base import Engine
from hardy.errors import HardyError
from hardy.evaluation.serving import base_net, chosen_branch

_CLIENTS = 16
_ROWS = 64
"""rows of a client; all clients asked show equally many"""


def diagnose_training(
    engine: Engine, state: ServerState, diagnoses: Sequence[Diagnosis], *, rate: float, branch: str | None = None
) -> dict[str, Any]:
    """What the diagnoses say of the first clients that have rows of their part."""
    figures: dict[str, Any] = {}
    for diagnosis in diagnoses:
        figures |= diagnosis.diagnose(_context(engine, state, diagnosis, rate, branch))
    return figures


def _rows(engine: Engine, diagnosis: Diagnosis) -> tuple[list[int], list[Rows]]:
    """The clients that are asked, and their rows."""
    if diagnosis.rows == "train":
        held = ((number, engine.train_rows[number]) for number in range(len(engine.train_rows)))
    else:
        held = ((number, getattr(client, diagnosis.rows)) for number, client in enumerate(engine.data.clients))
    chosen = list(islice(((number, rows) for number, rows in held if len(rows)), _CLIENTS))
    if not chosen:
        raise HardyError(f"diagnosis {type(diagnosis).__name__!r} needs {diagnosis.rows} rows, but no client has any.")
    return [number for number, _ in chosen], [rows for _, rows in chosen]


def _context(
    engine: Engine, state: ServerState, diagnosis: Diagnosis, rate: float, branch: str | None
) -> DiagnosisContext:
    plan, last = engine.plan, state.round - 1
    numbers, rows = _rows(engine, diagnosis)
    count = min(_ROWS, *map(len, rows))
    index = torch.from_numpy(np.stack([own[:count] for own in rows])).to(engine.device)
    part = "test" if diagnosis.rows == "test" else "train"
    x, y = engine.device_data.images(part, index), engine.device_data.y[part][index]
    clients = torch.tensor(numbers, device=engine.device)
    # what training goes on with, or what is served
    shared = state.shared if diagnosis.rows == "train" else plan.aggregator.served(state.shared, state.memory)
    common = tensors.gather(shared, 0)
    # statistics that passes move must be each client's own under vmap
    buffers = {n: common[n].expand(len(numbers), *common[n].shape) for n in plan.buffers if n in common}
    slots = [Slot(number) for number in numbers]
    own = {**buffers, **state.reported.read(slots), **engine.store.read(slots)}
    keys = random.fold(torch.tensor(engine.seed, device=engine.device), "diagnose", clients)

    def each(function: Callable[[Net, Tensors, Batch, Tensor], Any]) -> Any:
        def client(common: Tensors, own: Tensors, batch: Batch, key: Tensor) -> Any:
            net = base_net(plan, {**common, **own})
            private = {name: value for name, value in own.items() if name not in plan.model_names}
            return function(net, private, batch, key)

        return engine.map(client, common, own, Batch(x, y, engine.label_counts(numbers)), keys)

    asked = engine.data.sample or range(len(engine.train_rows))
    return DiagnosisContext(
        each=each,
        objective=plan.method.objective,
        shared=frozenset(plan.shared_trained),
        clients=len(engine.train_rows),
        rate=rate,
        steps=max(len(engine.batches(last, client)) for client in asked),
        branch=chosen_branch(plan.method.norm, branch),
    )
