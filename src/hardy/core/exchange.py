"""The norm's exchange of reported statistics between rounds: at once for all clients, or for each when it is asked.

In memory the exchange rewrites all clients' rows after a round. On disk a client's row is exchanged when it is read,
out of the same rows of the clients that give, so that a round costs cohort × givers and not clients × givers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature

import torch

from hardy.core import tensors
from hardy.core.disk_store import DiskStore
from hardy.core.federation import Client
from hardy.core.partition import Tag
from hardy.core.protocols import Givers, Norm, name_part
from hardy.core.state import ServerState
from hardy.core.store import ClientStore, MemoryStore, Slot
from hardy.core.tensors import Tensors
from hardy.errors import HardyError


@dataclass(frozen=True)
class Exchange:
    """What a norm does to the reported statistics of these clients."""

    norm: Norm
    tags: Mapping[str, Tag]
    clients: Sequence[Client]

    def after_round(self, written: ClientStore) -> ClientStore:
        """The reported tensors after a round's replies were written."""
        if not self.norm.exchanges or isinstance(written, DiskStore):
            return self.between_rounds(written)
        return MemoryStore(self.norm.exchange(dict(written), self.tags, self.clients))

    def between_rounds(self, reported: ClientStore) -> ClientStore:
        """The same, as they are read; those of a checkpoint too."""
        if not isinstance(reported, DiskStore) or not self.norm.exchanges:
            return reported
        return reported.changed_by(self._on_disk())

    def opened(self, state: ServerState) -> ServerState:
        """The state of a checkpoint."""
        return replace(state, reported=self.between_rounds(state.reported))

    def check(self, reported: ClientStore) -> None:
        """Refuses a norm that cannot exchange so."""
        if not self.norm.exchanges:
            return
        on_disk = isinstance(reported, DiskStore)
        if self.norm.most_givers is not None and not on_disk:
            raise HardyError(
                f"norm {name_part(self.norm)!r} names how many clients give at most ({self.norm.most_givers}), but the "
                'reported tensors lie in memory, where all give. Leave it out, or take engine.store = "disk".'
            )
        if on_disk and "givers" not in signature(self.norm.exchange).parameters:
            raise HardyError(
                f"norm {name_part(self.norm)!r} exchanges the statistics of all clients at once, and they lie on disk. "
                'Take engine.store = "memory", or give its `exchange` an argument `givers`.'
            )

    def _on_disk(self) -> "OnDisk":
        return OnDisk(self)


class OnDisk:
    """Exchanges the rows of slots that are read. The rows of those that give are read once for each round."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self._known = exchange, -1

    def __call__(self, store: DiskStore, slots: Sequence[Slot], rows: Tensors) -> Tensors:
        bases, norm = store.axes[1], self.exchange.norm
        if self._known != store.end:
            self._givers, self._known = self._read_givers(store), store.end
        if not self._givers.clients:
            return rows
        if bases == 1:
            asked = [slot.client for slot in slots]
            held = tensors.apply(lambda t: t[:, None], rows)
        else:
            asked = list(dict.fromkeys(slot.client for slot in slots))
            every = [Slot(client, base) for client in asked for base in range(bases)]
            held = tensors.apply(lambda t: t.view(len(asked), bases, *t.shape[1:]), store.stored(every))
        profiles = [self.exchange.clients[client] for client in asked]
        found = norm.exchange(held, self.exchange.tags, profiles, self._givers)
        at = {client: number for number, client in enumerate(asked)}
        index = torch.tensor([at[slot.client] * bases + slot.base for slot in slots], device=store.device)
        return tensors.apply(lambda t: t.flatten(0, 1)[index], found)

    def _read_givers(self, store: DiskStore) -> Givers:
        """The clients that give, those heard last first, and their rows as they reported them."""
        clients, norm = self.exchange.clients, self.exchange.norm
        most = norm.most_givers or len(clients)
        found = list[int]()
        for slot in store.heard_last():
            client = slot // store.axes[1]
            if client not in found[-1:] and norm.gives(clients[client]):
                found.append(client)
            if len(found) == most:
                break
        every = [Slot(client, base) for client in found for base in range(store.axes[1])]
        if not every:
            return Givers({}, [])
        rows = store.stored(every)
        reported = tensors.apply(lambda t: t.view(len(found), store.axes[1], *t.shape[1:]), rows)
        return Givers(reported, [clients[client] for client in found])
