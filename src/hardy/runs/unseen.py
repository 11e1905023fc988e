"""Accuracy on domains that nobody trained on, by the network that a new client gets there."""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardy.attacks.base import Forward
from hardy.attacks.threats import Threat
from hardy.core.engine import Branches
from hardy.core.method import Plan
from hardy.core.net import Mixture
from hardy.core.partition import Placement
from hardy.core.state import ServerState
from hardy.deploy.personalise import Estimate, network_for_new_client
from hardy.engines.base import Engine
from hardy.errors import HardyError
from hardy.evaluation import serving
from hardy.evaluation.measure import POINTS, threat_key

_SEEN = 1024
"""training images that statistics are measured on"""


def refuse_held_out(plan: Plan, statistics: Estimate) -> None:
    """What gives a new client no network, or would have no effect."""
    if plan.method.weights is Placement.PRIVATE:
        raise HardyError(
            f"method {plan.method.name!r} shares no network, so there is none for the domains of data.held_out. Leave "
            "them out of the data, or take another method."
        )
    if statistics == "images" and plan.method.norm.branches is None:
        raise HardyError(
            f"data.held_out_statistics = images has no effect: norm {type(plan.method.norm).__name__!r} has no "
            "statistics. Leave it out."
        )


def held_out_accuracy(
    engine: Engine, state: ServerState, branches: Branches, statistics: Estimate, threat: Threat | None = None
) -> dict[str, dict[str, float]]:
    """{"held_out": accuracy by domain, "held_out_error": its standard error}; {} where no domain is held out."""
    shares, errors = {}, {}
    for domain in engine.data.held_out:
        rows = torch.from_numpy(domain.test).to(engine.device)
        right = _right(engine, _network(engine, state, statistics, domain.train), branches, rows, threat)
        shares[domain.domain] = share = float(right.double().mean())
        errors[domain.domain] = math.sqrt(share * (1 - share) / len(right))
    return {"held_out": shares, "held_out_error": errors} if shares else {}


def _network(engine: Engine, state: ServerState, statistics: Estimate, rows: Any) -> Mixture:
    plan = engine.plan
    if plan.method.norm.inference_statistics == "recomputed":
        statistics = "images"  # as for every client
    some = torch.from_numpy(np.random.default_rng(0).permutation(rows)[:_SEEN]).to(engine.device)
    return network_for_new_client(
        plan,
        engine.data,
        plan.aggregator.served(state.shared, state.memory),
        {**state.reported, **engine.store},
        statistics,
        reported=dict(state.reported),
        rounds=state.round,
        images=engine.device_data.images("train", some) if statistics == "images" else None,
    )


def _right(engine: Engine, net: Mixture, branches: Branches, rows: Tensor, threat: Threat | None) -> Tensor:
    """Which rows are classified rightly after the attack, stage by stage; those that fell stay fallen."""
    attack, predict = (
        partial(net, branch=branch) for branch in serving.chosen_branches(engine.plan.method.norm, branches)
    )
    whole = engine.plan.method.norm.inference_statistics == "batch" or (threat is not None and threat.attack.joint)
    points = len(rows) if whole else POINTS // (threat.attack.points if threat else 1)
    found = []
    with engine.arithmetic(training=False):
        for number, some in enumerate(torch.split(rows, max(1, points))):
            x, y = engine.device_data.images("test", some), engine.device_data.y["test"][some]
            found.append(_standing(engine, attack, predict, x, y, threat, number).cpu())
    return torch.cat(found)


def _standing(
    engine: Engine, attack: Forward, predict: Forward, x: Tensor, y: Tensor, threat: Threat | None, number: int
) -> Tensor:
    with torch.no_grad():
        right: Tensor = predict(x).argmax(1) == y
    for name, stage in threat.attack.stages() if threat else ():
        key = threat_key(engine.seed + number, threat, f"held out {name}").to(x.device) if threat else None
        assert key is not None
        changed = stage.perturb(attack, x, y, key)
        with torch.no_grad():
            after = predict(changed).argmax(1) == y
        right = after if stage.joint and not name else right & after
    return right


__all__ = ["held_out_accuracy", "refuse_held_out"]
