"""Data: where they come from, who holds which. Importing the package registers sources, splits, shifts, capacities."""

from hardy.data import array_sources, capacity, picture_sources, shifts, splits

__all__ = ["array_sources", "capacity", "picture_sources", "shifts", "splits"]
