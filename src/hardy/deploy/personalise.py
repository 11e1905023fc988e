"""After training: a network for a client that never took part, and clients that go on alone."""

from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardy.core import tensors
from hardy.core.federation import Client, Federation
from hardy.core.messages import Slot, Work
from hardy.core.method import Plan
from hardy.core.net import Mixture
from hardy.core.partition import Placement, Role
from hardy.core.state import ServerState
from hardy.core.store import MemoryStore
from hardy.core.tensors import Tensors
from hardy.engines.base import Engine
from hardy.errors import HardyError, unknown
from hardy.evaluation import serving

Estimate = Literal["average", "images"]
_NOTHING = np.zeros(0, dtype=np.int64)


def network_for_new_client(
    plan: Plan,
    data: Federation,
    shared: Tensors,
    own: Tensors,
    statistics: Estimate,
    *,
    reported: Tensors,
    rounds: int,
    domain: str | None = None,
    images: Tensor | NDArray[Any] | None = None,
    branch: str | None = None,
) -> Mixture:
    """The shared network with a norm for somebody who has none; see `Run.network_for_new_client`.

    `shared` are the server's tensors, [B, ...], `own` the clients', [C, B, ...], and `reported` those of them that the
    server has seen, after so many rounds. It answers with `branch`, or with the norm's own.
    """
    clients = data.clients
    if plan.method.weights is Placement.PRIVATE:
        raise HardyError(f"method {plan.method.name!r} shares no network, so there is none for a new client.")
    if statistics not in get_args(Estimate):
        raise unknown("statistics of a new client", statistics, get_args(Estimate))
    if (statistics == "images") is (images is None):
        raise HardyError(f"statistics {statistics!r} of a new client {'need' if images is None else 'take no'} images.")
    domains = {client.domain for client in clients}
    if domain is not None and domain not in domains:
        raise unknown("domain", domain, domains)
    members = [n for n, client in enumerate(clients) if domain in (None, client.domain)]
    able = [n for n in members if clients[n].kind != "ST"] or [n for n, c in enumerate(clients) if c.kind != "ST"]

    held = dict(shared)
    for name, value in own.items():
        knowing = able if able and plan.tags[name].branch == "adversarial" else members
        held[name] = value[knowing].mean(0) if value.is_floating_point() else value[knowing].amax(0)
    held = tensors.select(held, serving.model_names(plan))
    if images is not None:
        x, bases = _pixels(images, data, next(iter(held.values()))), range(plan.method.budget.bases)
        found = [serving.recompute_statistics(plan.model, tensors.gather(held, base), x) for base in bases]
        held = tensors.stack(found)
    unknown_one = Client(domain=domain or "", train=_NOTHING, validation=_NOTHING, test=_NOTHING, kind="ST")
    reported = {n: torch.cat([value, held[n][None]]) for n, value in reported.items()}
    written = plan.method.norm.exchange(reported, plan.tags, [*clients, unknown_one])
    held |= tensors.gather(written, -1)
    return serving.mixture(plan, plan.method.budget.serve(held, 1.0, plan.submodels, rounds), branch)


def _pixels(images: Tensor | NDArray[Any], data: Federation, like: Tensor) -> Tensor:
    x = torch.as_tensor(images)
    if x.dim() != 4 or tuple(x.shape[1:]) != data.shape or len(x) < 2:
        raise HardyError(
            f"images of a new client are {list(x.shape)}; they must be [N, {', '.join(map(str, data.shape))}], N >= 2."
        )
    return x.to(like.device, like.dtype) / (255.0 if x.dtype is torch.uint8 else 1.0)


def fine_tune(
    engine: Engine, state: ServerState, *, steps: int, freeze: int = 0, rate: float | None = None
) -> tuple[Engine, ServerState]:
    """Every client's network trained on alone; see `Run.fine_tune`. Returns an engine of a plan in which everything is
    private, and the state that is left to the server."""
    plan = engine.plan
    if plan.sent or Role.CONTROL in plan.roles.values():
        raise HardyError(f"method {plan.method.name!r} needs the server in every step; it cannot go on without one.")
    layers = list(dict.fromkeys(n.rpartition(".")[0] for n in plan.trained if plan.roles[n] is Role.WEIGHT))
    if not 0 <= freeze < len(layers):
        raise HardyError(
            f"freeze is {freeze}; the network has {len(layers)} layers, so it must be in [0, {len(layers) - 1}]."
        )
    first = next(at for at, name in enumerate(plan.trained) if name.rpartition(".")[0] == layers[freeze])
    frozen = set(plan.trained[:first])
    alone = replace(
        plan,
        method=plan.method.replace(weights=Placement.PRIVATE, objective=plan.method.objective.alone()),
        tags={n: replace(tag, trained=tag.trained and n not in frozen) for n, tag in plan.tags.items()},
        placement=dict.fromkeys(plan.tags, Placement.PRIVATE),
    )
    rate = engine.training.rate if rate is None else rate
    training = engine.training.with_steps(steps, rate)
    tuned = type(engine)(alone, engine.device_data, training, seed=engine.seed, lane=engine.lane)
    everybody = range(len(engine.data.clients))
    shared = plan.aggregator.served(state.shared, state.memory)
    owned = {**tensors.repeat(shared, len(everybody)), **state.reported, **engine.store}
    tuned.store = MemoryStore(tensors.apply(Tensor.clone, owned))
    slots = [Slot(client, base) for client in everybody for base in range(plan.method.budget.bases)]
    for _ in tuned.train(Work(round=state.round, rate=rate, slots=slots, shared={}, reported=MemoryStore({}))):
        pass
    return tuned, replace(state, shared={}, reported=MemoryStore({}), memory={})
