"""What the server remembers between two rounds."""

from dataclasses import dataclass

from hardy.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """The server between two rounds. With the clients' private tensors it is all a checkpoint needs."""

    round: int
    """rounds done"""
    shared: Tensors
    """[B, ...]"""
    reported: Tensors
    """[C, B, ...]"""
    memory: Tensors
    """the aggregator's"""
