"""Ranks on torch.distributed: what they have is gathered or added up, always in the order of ranks.

Values travel as bytes: a header (pickle, with places for tensors), then the tensors, in pieces of `_PIECE`. As always
with torch.distributed, the ranks trust each other and the network between them. A rank that has died closes its
connections, so that the others learn of it at once; one that is silent is given up after `timeout` seconds.
"""

import atexit
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hardy.core.ranks import Ranks
from hardy.errors import HardyError

T = TypeVar("T")
TIMEOUT = 1800.0
"""seconds"""
_PIECE = 2**25
"""bytes a rank sends at once"""
_FIRST = 2**13
"""bytes of the first piece, in which small values fit; it begins with the length of the whole"""
_ALIGNED = 64
"""bytes to whose multiples tensors are moved in a message, so that they are computed with like any others"""
_PATIENT = timedelta(days=30)
"""how long a rank waits to be told what to do: the first one may be busy with the user's own code"""

_FAREWELL = timedelta(seconds=5)


class RankLost(HardyError):
    """Another rank does not answer any more."""


class ProcessGroup(Ranks):
    """This process among those of a run. `join` waits for the others."""

    def __init__(self, number: int, count: int, *, timeout: float = TIMEOUT, meeting: str = "env://") -> None:
        self.number, self.count, self.timeout, self.meeting = number, count, timeout, meeting
        self.who_died: Callable[[], str] = lambda: ""
        """names the rank that has ended, where this process has started it"""
        self.others_ready: Callable[[], None] = lambda: None
        """returns when the ranks that this process has started can be met"""
        self.home = self.device = torch.device("cpu")
        """the engine's; and where sums are exchanged: a GPU, if each rank has one of its own"""
        self._orders: dist.ProcessGroup | None = None

    def join(self, device: torch.device) -> None:
        """Meets the other ranks."""
        if self.meeting != "env://" and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine: nobody else needs to reach us
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.count))
        own_gpu = device == torch.device("cuda") and local <= torch.cuda.device_count()  # "cuda:1" is the same for all
        own_gpu = own_gpu and dist.is_nccl_available()
        self.home, self.device = device, device if own_gpu else self.device
        self.others_ready()
        if dist.is_initialized():  # by the script, or by an earlier run of it
            self._orders = dist.new_group(backend="gloo", timeout=_PATIENT)
            return
        with self._wording():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if own_gpu else "gloo",
                init_method=self.meeting,
                rank=self.number,
                world_size=self.count,
                timeout=timedelta(seconds=self.timeout),
            )
            self._orders = dist.new_group(backend="gloo", timeout=_PATIENT)

    def leave(self) -> None:
        """Ends the group, which a script under torchrun keeps for its next run."""
        if self.meeting == "env://":
            atexit.register(_end_together, self._orders)
        else:
            _end_group()

    def gather(self, value: T) -> list[T]:
        message = _Message.of(value)
        found = self._all_gather(message.first())
        sizes = [int(each[:8].view(torch.int64)) for each in found]
        whole = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        for to, each in zip(whole, found, strict=True):
            to[: _FIRST - 8] = each[8 : 8 + len(to)]
        for start in range(_FIRST - 8, max(sizes), _PIECE):
            longest = min(_PIECE, max(sizes) - start)
            for to, each in zip(whole, self._all_gather(message.piece(start, longest)), strict=True):
                to[start : start + longest] = each[: max(0, len(to) - start)]
        return [value if at == self.number else _decoded(each, self.home) for at, each in enumerate(whole)]

    def total(self, value: T | None) -> T | None:
        header, leaves = (b"", []) if value is None else _apart(value)
        said = self.gather((header, [(leaf.dtype, tuple(leaf.shape)) for leaf in leaves]))
        counting = [at for at, (known, _) in enumerate(said) if known]
        if not counting:
            return None
        header, shapes = said[counting[0]]
        places = [(_together(said[at][0], range(len(shapes))), said[at][1]) for at in counting]
        if any(place != places[0] for place in places):
            raise HardyError("the ranks have folded unlike things; a rule's `fold` must not depend on whose replies.")
        found: list[Tensor] = [torch.empty(shape, dtype=dtype) for dtype, shape in shapes]
        for dtype in {dtype for dtype, _ in shapes}:
            alike = [at for at, (own, _) in enumerate(shapes) if own == dtype]
            own = [(leaves[at] if leaves else found[at]).reshape(-1).to(self.device) for at in alike]
            flat = torch.cat(own)
            step = _PIECE // flat.element_size()
            for start in range(0, len(flat), step):
                piece = flat[start : start + step]
                parts = [part for at, part in enumerate(self._all_gather(piece)) if at in counting]
                result = parts[0]
                for part in parts[1:]:
                    result = result + part if dtype.is_floating_point else result.maximum(part)
                piece.copy_(result)
            split = torch.split(flat, [found[at].numel() for at in alike])
            for at, each in zip(alike, split, strict=True):
                found[at] = each.view(shapes[at][1]).clone().to(self.home)
        made: T = _together(header, found)
        return made

    def tell(self, *order: Any) -> None:
        """From the first rank to all others, which `hear` it."""
        for piece in _Message.of(order).pieces():
            self._broadcast(piece)

    def hear(self) -> tuple[Any, ...]:
        return tuple(_received(self._broadcast, self.home))

    def send(self, value: Any, to: int) -> None:
        """To one other rank, which must `receive` it."""
        for piece in _Message.of(value).pieces():
            with self._wording():
                dist.send(piece, to)

    def receive(self, rank: int) -> Any:
        def fill(piece: Tensor) -> None:
            with self._wording():
                dist.recv(piece, rank)

        return _received(fill, self.home)

    def _broadcast(self, piece: Tensor) -> None:
        patience = _PATIENT if self.number else timedelta(seconds=self.timeout)  # the first one waits for nobody's code
        with self._wording():
            work = dist.broadcast(piece, 0, group=self._orders, async_op=True)
            assert work is not None, "this rank is not in the group"
            work.wait(patience)

    def _all_gather(self, piece: Tensor) -> list[Tensor]:
        found = [torch.empty_like(piece) for _ in range(self.count)]
        with self._wording():
            dist.all_gather(found, piece)
        return found

    @contextmanager
    def _wording(self) -> Iterator[None]:
        """What torch says of a lost connection, in words that help."""
        try:
            yield
        except RuntimeError as error:
            told = self.who_died() or (
                f"a rank has ended, or was silent for {self.timeout:g} s (engine.timeout); rank {self.number} was told "
                f"by torch: {str(error).splitlines()[0][:200]}"
            )
            raise RankLost(told) from error


def _end_together(orders: dist.ProcessGroup | None) -> None:
    """Ends the group when all ranks have come to their end: gloo aborts a process whose peer goes while it still talks.
    Nobody waits long for one that has died."""
    if orders is not None and dist.is_initialized():
        with suppress(RuntimeError):
            dist.monitored_barrier(orders, timeout=_FAREWELL)
    _end_group()


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class _Message:
    """A value as bytes, of which pieces are taken without making one copy of all."""

    def __init__(self, blocks: Sequence[Tensor]) -> None:
        self.blocks, self.length = blocks, sum(map(len, blocks))

    @staticmethod
    def of(value: Any) -> "_Message":
        header, leaves = _apart(value)
        said = pickle.dumps((header, [(leaf.dtype, tuple(leaf.shape), leaf.is_cuda) for leaf in leaves]))
        blocks = [torch.tensor([len(said)]).view(torch.uint8), torch.frombuffer(bytearray(said), dtype=torch.uint8)]
        for leaf in leaves:
            flat = leaf.detach().cpu().contiguous().view(-1)
            flat = flat.as_strided((len(flat),), (1,))  # of one number the stride may be 0
            blocks += [_gap(sum(map(len, blocks))), flat.view(torch.uint8)]
        return _Message(blocks)

    def piece(self, start: int, size: int) -> Tensor:
        """So many bytes from a place on, zeros beyond the end."""
        found, at = torch.zeros(size, dtype=torch.uint8), 0
        for block in self.blocks:
            low, high = max(start, at), min(start + size, at + len(block))
            if low < high:
                found[low - start : high - start] = block[low - at : high - at]
            at += len(block)
        return found

    def first(self) -> Tensor:
        return torch.cat([torch.tensor([self.length]).view(torch.uint8), self.piece(0, _FIRST - 8)])

    def pieces(self) -> Iterator[Tensor]:
        yield self.first()
        for start in range(_FIRST - 8, self.length, _PIECE):
            yield self.piece(start, min(_PIECE, self.length - start))


def _received(fill: Callable[[Tensor], None], home: torch.device) -> Any:
    """What arrives piece by piece, as `pieces` sends them."""
    first = torch.empty(_FIRST, dtype=torch.uint8)
    fill(first)
    whole = torch.empty(int(first[:8].view(torch.int64)), dtype=torch.uint8)
    whole[: _FIRST - 8] = first[8 : 8 + len(whole)]
    for start in range(_FIRST - 8, len(whole), _PIECE):
        piece = torch.empty(min(_PIECE, len(whole) - start), dtype=torch.uint8)
        fill(piece)
        whole[start : start + len(piece)] = piece
    return _decoded(whole, home)


def _decoded(message: Tensor, home: torch.device) -> Any:
    """The value of a message; what was on a GPU is on this one's."""
    start = 8 + int(message[:8].view(torch.int64))
    header, shapes = pickle.loads(message[8:start].numpy().tobytes())
    leaves = []
    for dtype, shape, on_gpu in shapes:
        start += len(_gap(start))
        size = torch.Size(shape).numel() * dtype.itemsize
        leaf = message[start : start + size].view(dtype).view(shape)
        leaves.append(leaf.to(home) if on_gpu else leaf)
        start += size
    return _together(header, leaves)


def _gap(start: int) -> Tensor:
    return torch.zeros(-start % _ALIGNED, dtype=torch.uint8)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.leaves: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.leaves.append(value)
        return len(self.leaves) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, leaves: Sequence[Any]) -> None:
        super().__init__(file)
        self.leaves = leaves

    def persistent_load(self, place: Any) -> Any:
        return self.leaves[place]


def _apart(value: Any) -> tuple[bytes, list[Tensor]]:
    """A value without its tensors, and these."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.leaves


def _together(header: bytes, leaves: Sequence[Any]) -> Any:
    return _Unpickler(io.BytesIO(header), leaves).load()
