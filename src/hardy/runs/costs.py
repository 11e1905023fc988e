"""What training costs the clients: multiply-accumulates and numbers sent, slot by slot."""

from collections import defaultdict
from math import prod
from typing import Any

import numpy as np

from hardy.core import tensors
from hardy.models.count import macs
from hardy.parts.objectives import Objective
from hardy.runs.run import Run


def forward_macs(run: Run, objective: Objective) -> int:
    """Multiply-accumulates of one image's way through the networks that a pass of this objective runs."""
    if objective not in run.counted:
        plan, shape = run.engine.plan, run.engine.data.shape
        whole = {n: own for n, own in tensors.shapes(plan.start).items() if n in plan.model_names}
        run.counted[objective] = sum(macs(plan.model, shape, corner) for corner in objective.nets(whole))
    return run.counted[objective]


def macs_of_a_round(run: Run, round: int) -> dict[int, int]:
    """Client -> multiply-accumulates of its round: forward and twice that backward, for every pass of every slot."""
    engine, spent = run.engine, defaultdict[int, int](int)
    for slot in run.server.ask(round)[2]:
        objective = engine.plan.objective(engine.data.clients[slot.client], round)
        examples = engine.training.examples(len(engine.train_rows[slot.client]), round)
        spent[slot.client] += 3 * examples * objective.passes * forward_macs(run, objective)
    return spent


def training(run: Run) -> dict[str, Any]:
    """What a round cost each client on average, and the share of all parameters that a domain's clients ever trained
    (Split-Mix, Fig. 5 and 6)."""
    plan, clients, rounds = run.engine.plan, run.engine.data.clients, run.state.round
    whole = {n: shape for n, shape in tensors.shapes(plan.start).items() if plan.tags[n].trained}
    held = [sum(map(prod, plan.objective(client, 0).corner(whole).values())) for client in clients]
    total = plan.method.budget.bases * sum(map(prod, whole.values()))
    spent, sent = np.zeros(len(clients)), np.zeros(len(clients))
    met: dict[str, dict[int, int]] = {client.domain: {} for client in clients}
    for round in range(rounds):
        for slot in run.server.ask(round)[2]:
            sent[slot.client] += held[slot.client]
            own = met[clients[slot.client].domain]
            own[slot.base] = max(own.get(slot.base, 0), held[slot.client])
        for number, work in macs_of_a_round(run, round).items():
            spent[number] += work
    return {
        "clients": [
            {"capacity": client.capacity, "macs": spent[at] / rounds, "parameters": sent[at] / rounds}
            for at, client in enumerate(clients)
        ],
        "trained": {domain: sum(own.values()) / total for domain, own in met.items()},
    }
