"""The networks of several clients asked side by side about their first images: for red flags, and for pictures."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hardy.attacks.base import Forward
from hardy.core import tensors
from hardy.core.tensors import Tensors
from hardy.evaluation.checks import Checks, Flag, fit_to_attack
from hardy.evaluation.measure import POINTS, ServedClients


def check_clients(served: ServedClients, clients: Sequence[int], key: Tensor) -> dict[int, list[Flag]]:
    """The red flags of each of these clients' networks, on its first images; clients with as many share
    calls."""
    checks, shape = Checks(), served.engine.data.shape
    raised: dict[int, list[Flag]] = {}

    def images(client: int) -> int:
        return min(checks.points, len(served.rows[client]))

    for count, alike in groupby(sorted(clients, key=images), key=images):
        members, size = list(alike), max(1, POINTS // count)
        for group in (members[start : start + size] for start in range(0, len(members), size)):
            found = ask_clients(served, group, count, checks.outputs, key)
            raised |= {client: checks.judge_outputs(each) for client, each in zip(group, found, strict=True)}
            fit = [client for client in group if fit_to_attack(raised[client])]
            for client, each in zip(fit, ask_clients(served, fit, count, checks.standing, key), strict=True):
                raised[client] += checks.judge_standing(each, math.prod(shape))
    return raised


def ask_clients(
    served: ServedClients,
    clients: Sequence[int],
    images: int,
    probe: Callable[[Forward, Tensor, Tensor, Tensor], Any],
    key: Tensor,
) -> list[Any]:
    """probe(network, images, labels, key) of each client's first images, of which it has as many."""
    if not clients:
        return []
    engine = served.engine
    rows = torch.from_numpy(np.stack([served.rows[client][:images] for client in clients])).to(engine.device)
    own = [tensors.gather(base, torch.tensor(clients, device=engine.device)) for base in served.own]

    def one(common: list[Tensors], own: list[Tensors], x: Tensor, y: Tensor, key: Tensor) -> Any:
        return probe(served.predicting(served.network(common, own)), x, y, key)

    x, y = engine.device_data.images(served.images, rows), engine.device_data.y[served.images][rows]
    found = engine.map(one, served.common, own, x, y, key.to(engine.device).expand(len(clients), *key.shape))
    return [pytree.tree_map(lambda leaf, at=at: leaf[at].cpu(), found) for at in range(len(clients))]
