"""Reading what a run left in its folder."""

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardy.core.json_files import read_json, read_sealed
from hardy.errors import HardyError, printable

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
    unfinished: bool = False
    """whether it still trains"""

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


def seed_folders(folder: Path) -> dict[int, Path]:
    """Seed -> run folder, in a folder of `--seeds`, those not begun too; empty for the folder of one run."""
    if (folder / "seeds.json").exists():
        found = read_json(folder / "seeds.json", dict, "Run the experiment again.").get("seeds")
        if not isinstance(found, list) or not found or not all(isinstance(seed, int) for seed in found):
            raise HardyError(f"{folder / 'seeds.json'} names no seeds ({found!r}). Run the experiment again.")
        return {seed: folder / f"seed-{seed}" for seed in found}
    begun = {path.name.removeprefix("seed-"): path for path in folder.glob("seed-*") if path.is_dir()}
    return {int(seed): begun[seed] for seed in sorted(begun, key=lambda seed: (len(seed), seed)) if seed.isdigit()}


def metrics_lines(content: bytes, path: Path) -> list[dict[str, Any]]:
    """The lines by round. A resumed run may repeat a round: the last line counts."""
    lines = content.decode("utf-8", errors="replace").splitlines()
    rounds: dict[float, dict[str, Any]] = {}
    for at, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rounds[int(row["round"])] = row
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            if at < len(lines):  # a torn last line is what a killed run leaves
                raise HardyError(
                    f"{path}, line {at} is not a JSON object with a round: {line[:60]!r}. Remove the line."
                ) from None
    if rounds and not 1 <= min(rounds) <= max(rounds) <= 1000 + 10 * len(rounds):  # drawings grow with the last round
        raise HardyError(
            f"{path} has {len(rounds)} lines, but rounds from {min(rounds)} to {max(rounds)}: no run writes that. "
            "Remove the lines that are wrong."
        )
    return [rounds[at] for at in sorted(rounds)]


@contextmanager
def refusing_odd_figures(folder: Path | str) -> Iterator[None]:
    """Files from outside may hold words where figures belong, or lists where objects do: one line says so."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise HardyError(
            f"{folder} holds figures that no run writes ({type(error).__name__}: {printable(error)}). Run the "
            "experiment again; if the folder is not yours, do not trust it."
        ) from error


def _checked(path: Path, summary: dict[str, Any]) -> bytes:
    """The content of a file that the summary answers for: of metrics.jsonl, for the lines up to its own round."""
    content = path.read_bytes() if path.exists() else b""
    known = summary.get("files_sha256")
    expected, judged = known.get(path.name) if isinstance(known, dict) else None, content
    if path.suffix == ".jsonl":
        judged = b"".join(line for line in content.splitlines(keepends=True) if _early(line, summary.get("rounds")))
    if expected is not None and hashlib.sha256(judged).hexdigest() != expected:
        raise HardyError(
            f"{path} was changed or damaged since the run finished: its checksum is not summary.json's. `hardy resume "
            f"{path.parent}` says what is wrong and writes the summary anew."
        )
    return content


def _early(line: bytes, rounds: Any) -> bool:
    try:
        return bool(json.loads(line)["round"] <= rounds)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _of_this_round(evaluation: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    """What `hardy evaluate` found, unless the run has gone on since."""
    measured, done = (evaluation.get("provenance") or {}).get("round"), summary.get("rounds")
    return evaluation if None in (measured, done) or measured == done else {}


def read_run(folder: Path, unfinished: dict[str, Any] | None = None) -> StoredRun:
    """The run in this folder; only summary.json must be there. `unfinished` is the summary of one that still trains: it
    stands in for the file, and what was measured of an earlier state is left out."""
    if unfinished is None and not (folder / "summary.json").exists():
        raise HardyError(
            f"{folder / 'summary.json'} does not exist. Give the folder of a finished run, or go on with "
            f"`hardy resume {folder}`."
        )
    again = f"`hardy resume {folder}` writes it anew."
    summary = read_sealed(folder / "summary.json", again) if unfinished is None else unfinished

    def optional(name: str) -> dict[str, Any]:
        path = folder / name
        there = unfinished is None and path.exists()
        return read_sealed(path, "Remove it, and evaluate the run again.") if there else {}

    config, clients = folder / "config.toml", folder / "clients.json"
    _checked(clients, summary)
    return StoredRun(
        folder=folder,
        summary=summary,
        rounds=metrics_lines(_checked(folder / "metrics.jsonl", summary), folder / "metrics.jsonl"),
        clients=read_json(clients, list, again) if clients.exists() else [],
        config=config.read_text("utf-8", errors="replace") if config.exists() else "",
        evaluation=_of_this_round(optional("evaluation.json"), summary),
        projections=optional("projections.json"),
        settings=optional("settings.json"),
        unfinished=unfinished is not None,
    )
