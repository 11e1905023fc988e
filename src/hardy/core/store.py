"""What each client has of its own: reported and private tensors, of which a round reads and writes its slots' rows."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardy.core import tensors
from hardy.core.tensors import Tensors

_PIECE = 2**25
"""bytes of the rows that are moved at once"""


@dataclass(frozen=True)
class Slot:
    """One piece of a round's work: a client trains a base."""

    client: int
    base: int = 0


class ClientStore(Mapping[str, Tensor]):
    """Tensors of which every client has its own. As a mapping it gives whole ones, [C, B, ...], for what looks at all
    clients; a round only reads and writes rows."""

    like: Tensors
    """of one slot, for names, shapes and types"""
    axes: tuple[int, int]
    """(C, B)"""

    def read(self, slots: Sequence[Slot]) -> Tensors:
        """The rows of slots, [S, ...]. They may be the held ones: not to be written to."""
        raise NotImplementedError

    def write(self, slots: Sequence[Slot], rows: Tensors, mask: Tensor | None = None) -> None:
        """Puts rows, [S, ...], in place of those that are held; with a mask, [S], only where it is true."""
        raise NotImplementedError

    def stored(self, slots: Sequence[Slot]) -> Tensors:
        """The rows of slots as they were written."""
        return self.read(slots)

    def held(self) -> Iterator[Slot]:
        """The slots whose rows may not be the first values any more; those that were written last come last."""
        raise NotImplementedError

    def pieces(self, wanted: Callable[[int], bool] = lambda client: True) -> Iterator[tuple[list[Slot], Tensors]]:
        """The rows of these clients as they were written, some at a time."""
        size = max(1, _PIECE // max(1, tensors.count_bytes(self.like)))
        slots = (slot for slot in self.held() if wanted(slot.client))
        while some := list(islice(slots, size)):
            yield some, self.stored(some)

    def written(self, slots: Sequence[Slot], rows: Tensors) -> "ClientStore":
        """A store with these rows in their place; this one stays as it is."""
        raise NotImplementedError

    def changed(self) -> Iterable[Tensor]:
        """All that may have changed with the last `written`."""
        raise NotImplementedError

    def snapshot(self) -> "Snapshot":
        """This moment, at no cost."""
        raise NotImplementedError

    def saved(self) -> tuple[Tensors, dict[str, Any]]:
        """For a checkpoint: tensors for its file, and what its record says of rows that lie elsewhere, if any do."""
        raise NotImplementedError

    def cast(self, function: Callable[[Mapping[str, Tensor]], Tensors]) -> "ClientStore":
        """A store of the same rows on another device, in another precision."""
        raise NotImplementedError

    def only(self, names: Collection[str]) -> "ClientStore":
        """A store of some of the tensors, or of more where that costs nothing."""
        raise NotImplementedError

    def first_rows(self) -> Tensors:
        """What clients begin with, [C, B, ...] or [1, B, ...] where it is the same for all."""
        raise NotImplementedError

    def begun(self, first: Tensors) -> "ClientStore":
        """A store like this one with other such values, before anybody took part."""
        raise NotImplementedError

    def place(self, folder: Path) -> None:
        """Told the folder that files of rows are to lie in, before anything is written."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the whole tensors."""
        return {name: (*self.axes, *shape) for name, shape in tensors.shapes(self.like).items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)


MakeStore = Callable[[Tensors, int], ClientStore]
"""(first values [B, ...], number of clients) -> a store in which all clients have these"""


class Snapshot:
    """A store as it is now; `intact`: whether it still is, since one in memory is written to in place."""

    def __init__(self, store: ClientStore, count: Callable[[], object] = lambda: 0) -> None:
        self.store, self._count, self._known = store, count, count()

    @property
    def intact(self) -> bool:
        return self._known is not None and self._known == self._count()


class MemoryStore(ClientStore):
    """Whole tensors in memory, [C, B, ...]."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.tensors = dict(values)

    @staticmethod
    def filled(first: Tensors, clients: int) -> "MemoryStore":
        return MemoryStore(tensors.repeat(first, clients))

    @property
    def like(self) -> Tensors:  # type: ignore[override]
        return tensors.gather(self.tensors, 0, 0)

    @property
    def axes(self) -> tuple[int, int]:  # type: ignore[override]
        clients, bases, *_ = next(iter(self.tensors.values())).shape if self.tensors else (0, 0)
        return clients, bases

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"MemoryStore({tensors.shapes(self.tensors)})"

    def read(self, slots: Sequence[Slot]) -> Tensors:
        if not self.tensors:
            return {}
        if len(slots) == 1:
            return tensors.apply(lambda t: t[slots[0].client, slots[0].base][None], self.tensors)
        if self._are_all(slots):
            return tensors.apply(lambda t: t.flatten(0, 1), self.tensors)
        return tensors.gather(self.tensors, *self._where(slots))

    def write(self, slots: Sequence[Slot], rows: Tensors, mask: Tensor | None = None) -> None:
        where = None if self._are_all(slots) else self._where(slots)
        for name, new in rows.items():
            held = self.tensors[name]
            at = held.view(new.shape) if where is None else held[where]
            if mask is not None:
                new = torch.where(tensors.expand_trailing(mask, new), new, at, out=at)
            elif where is None:
                at.copy_(new)
            if where is not None:
                held[where] = new

    def held(self) -> Iterator[Slot]:
        clients, bases = self.axes
        return (Slot(client, base) for client in range(clients) for base in range(bases))

    def written(self, slots: Sequence[Slot], rows: Tensors) -> "MemoryStore":
        clients, bases = self.axes
        places = np.array([slot.client * bases + slot.base for slot in slots])
        order = np.argsort(places)
        if (
            len(slots) != clients * bases
            or (places[order] != np.arange(len(slots))).any()
            or rows.keys() != self.keys()
        ):
            return MemoryStore(tensors.scatter(self.tensors, rows, *self._where(slots)))
        index = tensors.send(torch.from_numpy(order), next(iter(rows.values())).device)  # all of them: none stays
        return MemoryStore({name: rows[name][index].view_as(held) for name, held in self.tensors.items()})

    def changed(self) -> Iterable[Tensor]:
        return self.tensors.values()

    def snapshot(self) -> Snapshot:
        return Snapshot(self, self._in_place_changes)

    def saved(self) -> tuple[Tensors, dict[str, Any]]:
        return self.tensors, {}

    def cast(self, function: Callable[[Mapping[str, Tensor]], Tensors]) -> "MemoryStore":
        return MemoryStore(function(self.tensors))

    def only(self, names: Collection[str]) -> "MemoryStore":
        return MemoryStore({name: value for name, value in self.tensors.items() if name in names})

    def first_rows(self) -> Tensors:
        return dict(self.tensors)

    def begun(self, first: Tensors) -> "MemoryStore":
        return MemoryStore(first)

    def _where(self, slots: Sequence[Slot]) -> tuple[Tensor, ...]:
        device = next(iter(self.tensors.values())).device
        return tensors.send(torch.tensor([(slot.client, slot.base) for slot in slots]), device).unbind(1)

    def _are_all(self, slots: Sequence[Slot]) -> bool:
        """Whether the slots are every base of every client, in order."""
        clients, bases = self.axes
        if len(slots) != clients * bases:  # told at once: a round of many clients asks this for each of them
            return False
        return list(slots) == [Slot(client, base) for client in range(clients) for base in range(bases)]

    def _in_place_changes(self) -> object:
        """How often each tensor was written to; None where torch does not count."""
        try:
            return {name: value._version for name, value in self.tensors.items()}
        except RuntimeError:
            return None


def as_store(values: Mapping[str, Tensor]) -> ClientStore:
    """Tensors [C, B, ...] as a store; a store is one already."""
    return values if isinstance(values, ClientStore) else MemoryStore(values)
