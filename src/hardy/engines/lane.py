"""The slots of a lane in the middle of a round: their tensors moved step by step, and steps captured as CUDA graphs."""

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hardy import tensors
from hardy.client import Slope, State, Training, move
from hardy.parts.objective import Objective
from hardy.tensors import Tensors


class _Held(NamedTuple):
    """What a lane works on."""

    received: Tensors
    state: State
    momentum: Tensors
    rate: Tensor


class Lane:
    """The state of some slots, moved step by step; all but statistics in place.

    On a GPU a step of the whole lane is captured as a CUDA graph the second time its shape is seen and replayed from
    then on, since launching its thousand kernels one by one takes longer than running them. A captured step reads and
    writes the same tensors for good: such a lane is `fixed`, and has all of its state in place.
    """

    def __init__(
        self, look: Callable[..., Slope], training: Training, objective: Objective, *, one_base: bool, fixed: bool
    ) -> None:
        self.look, self.training, self.objective = look, training, objective
        self.one_base, self.fixed = one_base, fixed
        self.held: _Held | None = None
        self.graphs: dict[tuple[int, bool], _Graph | None] = {}
        self.pool: Any = None
        """memory of all its graphs: they run one after another, and what one leaves is read before the next"""

    def load(self, received: Tensors, state: State, rate: Tensor, *, opening: bool) -> None:
        """Starts a round. Slots that open it together read what they received from one place; their own weights are
        written when they have."""
        if self.held is None or not self.fixed:
            trained, private = tensors.copies(state.trained), tensors.copies(state.private)
            momentum = tensors.apply(torch.zeros_like, trained) if self.training.momentum else {}
            if self.fixed:
                received, state, rate = pytree.tree_map(Tensor.clone, (received, state, rate))
            self.held = _Held(received, State(trained, state.kept, private), momentum, rate)
            return
        held = self.held
        if self.training.momentum:
            torch._foreach_zero_(list(held.momentum.values()))
        mine = held.state
        if opening:
            mine, state = _own(mine, received), _own(state, received)
        _copy((held.received, mine, held.rate), (received, state, rate))

    def step(self, rows: Tensor, key: Tensor, members: Tensor | slice, *, opening: bool) -> Tensor:
        """Moves the members by one step; returns their losses."""
        assert self.held is not None
        if isinstance(members, Tensor):
            return self._move_some(rows, key, members)
        seen = rows.shape[1], opening
        if self.held.rate.is_cuda and seen in self.graphs:
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            graph = self.graphs[seen] = self.graphs[seen] or _Graph(self, rows, key, opening)
            return graph.replay(rows, key)
        self.graphs[seen] = None
        return self.move(rows, key, opening)

    def move(self, rows: Tensor, key: Tensor, opening: bool) -> Tensor:
        """All slots by one step."""
        assert self.held is not None
        received, state, momentum, rate = self.held
        found = self.look(received, state, rows, key, opening)
        for name in received.keys() & state.trained.keys() if opening else ():
            state.trained[name].copy_(received[name])
        self._keep(move(self.training, self.objective, state, momentum, found, rate))
        return found.loss

    def _move_some(self, rows: Tensor, key: Tensor, members: Tensor) -> Tensor:
        assert self.held is not None
        received, state, momentum, rate = self.held
        part, speed = pytree.tree_map(lambda leaf: leaf[members], (state, momentum))
        given = received if self.one_base else tensors.gather(received, members)
        found = self.look(given, part, rows, key, False)
        part = move(self.training, self.objective, part, speed, found, rate)
        for whole, moved in ((state.trained, part.trained), (state.private, part.private), (momentum, speed)):
            for name, rows_of_it in moved.items():
                whole[name].index_copy_(0, members, rows_of_it)
        kept = {name: whole.index_copy(0, members, part.kept[name]) for name, whole in state.kept.items()}
        self._keep(state._replace(kept=kept))
        return found.loss

    def _keep(self, state: State) -> None:
        assert self.held is not None
        if self.fixed:
            _copy(self.held.state, state)
        else:
            self.held = self.held._replace(state=state)

    def unload(self) -> State:
        """The state at the end of a round; what others will read is no longer tied to the lane."""
        assert self.held is not None
        state = self.held.state
        if not self.fixed:
            return state
        return state._replace(trained=tensors.copies(state.trained), kept=tensors.copies(state.kept))


class _Graph:
    """One captured step of a lane."""

    def __init__(self, lane: Lane, rows: Tensor, key: Tensor, opening: bool) -> None:
        assert lane.held is not None
        self.inputs = rows.clone(), key.clone()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries pick their kernels before capture
            lane.look(lane.held.received, lane.held.state, *self.inputs, opening)
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()  # freeing an old graph or tensor in the middle would void the capture
        try:
            with torch.cuda.graph(self.graph, pool=lane.pool):
                self.loss = lane.move(*self.inputs, opening)
        finally:
            gc.enable()

    def replay(self, rows: Tensor, key: Tensor) -> Tensor:
        _copy(self.inputs, (rows, key))
        self.graph.replay()
        return self.loss


def _own(state: State, received: Tensors) -> State:
    """Without the trained tensors that were received."""
    return state._replace(trained={name: w for name, w in state.trained.items() if name not in received})


def _copy(target: Any, source: Any) -> None:
    tensors.copy(pytree.tree_leaves(target), pytree.tree_leaves(source))
