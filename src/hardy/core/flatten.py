"""Nested figures as one flat row."""

import math
from typing import Any


def flat_row(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl by their path, such as "standard_accuracy/by_domain/pen".

    Lists (clients, slots) are left out; lost replies are counted, and bytes on the wire added up over clients.

    >>> flat_row({"round": 3, "loss": None, "standard_accuracy": {"mean": 0.5, "by_client": [0.4, 0.6]}, "lost": {}})
    {'round': 3, 'standard_accuracy/mean': 0.5, 'lost': 0}
    """
    row: dict[str, float] = {}
    for key, value in line.items():
        if key == "lost":
            row[key] = len(value)
        elif key == "wire":
            for way in ("down", "up"):
                row[f"wire/{way}"] = sum(counts[way] for counts in value.values())
        else:
            _flatten(key, value, row)
    return row


def _flatten(path: str, value: Any, row: dict[str, float]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(f"{path}/{key}", inner, row)
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        row[path] = value
