"""Attacks on networks, faults of clients, and how accuracy is measured under them."""

from hardy.robustness import attacks, autoattack, lies

__all__ = ["attacks", "autoattack", "lies"]
