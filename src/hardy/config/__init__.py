"""Experiments as TOML: a tree of dataclasses, checked key by key. An unknown key is an error with the nearest name."""

from hardy.config.experiment import (
    FROM_PYTHON,
    CheckpointChoice,
    DataChoice,
    EvaluationChoice,
    Experiment,
    NetworkChoice,
)
from hardy.config.reading import bundled, changed, method, parse, read
from hardy.config.values import Table, construct, convert, named
from hardy.config.writing import differing_keys, dump, to_table
from hardy.registry import PARTS

__all__ = [
    "FROM_PYTHON",
    "PARTS",
    "CheckpointChoice",
    "DataChoice",
    "EvaluationChoice",
    "Experiment",
    "NetworkChoice",
    "Table",
    "bundled",
    "changed",
    "construct",
    "convert",
    "differing_keys",
    "dump",
    "method",
    "named",
    "parse",
    "read",
    "to_table",
]
