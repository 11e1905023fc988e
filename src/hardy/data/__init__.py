"""Data: where they come from, who holds which. Importing the package registers its parts."""

from hardy.data import array_sources, augmentation, capacity, picture_sources, shifts, splits

__all__ = ["array_sources", "augmentation", "capacity", "picture_sources", "shifts", "splits"]
