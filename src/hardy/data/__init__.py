"""Data: where they come from and who holds which. Importing the package enters all sources."""

from hardy.data import array_sources, picture_sources

__all__ = ["array_sources", "picture_sources"]
