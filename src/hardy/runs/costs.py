"""What training costs the clients: multiply-accumulates and numbers sent, slot by slot."""

from collections import defaultdict
from math import prod
from typing import Any

import numpy as np
import torch

from hardy.core import tensors
from hardy.core.messages import Slot
from hardy.core.method import Plan
from hardy.core.net import Net
from hardy.core.protocols import Batch, Objective
from hardy.core.submodels import OnSubnetworks
from hardy.core.tensors import ImageShape, Tensors
from hardy.data.augmentation import Augmentation
from hardy.models.count import count_macs, macs, shares_kept
from hardy.runs.run import Run

_IMAGES = 12
"""of the batch that is counted; a loss may split it"""


def image_macs(
    plan: Plan, objective: Objective, shape: ImageShape, classes: int, augmentation: Augmentation | None = None
) -> int:
    """Multiply-accumulates that one image takes in a training step: all products of the augmentation and of the forward
    and backward passes that this objective makes, attacks included, counted by running the step on tensors without
    data. Of a sparse sub-network, the share that has a weight in the first one."""

    model = plan.model
    constants = {n: t for n, t in model.named_buffers() if n not in plan.tags}

    def step(device: str) -> None:
        def here(values: Tensors) -> Tensors:
            return tensors.apply(lambda t: t.to(device, torch.float32 if t.is_floating_point() else None), values)

        start = here({**plan.start, **constants})
        net = Net(model, tensors.select(start, plan.trained), tensors.select(start, [*plan.buffers, *constants]))
        y, key = (torch.zeros(size, dtype=torch.int64, device=device) for size in (_IMAGES, ()))
        x = torch.zeros(_IMAGES, *shape, device=device)
        private = here({**objective.private(shape, _IMAGES), **objective.kept(start)})
        x = x if augmentation is None else augmentation.apply(x, key)
        objective.gradient(objective, net, private, Batch(x, y, torch.ones(classes, device=device)), key, start)

    return round(count_macs(step) // _IMAGES * _share_multiplied(plan, objective, shape))


def _share_multiplied(plan: Plan, objective: Objective, shape: ImageShape) -> float:
    """The share of a forward pass's products whose weight is not zero."""
    if not isinstance(objective, OnSubnetworks) or not objective.submodels.sparse:
        return 1.0
    (capacity,) = objective.trained
    kept = shares_kept(plan.model, objective.submodels.cut(plan.start, capacity, 0, plan.start))
    return macs(plan.model, shape, kept=kept) / macs(plan.model, shape)


def macs_of_a_round(run: Run, round_number: int) -> dict[int, int]:
    """Client -> multiply-accumulates of its round."""
    spent = defaultdict[int, int](int)
    for slot in run.server.ask(round_number).slots:
        spent[slot.client] += slot_macs(run, round_number, slot)
    return spent


def slot_macs(run: Run, round_number: int, slot: Slot) -> int:
    """Multiply-accumulates of a slot's round."""
    engine, change = run.engine, run.experiment.data.augmentation
    objective = engine.plan.objective(engine.data.clients[slot.client], round_number)
    if objective not in run.counted:
        run.counted[objective] = image_macs(engine.plan, objective, engine.data.shape, len(engine.data.classes), change)
    return engine.training.examples(len(engine.train_rows[slot.client]), round_number) * run.counted[objective]


def training_costs(run: Run) -> dict[str, Any]:
    """What a round cost each client on average, and the share of all parameters that a domain's clients ever trained
    (Split-Mix, Fig. 5 and 6)."""
    plan, clients, rounds = run.engine.plan, run.engine.data.clients, run.state.round
    whole = {n: shape for n, shape in tensors.shapes(plan.start).items() if plan.tags[n].trained}
    own = [plan.submodels.sizes(client.capacity) if plan.submodels else {} for client in clients]
    held = [round(sum(sizes.get(n, prod(shape)) for n, shape in whole.items())) for sizes in own]
    total = plan.method.budget.bases * sum(map(prod, whole.values()))
    spent, sent = np.zeros(len(clients)), np.zeros(len(clients))
    met: dict[str, dict[int, int]] = {client.domain: {} for client in clients}
    for round_number in range(rounds):
        for slot in run.server.ask(round_number).slots:
            sent[slot.client] += held[slot.client]
            met_there = met[clients[slot.client].domain]
            met_there[slot.base] = max(met_there.get(slot.base, 0), held[slot.client])
        for number, work in macs_of_a_round(run, round_number).items():
            spent[number] += work
    return {
        "clients": [
            {"capacity": client.capacity, "macs": spent[at] / rounds, "parameters": sent[at] / rounds}
            for at, client in enumerate(clients)
        ],
        "trained": {domain: sum(own.values()) / total for domain, own in met.items()},
    }
