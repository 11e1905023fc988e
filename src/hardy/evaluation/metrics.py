"""Asking an objective how its training stands: what `evaluation.diagnose` adds to a round's figures."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardy.core import random, tensors
from hardy.core.net import Net
from hardy.core.partition import Placement
from hardy.core.state import ServerState
from hardy.core.tensors import Tensors
from hardy.engines.base import Engine
from hardy.evaluation.serving import base_net
from hardy.parts.objectives import Batch, DiagnosisContext

_CLIENTS = 16
_ROWS = 64
"""training rows of a client; all clients asked show equally many"""


def diagnose(engine: Engine, state: ServerState, rate: float) -> dict[str, Any]:
    """What the objective says of the first clients, between two rounds."""
    plan, last = engine.plan, state.round - 1
    train = engine.train_rows[:_CLIENTS]
    count = min(_ROWS, *map(len, train))
    rows = torch.from_numpy(np.stack([own[:count] for own in train])).to(engine.device)
    seen = engine.batch(rows)
    clients = torch.arange(len(train), device=engine.device)
    common = tensors.gather(state.shared, 0)
    # statistics that passes move must be each client's own under vmap
    kept = {n: common[n].expand(len(train), *common[n].shape) for n in plan.kept if n in common}
    own = kept | {name: held[: len(train), 0] for name, held in {**state.reported, **engine.store}.items()}
    keys = random.fold(torch.tensor(engine.seed, device=engine.device), "diagnose", clients)

    def each(function: Callable[[Net, Tensors, Batch, Tensor], Any]) -> Any:
        def client(common: Tensors, own: Tensors, x: Tensor, y: Tensor, key: Tensor) -> Any:
            net = base_net(plan, {**common, **own})
            private = {name: value for name, value in own.items() if name not in plan.model_names}
            return function(net, private, Batch(x, y), key)

        return engine.map(client, common, own, seen.x, seen.y, keys)

    return plan.method.objective.diagnose(
        DiagnosisContext(
            each=each,
            shared=frozenset(n for n in plan.trained if plan.placement[n] is Placement.SHARED),
            clients=len(engine.train_rows),
            rate=rate,
            steps=max(len(engine.batches(last, client)) for client in range(len(train))),
        )
    )
