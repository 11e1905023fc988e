"""Clients that fail, and hostile clients."""

from hardy.faults import byzantine

__all__ = ["byzantine"]
