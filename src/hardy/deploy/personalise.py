"""After training: a network for a client that never took part, and clients that go on alone."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from hardy.core import tensors
from hardy.core.federation import Client
from hardy.core.layers import BatchNorm, Statistics, calling
from hardy.core.messages import Slot, Work
from hardy.core.net import Mixture, Net
from hardy.core.partition import Placement, Role
from hardy.core.tensors import Tensors
from hardy.errors import HardyError, unknown

if TYPE_CHECKING:
    from hardy.runs.run import Run

Estimate = Literal["average", "images"]
_NOTHING = np.zeros(0, dtype=np.int64)


def network_for_new_client(
    run: "Run", statistics: Estimate, *, domain: str | None = None, images: Tensor | NDArray[Any] | None = None
) -> Mixture:
    """The shared network with a norm for somebody who has none; see `Run.network_for_new_client`."""
    plan, engine = run.engine.plan, run.engine
    if plan.method.weights is Placement.PRIVATE:
        raise HardyError(f"method {plan.method.name!r} shares no network, so there is none for a newcomer.")
    if statistics not in get_args(Estimate):
        raise unknown("statistics of a newcomer", statistics, get_args(Estimate))
    if (statistics == "images") is (images is None):
        raise HardyError(f"statistics {statistics!r} of a newcomer {'need' if images is None else 'take no'} images.")
    clients = engine.data.clients
    domains = {client.domain for client in clients}
    if domain is not None and domain not in domains:
        raise unknown("domain", domain, domains)
    members = [n for n, client in enumerate(clients) if domain in (None, client.domain)]
    able = [n for n in members if clients[n].kind != "ST"] or [n for n, c in enumerate(clients) if c.kind != "ST"]

    held = dict(run.state.shared)
    for name, value in {**run.state.reported, **engine.store}.items():
        knowing = able if able and plan.tags[name].branch == "adversarial" else members
        held[name] = value[knowing].mean(0)
    held = tensors.select(held, (name for name in plan.tags if name in plan.model_names))
    if images is not None:
        x, bases = _pixels(images, run), range(plan.method.budget.bases)
        held = tensors.stack([estimated(plan.model, tensors.gather(held, base), x) for base in bases])

    unknown_one = Client(domain=domain or "", train=_NOTHING, validation=_NOTHING, test=_NOTHING, kind="ST")
    reported = {n: torch.cat([value, held[n][None]]) for n, value in run.state.reported.items()}
    written = plan.method.norm.exchange(reported, plan.tags, [*clients, unknown_one])
    held |= tensors.gather(written, -1)
    served = plan.method.budget.serve(held, 1.0)
    return Mixture([Net(plan.model, tensors.select(b, plan.trained), tensors.select(b, plan.buffers)) for b in served])


def _pixels(images: Tensor | NDArray[Any], run: "Run") -> Tensor:
    x, shape = torch.as_tensor(images), run.engine.data.shape
    if x.dim() != 4 or tuple(x.shape[1:]) != shape or len(x) < 2:
        raise HardyError(
            f"images of a newcomer are {list(x.shape)}; they must be [N, {', '.join(map(str, shape))}], N >= 2."
        )
    return x.to(run.engine.device, run.engine.dtype) / (255.0 if x.dtype is torch.uint8 else 1.0)


@torch.no_grad()
def estimated(model: torch.nn.Module, held: Tensors, x: Tensor) -> Tensors:
    """The tensors of a network with the clean statistics that these images have, layer by layer."""

    def measure(layer: torch.nn.Module, inputs: tuple[Tensor]) -> None:
        kept, over = layer.get_submodule("clean"), [axis for axis in range(inputs[0].dim()) if axis != 1]
        assert isinstance(kept, Statistics)
        kept.var, kept.mean = torch.var_mean(inputs[0], over)

    measured = dict(held)
    hooks = [m.register_forward_pre_hook(measure) for m in model.modules() if isinstance(m, BatchNorm)]
    try:
        with calling(branch="clean", statistics="running", key=None):
            functional_call(model, measured, (x,))
    finally:
        for hook in hooks:
            hook.remove()
    return measured


def fine_tune(run: "Run", *, steps: int, freeze: int = 0, rate: float | None = None) -> "Run":
    """Every client's network trained on alone; see `Run.fine_tune`."""
    plan, engine, experiment = run.engine.plan, run.engine, run.experiment
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
    training = replace(experiment.training, steps=steps, rate=experiment.training.rate if rate is None else rate)
    tuned = type(engine)(alone, engine.device_data, training, seed=experiment.seed, lane=engine.lane)
    everybody = range(len(engine.data.clients))
    owned = {**tensors.repeat(run.state.shared, len(everybody)), **run.state.reported, **engine.store}
    tuned.store = tensors.apply(Tensor.clone, owned)
    slots = [Slot(client, base) for client in everybody for base in range(plan.method.budget.bases)]
    for _ in tuned.train(Work(round=run.state.round, rate=training.rate, slots=slots, shared={}, reported={})):
        pass
    state = replace(run.state, shared={}, reported={}, memory={})
    return replace(run, server=replace(run.server, plan=alone), engine=tuned, state=state, folder=None, robust={})
