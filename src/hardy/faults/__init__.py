"""Clients that fail, and hostile clients."""

from hardy.faults import backdoors, byzantine, searched

__all__ = ["backdoors", "byzantine", "searched"]
