"""What training costs the clients: multiply-accumulates and numbers sent, slot by slot."""

from collections import defaultdict
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hardy import tensors
from hardy.messages import Slot
from hardy.models.count import macs
from hardy.parts.objective import Objective

if TYPE_CHECKING:
    from hardy.experiment import Run


def forward_macs(run: "Run", objective: Objective) -> int:
    """Multiply-accumulates of one image's way through the networks that a pass of this objective runs."""
    if objective not in run.counted:
        plan, shape = run.engine.plan, run.engine.data.shape
        whole = {n: own for n, own in tensors.shapes(plan.start).items() if n in plan.model_names}
        run.counted[objective] = sum(macs(plan.model, shape, corner) for corner in objective.nets(whole))
    return run.counted[objective]


def macs_of_a_round(run: "Run", round: int) -> dict[int, int]:
    """Client -> multiply-accumulates of its round: forward and twice that backward, for every pass of every slot."""
    engine, spent = run.engine, defaultdict[int, int](int)
    for slot in run.server.ask(round)[2]:
        objective = engine.plan.objective(engine.data.clients[slot.client], round)
        examples = engine.training.examples(len(engine.train_rows[slot.client]), round)
        spent[slot.client] += 3 * examples * objective.passes * forward_macs(run, objective)
    return spent


def by_client(run: "Run") -> list[dict[str, Any]]:
    """What a round cost each client on average, and the share of all parameters that it ever trained (Split-Mix,
    Fig. 5 and 6)."""
    plan, clients = run.engine.plan, run.engine.data.clients
    trained = {n: t for n, t in tensors.shapes(plan.start).items() if plan.tags[n].trained}
    total = plan.method.budget.bases * sum(map(prod, trained.values()))
    spent, sent = np.zeros(len(clients)), np.zeros(len(clients))
    met: list[set[Slot]] = [set() for _ in clients]

    def held(client: int) -> int:
        return sum(map(prod, plan.objective(clients[client], 0).corner(trained).values()))

    each = [held(client) for client in range(len(clients))]
    for round in range(run.state.round):
        for slot in run.server.ask(round)[2]:
            sent[slot.client] += each[slot.client]
            met[slot.client].add(slot)
        for client, macs in macs_of_a_round(run, round).items():
            spent[client] += macs
    rounds = max(1, run.state.round)
    return [
        {
            "capacity": client.budget,
            "macs": spent[number] / rounds,
            "parameters": sent[number] / rounds,
            "trained": len(met[number]) * each[number] / total,
        }
        for number, client in enumerate(clients)
    ]
