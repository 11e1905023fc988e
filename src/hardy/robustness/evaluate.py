"""Accuracy per client, each with its own tensors; per domain, mean and worst client."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hardy import tensors
from hardy.client import Rows
from hardy.data.splits import Client
from hardy.engines.base import Engine
from hardy.models.net import Net
from hardy.state import ServerState
from hardy.tensors import Tensors

Part = Literal["validation", "test"]
_POINTS = 2048
"""images in one call"""


def accuracies(engine: Engine, state: ServerState, part: Part) -> list[float | None]:
    """The accuracy of every client on its own rows, with its own tensors; None for a client without rows."""
    clients = engine.data.clients
    rows = [client.test if part == "test" else client.validation for client in clients]
    own = {n: t[:, 0] for n, t in {**state.reported, **engine.store}.items() if n in engine.plan.model_names}
    common = {n: t[0] for n, t in state.shared.items() if n in engine.plan.model_names}
    # clients that differ in nothing are one: their rows are run together
    groups = rows if own else [np.concatenate(rows)]
    hits = np.concatenate(_hits(engine, common, own, groups, "test" if part == "test" else "train"))
    ends = np.cumsum([len(r) for r in rows])
    return [float(hits[end - len(r) : end].mean()) if len(r) else None for r, end in zip(rows, ends, strict=True)]


def _hits(engine: Engine, common: Tensors, own: Tensors, groups: Sequence[Rows], part: str) -> list[Any]:
    """Which rows of each group are classified rightly."""

    def right(common: Tensors, own: Tensors, x: Tensor, y: Tensor) -> Tensor:
        held = {**common, **own}
        plan = engine.plan
        net = Net(plan.model, tensors.select(held, plan.trained), tensors.select(held, plan.kept))
        return net(x).argmax(-1) == y

    longest = max(len(rows) for rows in groups)
    padded = torch.zeros(len(groups), max(1, longest), dtype=torch.int64)
    for i, rows in enumerate(groups):
        padded[i, : len(rows)] = torch.from_numpy(rows)
    padded = padded.to(engine.device)
    width = min(longest, _POINTS) or 1
    lane = max(1, _POINTS // width)
    found = torch.zeros(padded.shape, dtype=torch.bool, device=engine.device)
    for first in range(0, len(groups), lane):
        mine = {n: t[first : first + lane] for n, t in own.items()}
        for start in range(0, longest, width):
            index = padded[first : first + lane, start : start + width]
            x, y = engine.resident.images(part, index), engine.resident.y[part][index]
            found[first : first + lane, start : start + width] = engine.map(right, common, mine, x, y)
    table = found.cpu().numpy()
    return [table[i, : len(rows)] for i, rows in enumerate(groups)]


def summarise(values: Sequence[float | None], clients: Sequence[Client]) -> dict[str, Any]:
    """Mean over clients, worst client, mean by domain; clients without rows do not count."""
    known = [v for v in values if v is not None]
    domains: dict[str, list[float]] = {}
    for value, client in zip(values, clients, strict=True):
        if value is not None:
            domains.setdefault(client.domain, []).append(value)
    return {
        "mean": float(np.mean(known)) if known else None,
        "worst_client": min(known, default=None),
        "by_domain": {domain: float(np.mean(found)) for domain, found in domains.items()},
        "by_client": list(values),
    }
