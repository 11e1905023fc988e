"""One client's round: init_client; for every step compute_gradients and apply_gradients; make_reply. The only trainer.

`compute_gradients` works on the tensors of one slot, and an engine runs it in a loop or under vmap; the others work on
those of one slot or of a stack of them. All are pure but `apply_gradients`, which moves tensors in place.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardy.core import random, tensors
from hardy.core.layers import forcing
from hardy.core.messages import Slot
from hardy.core.method import Plan
from hardy.core.net import Net
from hardy.core.partition import Placement
from hardy.core.protocols import Batch, Objective, Optimiser, Outcome, StepResult
from hardy.core.tensors import Tensors, select


class ClientState(NamedTuple):
    """A client in the middle of its round."""

    trained: Tensors
    buffers: Tensors
    private: Tensors
    """the objective's"""
    optimiser: Tensors
    """the optimiser's state"""
    label_counts: Tensor
    """[K], of the client's training rows"""
    rounded: Tensors = {}  # noqa: RUF012  # never written to
    """copies of trained weights as products read them, where an engine keeps them"""


class Reply(NamedTuple):
    """What a client sends (shared, reported) and keeps (private)."""

    shared: Tensors
    reported: Tensors
    private: Tensors


def step_keys(seed: int, round_number: int, slots: Sequence[Slot], steps: int) -> NDArray[np.int64]:
    """The random key of every step of every slot, [steps, S]."""
    key = random.fold(np.array([seed]), "client", round_number)
    clients, bases = np.array([(slot.client, slot.base) for slot in slots], dtype=np.int64).reshape(-1, 2).T
    key = random.fold(key, clients, bases)
    return random.fold(key, np.arange(steps)[:, None])


def init_client(plan: Plan, received: Tensors, own: Tensors, label_counts: Tensor) -> ClientState:
    """The state a client starts from: what it received, what it has, and its rows of each class. An optimiser's state
    that is not kept is zero, and takes no memory before it is copied."""
    held = {**received, **own}
    trained, shapes = select(held, plan.trained), plan.optimiser_shapes
    name, like = next(iter(trained.items()))
    slots = like.shape[: like.dim() - plan.start[name].dim()]
    zero = like.new_zeros(())
    optimiser = {n: own[n] if n in own else zero.expand((*slots, *shape)) for n, shape in shapes.items()}
    private = {n: value for n, value in own.items() if n not in plan.model_names and n not in shapes}
    return ClientState(trained, select(held, plan.buffers), private, optimiser, label_counts)


def compute_gradients(
    plan: Plan,
    objective: Objective,
    received: Tensors,
    state: ClientState,
    batch: Batch,
    key: Tensor,
    rate: Tensor,
    *,
    frozen: bool = False,
) -> StepResult:
    """The gradients of one batch, and what the links of the optimiser make of them."""
    sent = {copy: received[name] for copy, name in plan.sent.items()}
    net = Net(plan.model, state.trained, {**state.buffers, **sent}, state.rounded)
    with forcing("running" if frozen else None):
        found = objective.gradient(objective, net, state.private, batch, key, received)
    gradient, own = found.gradient, state.optimiser
    for number, link in enumerate(_links(plan.method.optimiser)):
        word = random.fold(key, "optimiser", number)
        gradient, own = link.update(gradient, own, state.trained, received, rate, word)
    return found._replace(gradient=gradient, buffers=select(found.buffers, state.buffers), optimiser=own)


def _links(optimiser: Optimiser) -> Sequence[Optimiser]:
    """The links that run with the gradient; a last step of plain SGD is taken in place, in one pass over memory."""
    links = optimiser.links
    return links[:-1] if optimiser.in_place else links


def apply_gradients(
    optimiser: Optimiser,
    objective: Objective,
    state: ClientState,
    found: StepResult,
    rate: Tensor,
    begin: Tensors | None = None,
) -> ClientState:
    """One step from the same point for both players: the optimiser's on the weights, and the objective's ascent on
    what it plays against them. Weights, optimiser state and private tensors lie in memory without gaps, and move in
    place. Weights in `begin` start from there: what all of a stack of slots have received."""
    own = found.optimiser
    if in_place := optimiser.in_place:
        in_place(state.trained, found.gradient, own, rate, state.rounded, begin or {})
    else:
        tensors.begin_at(state.trained, begin or {})
        torch._foreach_add_(list(state.trained.values()), [found.gradient[name] for name in state.trained])
        for name, copy in state.rounded.items():
            copy.copy_(state.trained[name])
    if objective.has_adversary:
        objective.step_adversary(state.private, found.adversary)
    return state._replace(buffers=found.buffers, optimiser=own)


def make_reply(
    plan: Plan,
    objective: Objective,
    received: Tensors,
    state: ClientState,
    start: Tensors,
    steps: Tensor,
    rate: Tensor,
) -> Reply:
    """Splits what a client, or a stack of clients, has now into what it sends and what it keeps."""
    own, added = plan.method.optimiser.finish(
        Outcome(start=start, end=state.trained, received=received, state=state.optimiser, steps=steps, rate=rate)
    )
    model = {**state.trained, **state.buffers}
    held = {**model, **objective.finish(state.private, model), **own, **added}
    return Reply(*(select(held, plan.names(where)) for where in Placement))


def fresh_copies(state: ClientState) -> ClientState:
    """With tensors of its own for everything that moves in place."""
    return state._replace(
        trained=tensors.copies(state.trained),
        private=tensors.copies(state.private),
        optimiser=tensors.copies(state.optimiser),
    )
