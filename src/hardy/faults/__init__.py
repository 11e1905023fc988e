"""Clients that fail, and clients that lie."""

from hardy.faults import byzantine

__all__ = ["byzantine"]
