"""Reading what a run left in its folder."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardy.errors import HardyError

Point = tuple[float, float]
SWEPT = {
    "epsilon": "radius × 255",
    "rotation_radius": "‖Λ − I‖",
    "shift_radius": "‖δ‖",
    "strength": "strength of the shift",
}
"""settings of an attack that make a curve, as they are called in reports"""


def number(value: Any, *keys: str) -> float | None:
    """The finite number under these keys, or None: missing, null and NaN are one case for every reader."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and math.isfinite(value) else None


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """One finished run. `rounds` holds the lines of metrics.jsonl in order, one a round."""

    folder: Path
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    config: str
    evaluation: dict[str, Any]
    """what `hardy evaluate` found; empty if it was not asked"""
    projections: dict[str, Any]
    """norms and representations as points in a plane"""
    settings: dict[str, Any]
    """what widths and robustness cost and score, and what training cost the clients"""

    def series(self, *keys: str) -> list[Point]:
        """(round, value) wherever the value is a number."""
        found = ((row["round"], number(row, *keys)) for row in self.rounds)
        return [(at, value) for at, value in found if value is not None]

    def cumulative(self, key: str) -> list[Point]:
        """(round, sum so far)."""
        total, points = 0.0, []
        for at, value in self.series(key):
            total += value
            points.append((at, total))
        return points

    def sweeps(self) -> dict[tuple[str, str], list[Point]]:
        """Accuracy against each setting that was varied with the others held: {(setting, threat): points}."""
        found: dict[tuple[str, str], dict[float, float]] = {}
        for name, figures in (self.evaluation.get("robust_accuracy") or {}).items():
            attack, mean = figures.get("attack") or {}, number(figures, "mean")
            if mean is None:
                continue
            given = {key: value for key in SWEPT if (value := number(attack, key)) is not None}
            l2 = attack.get("ball") == "l2"
            for key, value in given.items():
                held = (f", {SWEPT[other]} {given[other]:g}" for other in given if other != key)
                setting = "L2 radius" if l2 and key == "epsilon" else SWEPT[key]
                points = found.setdefault((setting, name.partition("@")[0] + "".join(held)), {})
                if len(given) == 1 and (clean := number(self.evaluation, "standard_accuracy", "mean")) is not None:
                    points[0.0] = clean
                points[value * (255 if setting == "radius × 255" else 1)] = mean
        return {key: sorted(points.items()) for key, points in found.items() if len(points.keys() - {0.0}) > 1}

    def over_time(self, *keys: str) -> list[Point]:
        """(seconds so far, value) wherever the value is a number."""
        seconds = dict(self.cumulative("seconds"))
        return [(seconds[at], value) for at, value in self.series(*keys) if at in seconds]

    def domains(self) -> list[str]:
        """Domain names in the order of the clients, then any that only the summary knows."""
        known = (self.summary.get("standard_accuracy") or {}).get("by_domain") or {}
        return list(dict.fromkeys([*(str(c.get("domain", "")) for c in self.clients), *known]))


def _json(path: Path, kind: type) -> Any:
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise HardyError(f"{path} is not valid JSON ({error}). Run the experiment again to write it anew.") from None
    if not isinstance(value, kind):
        raise HardyError(
            f"{path} holds a JSON {type(value).__name__}, not a {kind.__name__}. Run the experiment again."
        )
    return value


def _metrics(path: Path) -> list[dict[str, Any]]:
    """The lines by round. A resumed run may repeat a round: the last line counts."""
    lines = path.read_text("utf-8", errors="replace").splitlines() if path.exists() else []
    rounds: dict[float, dict[str, Any]] = {}
    for at, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rounds[int(row["round"])] = row
        except (ValueError, KeyError, TypeError):
            if at < len(lines):  # a torn last line is what a killed run leaves
                raise HardyError(
                    f"{path}, line {at} is not a JSON object with a round: {line[:60]!r}. Remove the line."
                ) from None
    return [rounds[at] for at in sorted(rounds)]


def _of_this_round(evaluation: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    """What `hardy evaluate` found, unless the run has gone on since."""
    measured, done = (evaluation.get("provenance") or {}).get("round"), summary.get("rounds")
    return evaluation if None in (measured, done) or measured == done else {}


def read_run(folder: Path) -> StoredRun:
    """The run in this folder; only summary.json must be there."""
    if not (folder / "summary.json").exists():
        raise HardyError(
            f"{folder / 'summary.json'} does not exist. Give the folder of a finished run (of several seeds: "
            "one of its seed-* folders), or let the run finish first."
        )
    clients, config, evaluation, projections, settings = (
        folder / name
        for name in ("clients.json", "config.toml", "evaluation.json", "projections.json", "settings.json")
    )
    summary = _json(folder / "summary.json", dict)
    return StoredRun(
        folder=folder,
        summary=summary,
        rounds=_metrics(folder / "metrics.jsonl"),
        clients=_json(clients, list) if clients.exists() else [],
        config=config.read_text("utf-8", errors="replace") if config.exists() else "",
        evaluation=_of_this_round(_json(evaluation, dict), summary) if evaluation.exists() else {},
        projections=_json(projections, dict) if projections.exists() else {},
        settings=_json(settings, dict) if settings.exists() else {},
    )
