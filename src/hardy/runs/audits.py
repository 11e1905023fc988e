"""Attacks on the privacy of a run, as measurements with standard errors: membership and inversion.

They say what these attacks find, not what the best attack could: a bound is what the account of differential privacy
gives.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardy.core import random, tensors
from hardy.core.client import init_client
from hardy.core.engine import DataPart
from hardy.core.federation import Federation
from hardy.core.json_files import write_sealed
from hardy.core.messages import Slot, Updates, Work
from hardy.core.net import Net
from hardy.core.state import ServerState
from hardy.core.tensors import Tensors
from hardy.engines import DeviceData, Engine
from hardy.errors import HardyError
from hardy.evaluation.gradient_inversion import error_of, invert
from hardy.evaluation.measure import ServedClients
from hardy.evaluation.membership_inference import (
    Scores,
    calibrated_scores,
    confidences,
    loss_scores,
    told_apart,
)
from hardy.runs.run import Run

AUDITS = ("membership", "inversion")
_PARTS: tuple[DataPart, ...] = ("train", "validation", "test")


def audit_run(
    run: Run, audits: str | Sequence[str], *, references: int = 0, images: int = 8, iterations: int = 200
) -> dict[str, Any]:
    """Attacks a run; one with a folder gets audit.json.

    `references` networks, each trained as the run was on a random half of every client's rows, calibrate the membership
    attack; `images` are inverted, each from the update of one step on it, by so many `iterations`.
    """
    names = [name.strip() for name in audits.split(",")] if isinstance(audits, str) else list(audits)
    if unknown := set(names) - set(AUDITS):
        raise HardyError(f"audit {min(unknown)!r} is unknown. Known: {', '.join(AUDITS)}.")
    if references < 0 or images < 2 or iterations < 1:
        raise HardyError(
            f"an audit takes references of 0 or more, 2 images or more and 1 iteration or more; it got {references}, "
            f"{images} and {iterations}."
        )
    if references and "membership" not in names:
        raise HardyError("references have no effect without the audit membership. Leave them out.")
    run.needs_everyone("an audit")
    found: dict[str, Any] = {"round": run.state.round, "seed": run.experiment.seed}
    if "membership" in names:
        found["membership"] = membership(run, references)
    if "inversion" in names:
        found["inversion"] = inversion(run, images, iterations)
    if run.folder is not None:
        write_sealed(run.folder / "audit.json", found)
    return found


# Membership


def membership(run: Run, references: int) -> dict[str, Any]:
    """How far the network that serves a client tells its training rows from its validation and test rows."""
    engine = run.needs_local("an audit")
    logits, labels = _answers(run, engine, run.state)
    count = sum(len(client.train) for client in engine.data.clients)
    others = len(labels) - count
    if min(count, others) < 4:
        raise HardyError(f"{count} training rows and {others} others are too few for a membership audit; it needs 4.")
    scores = loss_scores(logits, labels)
    found = {"loss": told_apart(scores[:count], scores[count:])}
    if references:
        said = [_reference(run, engine, number) for number in range(references)]
        calibrated = calibrated_scores(confidences(logits, labels), said)
        known = np.isfinite(calibrated)  # a row that was in all references has nothing to be compared with
        found["calibrated"] = told_apart(calibrated[:count][known[:count]], calibrated[count:][known[count:]])
    return found


def _answers(run: Run, engine: Engine, state: ServerState) -> tuple[Tensor, Tensor]:
    """Logits and labels of all rows, those of training first."""
    served = [ServedClients(engine, state, part, run.branches) for part in _PARTS]
    logits = torch.cat([rows for part in served for rows in part.answers() if len(rows)])
    return logits, torch.cat([rows for part in served for rows in part.labels])


def _reference(run: Run, engine: Engine, number: int) -> Scores:
    """What a network that was trained on half of the rows says of all of them; NaN for those."""
    rng = random.stream(run.experiment.seed, "audit", number)
    kept = [rng.permutation(len(client.train)) < max(1, len(client.train) // 2) for client in engine.data.clients]
    clients = tuple(
        replace(client, train=client.train[mask]) for client, mask in zip(engine.data.clients, kept, strict=True)
    )
    half = _engine_on(run, replace(engine.data, clients=clients))
    server = replace(run.server, clients=clients)
    state = _cast(half, server.start(half.new_store))
    for at in range(run.state.round):
        state, _ = server.round(state, half, run.experiment.training.rate_at(at, run.experiment.rounds))
    whole = _engine_on(run, engine.data)
    whole.store = half.store
    logits, labels = _answers(run, whole, state)
    said = confidences(logits, labels)
    said[: sum(map(len, kept))][np.concatenate(kept)] = np.nan
    return said


def _engine_on(run: Run, data: Federation) -> Engine:
    """An engine like the run's on other rows, with nothing trained."""
    engine = run.needs_local("an audit")
    device_data = DeviceData(data, engine.device, run.experiment.engine.precision)
    return type(engine)(engine.plan, device_data, engine.training, seed=engine.seed, lane=engine.lane)


def _cast(engine: Engine, state: ServerState) -> ServerState:
    return replace(state, shared=engine.cast(state.shared), memory=engine.cast(state.memory))


# Inversion


def inversion(run: Run, images: int, iterations: int) -> dict[str, Any]:
    """How near an image comes that is searched for in the update of one step on one image, in the first round; of the
    update as the client sends it, and of what the server makes of a round in which nobody else answers."""
    engine = run.needs_local("an audit")
    data = engine.data
    if len(data.shape) != 3:
        raise HardyError(f"inversion looks for images, and these inputs are of shape {data.shape}.")
    holders = [number for number, client in enumerate(data.clients) if len(client.train)]
    picked = random.stream(run.experiment.seed, "inversion").choice(holders, images, replace=len(holders) < images)
    usual = torch.from_numpy(data.x_train).to(engine.dtype).mean(0)
    usual = usual / 255 if data.x_train.dtype == np.uint8 else usual
    errors: dict[str, list[float]] = {"sent": [], "published": []}
    for at, client in enumerate(picked.tolist()):
        rows = data.clients[client].train
        row = rows[at % len(rows)]
        for view, error in _one_image(run, engine, client, row, usual, iterations).items():
            errors[view].append(error)
    return {view: {**_mean(found), "images": len(found)} for view, found in errors.items() if len(found) > 1}


def _mean(values: Sequence[float]) -> dict[str, float]:
    return {"error": float(np.mean(values)), "error_error": float(np.std(values, ddof=1)) / sqrt(len(values))}


def _one_image(run: Run, engine: Engine, client: int, row: int, usual: Tensor, iterations: int) -> dict[str, float]:
    clients = list(engine.data.clients)
    clients[client] = replace(clients[client], train=np.array([row]))
    one = _engine_on(run, replace(engine.data, clients=tuple(clients)))
    one.training = engine.training.with_steps(1)
    one.training = replace(one.training, batch=1, replays=1, independent=False)
    state = _cast(one, run.server.start(one.new_store))
    rate = run.experiment.training.rate_at(0, run.experiment.rounds)
    slot = run.engine.plan.method.budget.assign(0, [client], clients, run.experiment.seed)[0]
    first = init_client(
        one.plan,
        tensors.gather(state.shared, slot.base),
        tensors.gather({**state.reported, **one.store}, slot.client, slot.base),
        one.label_counts([slot.client])[0],
    )
    net = Net(one.plan.model, first.trained, first.buffers)
    (updates,) = one.train(Work(round=0, rate=rate, slots=[slot], shared=state.shared, reported=state.reported))
    assert isinstance(updates, Updates)
    index = torch.tensor([row], device=one.device)
    truth, label = one.device_data.images("train", index)[0], one.device_data.y["train"][index][0]
    key = random.fold(torch.tensor(run.experiment.seed, device=one.device), "inversion", int(row))
    found: dict[str, float] = {}
    for view, shared in (("sent", updates.shared), ("published", _published(run, state, updates, slot))):
        if view == "published" and all(torch.equal(value, updates.shared[n]) for n, value in shared.items()):
            found[view] = found["sent"]
            continue
        change = _change(one, shared, state, slot)
        if not any(bool(value.any()) for value in change.values()):
            continue  # a rule that needs more replies leaves the network as it was
        with one.arithmetic(training=False), torch.enable_grad():
            image = invert(net, change, engine.data.shape, label, iterations=iterations, key=key)
        found[view] = error_of(image, truth, usual.to(truth))
    return found


def _published(run: Run, state: ServerState, updates: Updates, slot: Slot) -> Tensors:
    """What the server would make of a round with this update alone, as updates are: [S, ...]."""
    rule, context = run.engine.plan.aggregator, run.server.context(state.shared, 0)
    shared, _ = rule.finish(rule.fold(None, updates, context), context, state.memory)
    return tensors.apply(lambda t: t[slot.base][None], shared)


def _change(engine: Engine, shared: Tensors, state: ServerState, slot: Slot) -> Tensors:
    """How far the shared trained tensors moved."""
    names = engine.plan.shared_trained
    return {name: shared[name][0] - state.shared[name][slot.base] for name in names}
