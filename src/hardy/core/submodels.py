"""Sub-networks of one network: what a client of small capacity trains, what the server averages, what a width serves.

A family of them says how tensors are cut, and gradients find their own way back through the cut. So the sub-network may
be any differentiable function of the whole: its corner, a window that moves with the round, its largest entries, its
first layers.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.func import vjp

from hardy.core import random
from hardy.core.net import Net
from hardy.core.protocols import Batch, Objective, StepResult, Wrapper
from hardy.core.tensors import Tensors


class Submodels:
    """The sub-networks that clients of each capacity train."""

    moves = False
    """whether they differ from round to round; if not, the round given does not matter"""
    sparse = False
    """whether a sub-network has the whole network's shapes and zeros for what it lacks, which take no product"""

    def cut(self, values: Tensors, capacity: float, round_number: int, received: Tensors) -> Tensors:
        """The sub-network's part of some tensors of the whole network. Differentiable. `received` is what the server
        sent in this round, for cuts that depend on values."""
        raise NotImplementedError

    def paste(self, part: Tensors, values: Tensors, capacity: float, round_number: int) -> Tensors:
        """The whole network's buffers with those of its sub-network in their place."""
        raise NotImplementedError

    def held(self, capacity: float, round_number: int, shared: Tensors) -> Tensors:
        """Which entries of the tensors sent, [...], a client trains: true or false, of their shapes."""
        raise NotImplementedError

    def sizes(self, capacity: float) -> dict[str, float]:
        """How many numbers of each tensor a client holds and sends; a tensor without an entry: all."""
        raise NotImplementedError

    def told(self, shared: Tensors) -> Tensors:
        """What a round's cuts depend on, [B, ...], worked out once from the tensors sent."""
        return {}

    def trained(self, capacity: float) -> tuple[float, ...]:
        """The capacities whose sub-networks a client of this capacity trains in every step, the largest first."""
        return (capacity,)

    def alone(self, inner: Objective, capacity: float, round_number: int) -> Objective:
        """What the sub-network of this capacity minimises, as a network of its own."""
        return inner

    def objective(self, inner: Objective, capacity: float, round_number: int) -> Objective:
        """An objective on the sub-networks that a client can afford."""
        trained = self.trained(capacity)
        return OnSubnetworks(
            inner=inner,
            submodels=self,
            trained=trained,
            each=tuple(self.alone(inner, own, round_number) for own in trained),
            round=round_number if self.moves else 0,
        )

    def __repr__(self) -> str:
        return type(self).__name__


@dataclass(frozen=True, kw_only=True)
class OnSubnetworks(Wrapper):
    """An objective on sub-networks, each a network of its own to it. Of several the losses are added up.

    A step asks for its gradient alone: that of the sub-networks, taken back through the cut.
    """

    submodels: Submodels
    trained: tuple[float, ...]
    """capacities"""
    each: tuple[Objective, ...]
    """what the sub-network of each minimises"""
    round: int
    """for sub-networks that differ from round to round"""

    def gradient(
        self, outer: Objective, net: Net, private: Tensors, batch: Batch, key: Tensor, received: Tensors
    ) -> StepResult:
        found: StepResult | None = None
        buffers = net.buffers
        for number, (capacity, objective) in enumerate(zip(self.trained, self.each, strict=True)):
            cut = partial(self.submodels.cut, capacity=capacity, round_number=self.round, received=received)
            trained, *backward = vjp(cut, net.trained)
            sent, own_key = cut(received), random.fold(key, number) if number else key
            narrow = net.on(trained, cut(buffers)).knowing(sent)
            one = objective.gradient(objective, narrow, private, batch, own_key, sent)
            buffers = self.submodels.paste(one.buffers, buffers, capacity, self.round)
            one = one._replace(gradient=backward[0](one.gradient)[0], buffers=buffers)
            found = one if found is None else _sum(found, one)
        assert found is not None
        return found


def _sum(one: StepResult, other: StepResult) -> StepResult:
    def add(left: Tensors, right: Tensors) -> Tensors:
        return {name: value + right[name] for name, value in left.items()}

    return StepResult(
        gradient=add(one.gradient, other.gradient),
        adversary=add(one.adversary, other.adversary),
        buffers=other.buffers,
        loss=one.loss + other.loss,
    )
