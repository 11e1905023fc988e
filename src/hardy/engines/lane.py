"""The slots of a lane in the middle of a round: their tensors moved step by step, and steps captured as CUDA graphs."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hardy.core import tensors
from hardy.core.client import ClientState, apply_gradients, fresh_copies
from hardy.core.protocols import Objective, Optimiser, StepResult
from hardy.core.tensors import Tensors


class _Held(NamedTuple):
    """What a lane works on."""

    received: Tensors
    state: ClientState
    rate: Tensor


class Lane:
    """The state of some slots, moved step by step; all but statistics in place.

    On a GPU a step of the lane, or of so many of its slots, is captured as a CUDA graph when its shape is first seen,
    and replayed, since launching its thousand kernels one by one takes longer than running them. A captured step reads
    and writes the same tensors for good: such a lane is `fixed`, and has all of its state in place.
    """

    def __init__(
        self,
        look: Callable[..., StepResult],
        optimiser: Optimiser,
        objective: Objective,
        *,
        one_base: bool,
        fixed: bool,
        rounding: Callable[[Tensors], Tensors] | None = None,
        captured: bool = False,
        urgent: bool = False,
    ) -> None:
        self.look, self.optimiser, self.objective = look, optimiser, objective
        self.one_base, self.fixed, self.captured, self.urgent = one_base, fixed, captured, urgent
        self.rounding = rounding
        """makes the copies of trained weights that products read, which are then moved along with them"""
        self.held: _Held | None = None
        self.graphs: dict[tuple[int, ...], _Graph] = {}
        """by the number of slots, their batch size and whether they open a round"""
        self.pool: Any = torch.cuda.graph_pool_handle() if captured else None
        """memory of all its graphs: they run one after another, and what one leaves is read before the next"""
        self.stream: torch.cuda.Stream | None = None
        """on which they are captured"""

    def load(self, received: Tensors, state: ClientState, rate: Tensor, *, opening: bool) -> None:
        """Starts a round. Slots that open it together read what they received from one place; their own weights are
        written when they have."""
        if self.rounding and not (opening and self.held):
            state = state._replace(rounded=self.rounding(state.trained))
        if self.held is None or not self.fixed:
            if self.fixed:
                received, rate = pytree.tree_map(Tensor.clone, (received, rate))
                state = state._replace(buffers=tensors.copies(state.buffers))
            self.held = _Held(received, fresh_copies(state), rate)
            return
        held = self.held
        mine = held.state
        if opening:
            mine, state = _own(mine, received), _own(state, received)
        _copy((held.received, mine, held.rate), (received, state, rate))

    def step(self, rows: Tensor, key: Tensor, members: Tensor | slice, *, opening: bool) -> Tensor:
        """Moves the members by one step; returns their losses."""
        assert self.held is not None
        seen = (*rows.shape, opening)
        moved = partial(self._move_all, opening=opening) if isinstance(members, slice) else self._move_some
        given = (rows, key) if isinstance(members, slice) else (rows, key, members)
        if not self.captured:
            return moved(*given)
        if seen not in self.graphs:
            self.stream = self.stream or cuda_stream(rows.device, urgent=self.urgent)
            self.graphs[seen] = _Graph(moved, given, self.pool, self.stream)
        return self.graphs[seen].replay(given)

    def _move_all(self, rows: Tensor, key: Tensor, *, opening: bool) -> Tensor:
        assert self.held is not None
        received, state, rate = self.held
        found = self.look(received, state, rows, key, rate, opening)
        begin = {name: received[name] for name in state.trained if name in received} if opening else {}
        self._keep(apply_gradients(self.optimiser, self.objective, state, found, rate, begin))
        return found.loss

    def _move_some(self, rows: Tensor, key: Tensor, members: Tensor) -> Tensor:
        assert self.held is not None
        received, state, rate = self.held
        part: ClientState = pytree.tree_map(lambda leaf: leaf[members], state)
        given = received if self.one_base else tensors.gather(received, members)
        found = self.look(given, part, rows, key, rate, False)
        part = apply_gradients(self.optimiser, self.objective, part, found, rate)
        moving = (state.trained, part.trained), (state.private, part.private), (state.rounded, part.rounded)
        for whole, moved in moving:
            for name, rows_of_it in moved.items():
                whole[name].index_copy_(0, members, rows_of_it)
        buffers, own = (
            {name: value.index_copy(0, members, moved[name]) for name, value in whole.items()}
            for whole, moved in ((state.buffers, part.buffers), (state.optimiser, part.optimiser))
        )
        self._keep(state._replace(buffers=buffers, optimiser=own))
        return found.loss

    def _keep(self, state: ClientState) -> None:
        assert self.held is not None
        if self.fixed:
            _copy(self.held.state, state)
        else:
            self.held = self.held._replace(state=state)

    def unload(self) -> ClientState:
        """The state at the end of a round; what others will read is no longer tied to the lane."""
        assert self.held is not None
        state = self.held.state
        if not self.fixed:
            return state
        return state._replace(trained=tensors.copies(state.trained), buffers=tensors.copies(state.buffers))


def cuda_stream(device: torch.device, *, urgent: bool = False) -> torch.cuda.Stream:
    """A stream whose kernels, and those of graphs captured on it, go before waiting ones of others if it is urgent."""
    return torch.cuda.Stream(device, priority=-1 if urgent else 0)  # type: ignore[no-untyped-call]


class _Graph:
    """One captured step of a lane. Libraries must have been used before: by a trial, which is not captured."""

    def __init__(
        self, step: Callable[..., Tensor], inputs: tuple[Tensor, ...], pool: Any, stream: torch.cuda.Stream
    ) -> None:
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        self.graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # freeing an old graph or tensor in the middle would void the capture
        try:
            with _back_to_here(stream.device), _own_workspace(), torch.cuda.graph(self.graph, pool=pool, stream=stream):
                self.loss = step(*self.inputs)
        finally:
            if collecting:
                gc.enable()

    def replay(self, inputs: tuple[Tensor, ...]) -> Tensor:
        _copy(self.inputs, inputs)
        self.graph.replay()
        return self.loss


def _back_to_here(device: torch.device) -> AbstractContextManager[Any]:
    """The device is the current one, which a capture waits for; where one fails, torch stays on the stream of it."""
    return torch.cuda.stream(torch.cuda.current_stream(device))


@contextmanager
def _own_workspace() -> Iterator[None]:
    """cuBLAS keeps its workspaces, one a stream, for the next products. One that is made in a capture lies in the
    graph's memory: other graphs must not write to it while that one runs, nor when it is no more. So all are let go."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _own(state: ClientState, received: Tensors) -> ClientState:
    """Without the trained tensors that were received, and rounded copies, which the first step writes."""
    return state._replace(trained={name: w for name, w in state.trained.items() if name not in received}, rounded={})


def _copy(target: Any, source: Any) -> None:
    tensors.copy(pytree.tree_leaves(target), pytree.tree_leaves(source))
