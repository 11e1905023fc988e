"""A browser for the tests of pages."""

from browser import browser  # noqa: F401  (a fixture)
