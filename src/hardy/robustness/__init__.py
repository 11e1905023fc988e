"""Attacks on networks, faults of clients, and how accuracy is measured under them."""

from hardy.robustness import affine, attacks, autoattack, lies

__all__ = ["affine", "attacks", "autoattack", "lies"]
