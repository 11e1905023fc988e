"""The version of the package, in one place: pyproject.toml reads it from here."""

VERSION = "0.2.0.dev0"
