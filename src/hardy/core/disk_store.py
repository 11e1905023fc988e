"""Client tensors beyond memory: one file of rows, to which is only ever appended.

A record is a slot's number and its tensors, one after another. The newest record of a slot counts; a slot without one
has the first values and takes no room. A store is a version: the records before its end. So a checkpoint needs only
the file's name, the number of its records and their SHA-256, and what a killed process wrote after them is cut off.
Where more than half of the records are outdated, a checkpoint begins a new file with the others.
"""

import hashlib
import os
import shutil
import tempfile
import weakref
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardy.core import tensors
from hardy.core.files import append, disk, make_folder, remove_folder, sync_file
from hardy.core.store import ClientStore, Slot, Snapshot
from hardy.core.tensors import Tensors
from hardy.errors import HardyError

_LARGEST = 2**31
"""bytes of all clients' tensors that are put into memory at once"""
_SPARE = 4096
"""outdated records that are never worth a new file"""
_CHUNK = 4096
"""rows copied at once"""


class RowFile:
    """Records of one size in a file: appended, cut off at the end, read by their numbers. A new file goes on with the
    numbers of the old one."""

    def __init__(self, folder: Path | None, size: int) -> None:
        self.folder, self.number, self.first, self.temporary = folder, 1, 0, False
        self.kind = np.dtype([("slot", "<i8"), ("row", f"V{size}")])
        self.digest, self.cut = hashlib.sha256(), False
        self.slots, self.before = array("q"), array("q")
        """of each record: its slot, and the number of the record that it outdated, or -1"""
        self.newest: dict[int, int] = {}
        self._mapped: NDArray[Any] | None = None

    @property
    def path(self) -> Path:
        if self.folder is None:  # a run without a folder of its own
            self.folder, self.temporary = Path(tempfile.mkdtemp(prefix="hardy-clients-")), True
            weakref.finalize(self, remove_folder, self.folder)
        return self.folder / f"{self.number:06d}.rows"

    def place(self, folder: Path) -> None:
        """From now on in this folder, beside what others have left there, unless it has one already."""
        if self.folder is not None and not self.temporary:
            return
        free = 1 + max((int(path.stem) for path in folder.glob("*.rows")), default=0)
        if self.slots:
            with disk(str(folder)):
                make_folder(folder)
                shutil.move(self.path, folder / f"{free:06d}.rows")
        self.folder, self.number, self.temporary, self._mapped = folder, free, False, None

    def __len__(self) -> int:
        return self.first + len(self.slots)

    def append(self, slots: Sequence[int], rows: NDArray[np.uint8]) -> None:
        records = np.zeros(len(slots), self.kind)
        records["slot"] = slots
        records["row"] = rows.view(self.kind["row"])[:, 0]
        content = records.tobytes()
        with disk(str(self.path)):
            make_folder(self.path.parent)
            if self.cut or not self.slots:  # a process that died may have left more
                with suppress(FileNotFoundError):
                    os.truncate(self.path, self.kind.itemsize * len(self.slots))
                self.cut = False
            append(self.path, content)
        self.digest.update(content)
        self._note(slots)

    def _note(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.before.append(self.newest.get(slot, -1))
            self.newest[slot] = len(self)
            self.slots.append(slot)
        self._mapped = None

    def cut_off(self, end: int) -> None:
        """Forgets all records from a number on; the file is shortened with the next write."""
        if end == len(self):
            return
        while len(self) > end:
            slot, before = self.slots.pop(), self.before.pop()
            if before < 0:
                del self.newest[slot]
            else:
                self.newest[slot] = before
        self.digest, self.cut, self._mapped = self.hashed(end), True, None

    def find(self, slot: int, end: int) -> int:
        """The number of a slot's newest record before the end; -1: it has none."""
        at = self.newest.get(slot, -1)
        while at >= end:
            at = self.before[at - self.first]
        return at

    def rows(self, numbers: Sequence[int]) -> NDArray[np.uint8]:
        """The rows of some records, [n, bytes]."""
        if self._mapped is None:
            self._mapped = self._content(len(self.slots))
        found = self._mapped["row"][np.asarray(numbers) - self.first]
        return np.frombuffer(found.tobytes(), np.uint8).reshape(len(numbers), -1)

    def compact(self) -> None:
        """A new file of the records that count; the old one stays for the checkpoints that name it."""
        wanted = sorted(self.newest.values())
        fresh = RowFile(self.folder, self.kind["row"].itemsize)
        fresh.folder, fresh.number, fresh.first = self.path.parent, self.number + 1, len(self) - len(wanted)
        with disk(str(fresh.path)), suppress(FileNotFoundError):
            os.unlink(fresh.path)  # noqa: PTH108  # of a process that died before its checkpoint
        for at in range(0, len(wanted), _CHUNK):
            some = wanted[at : at + _CHUNK]
            fresh.append([self.slots[number - self.first] for number in some], self.rows(some))
        self.number, self.first, self.digest, self.cut = fresh.number, fresh.first, fresh.digest, False
        self.slots, self.before, self.newest, self._mapped = fresh.slots, fresh.before, fresh.newest, None

    def opened(self, number: int, records: int, sha256: str) -> None:
        """Takes what a checkpoint names; an error if it is not all there."""
        self.number = number
        size = self.path.stat().st_size
        if size < records * self.kind.itemsize:
            raise ValueError(f"{self.path.name} has {size} bytes, {records} rows take {records * self.kind.itemsize}")
        self.digest = self.hashed(records)
        if self.digest.hexdigest() != sha256:
            raise ValueError(f"checksum of {self.path.name} differs")
        self._note(self._content(records)["slot"].tolist())
        self.cut = size > records * self.kind.itemsize

    def hashed(self, end: int) -> Any:
        """SHA-256 of the records before a number."""
        content = self._content(end - self.first)
        return hashlib.sha256(content.view(np.uint8).data if len(content) else b"")

    def _content(self, records: int) -> NDArray[Any]:
        return np.memmap(self.path, self.kind, "r", shape=(records,)) if records else np.zeros(0, self.kind)


ReadChange = Callable[["DiskStore", Sequence[Slot], Tensors], Tensors]
"""(store, slots, their rows as written) -> the rows as they are read"""


class DiskStore(ClientStore):
    """A version of a file of rows."""

    def __init__(self, first: Tensors, clients: int) -> None:
        first = dict(sorted(first.items()))  # rows lie in this order; a checkpoint gives names back in another
        self.first = tensors.apply(lambda t: t.contiguous(), first)
        """[B, ...], what clients have who never took part"""
        self.like = tensors.gather(first, 0)
        self.axes = clients, len(next(iter(first.values())))
        self.device = next(iter(first.values())).device
        sizes = [tensors.count_bytes({name: value}) for name, value in self.like.items()]
        self._ends = np.cumsum(sizes).tolist()
        self.file = RowFile(None, self._ends[-1])
        self.end = len(self.file)
        self._last: list[Tensor] = []
        self._change: ReadChange | None = None

    def __repr__(self) -> str:
        return f"DiskStore({self.shapes}, {self.end - self.file.first} rows)"

    def place(self, folder: Path) -> None:
        self.file.place(folder)

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if (size := self.axes[0] * tensors.count_bytes({name: self.first[name]})) > _LARGEST:
            raise HardyError(
                f"{name} of all {self.axes[0]:,} clients takes {size / 2**30:.1f} GiB; at most {_LARGEST / 2**30:g} "
                "are put into memory at once. Look at some clients: run.engine.store.read(slots)."
            )
        whole = self.first[name].expand(shape).clone()
        held = range(shape[0] * shape[1]) if self._change else sorted(self.file.newest)
        for at in range(0, len(held), _CHUNK):
            some = list(held[at : at + _CHUNK])
            rows = self.read([Slot(*divmod(number, shape[1])) for number in some])
            whole.flatten(0, 1)[torch.tensor(some, device=self.device)] = rows[name]
        return whole

    def read(self, slots: Sequence[Slot]) -> Tensors:
        rows = self.stored(slots)
        return self._change(self, slots, rows) if self._change else rows

    def held(self) -> Iterator[Slot]:
        return (Slot(*divmod(number, self.axes[1])) for number in reversed(list(self.heard_last())))

    def changed_by(self, change: ReadChange) -> "DiskStore":
        """The same rows, changed as they are read."""
        other = copy(self)
        other._change = change
        return other

    def heard_last(self) -> Iterator[int]:
        """The slots that were written to, the last one first."""
        file = self.file
        for at in range(self.end - 1, file.first - 1, -1):
            slot = file.slots[at - file.first]
            if file.find(slot, self.end) == at:
                yield slot

    def stored(self, slots: Sequence[Slot]) -> Tensors:
        found = [self.file.find(self._number(slot), self.end) for slot in slots]
        rows = tensors.gather(self.first, tensors.send([slot.base for slot in slots], self.device))
        if held := [at for at, number in enumerate(found) if number >= 0]:
            raw, where = self.file.rows([found[at] for at in held]), torch.tensor(held, device=self.device)
            for (name, like), begin, end in zip(self.like.items(), [0, *self._ends], self._ends, strict=False):
                value = torch.from_numpy(raw[:, begin:end].copy()).view(like.dtype).view(len(held), *like.shape)
                rows[name][where] = value.to(self.device)
        return rows

    def write(self, slots: Sequence[Slot], rows: Tensors, mask: Tensor | None = None) -> None:
        if mask is not None and not bool(mask.all()):
            kept = mask.nonzero().flatten()
            slots, rows = [slots[at] for at in kept.tolist()], tensors.gather(rows, kept)
        if not slots:
            return
        if rows.keys() < self.like.keys():
            rows = {**self.stored(slots), **rows}
        raw = [rows[name].detach().cpu().contiguous().view(len(slots), -1).view(torch.uint8) for name in self.like]
        self.file.cut_off(self.end)
        self.file.append([self._number(slot) for slot in slots], torch.cat(raw, 1).numpy())
        self.end, self._last = len(self.file), list(rows.values())

    def written(self, slots: Sequence[Slot], rows: Tensors) -> "DiskStore":
        after = copy(self)
        after.write(slots, rows)
        return after

    def changed(self) -> Iterable[Tensor]:
        return self._last

    def snapshot(self) -> Snapshot:
        return Snapshot(copy(self))

    def saved(self) -> tuple[Tensors, dict[str, Any]]:
        file, newest = self.file, self.end == len(self.file)
        if newest and len(file.slots) > 2 * len(file.newest) + _SPARE:
            file.compact()
        records = self.end - file.first
        if records:
            with disk(str(file.path)):
                sync_file(file.path)
        digest = file.digest if newest else file.hashed(self.end)
        return self.first, {
            "clients": self.axes[0],
            "number": file.number,
            "records": records,
            "sha256": digest.hexdigest(),
        }

    @staticmethod
    def opened(folder: Path, first: Tensors, record: Mapping[str, Any]) -> "DiskStore":
        """What `saved` named; an error if it is not all there."""
        store = DiskStore(first, int(record["clients"]))
        store.file.folder = folder
        if record["records"]:
            store.file.opened(int(record["number"]), int(record["records"]), record["sha256"])
        store.file.number, store.end = int(record["number"]), len(store.file)
        return store

    def cast(self, function: Callable[[Mapping[str, Tensor]], Tensors]) -> "DiskStore":
        other = copy(self)
        other.first = function(self.first)
        other.device = next(iter(other.first.values())).device
        return other

    def only(self, names: Collection[str]) -> "DiskStore":
        return self

    def first_rows(self) -> Tensors:
        return tensors.apply(lambda t: t[None], self.first)

    def begun(self, first: Tensors) -> "DiskStore":
        assert not self.end, "somebody took part already"
        other = copy(self)
        other.first = tensors.apply(lambda t: t[0].contiguous(), dict(sorted(first.items())))
        return other

    def _number(self, slot: Slot) -> int:
        return slot.client * self.axes[1] + slot.base
