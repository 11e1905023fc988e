"""What the server remembers between two rounds."""

from dataclasses import dataclass, field

from hardy.core.describe import count
from hardy.core.store import ClientStore, as_store
from hardy.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """The server between two rounds. With the clients' private tensors it is all a checkpoint needs."""

    round: int
    """rounds done"""
    shared: Tensors
    """[B, ...]"""
    reported: ClientStore
    """[C, B, ...]"""
    memory: Tensors
    """the aggregator's"""
    lengths: Tensors = field(default_factory=dict)
    """how long replies were in the last rounds, for the gate: group of tensors -> [rounds]; always on the CPU"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reported", as_store(self.reported))

    def __repr__(self) -> str:
        held = {"shared": self.shared, "reported": self.reported, "memory": self.memory}
        return f"ServerState after round {self.round}: {'; '.join(f'{n} {count(v)}' for n, v in held.items() if v)}"
