"""Several runs side by side."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from hardy.core.files import disk
from hardy.errors import HardyError
from hardy.report.page import figure, page, section, table
from hardy.report.plots import COLOURS, Series, lines, percent
from hardy.report.stored_run import StoredRun, number, read_run


def _mean_and_std(objects: Sequence[Any], *keys: str) -> tuple[float, float] | None:
    """Over the objects that hold a number there, or None; the sample deviation, 0 for a single one."""
    found = [value for one in objects if (value := number(one, *keys)) is not None]
    return (mean(found), stdev(found) if len(found) > 1 else 0.0) if found else None


@dataclass(frozen=True, kw_only=True)
class Column:
    """A number of the summary: where it is, how it is printed, whether more (1) or less (-1) is better."""

    title: str
    keys: tuple[str, ...]
    scale: float
    digits: int
    better: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run, or the seeds of one."""

    name: str
    runs: list[StoredRun]

    def told(self, key: str) -> str:
        """What the runs say under this key, once."""
        return "/".join(dict.fromkeys(str(run.summary.get(key, "–")) for run in self.runs))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rows and columns; str() is a table to print, in which * marks the best of each column."""

    rows: list[Row]
    columns: list[Column]

    def head(self) -> list[str]:
        return ["run", "method", "rounds", *(column.title for column in self.columns)]

    def cells(self) -> list[list[str]]:
        """The printed table without its head."""
        marked = [self._marked(column) for column in self.columns]
        names = [row.name if len(row.runs) == 1 else f"{row.name} ({len(row.runs)} seeds)" for row in self.rows]
        return [
            [name, row.told("method"), row.told("rounds"), *(column[at] for column in marked)]
            for at, (name, row) in enumerate(zip(names, self.rows, strict=True))
        ]

    def _marked(self, column: Column) -> list[str]:
        """One column; equal as printed is equally good, and the best of one is no news."""
        pairs = [_mean_and_std([run.summary for run in row.runs], *column.keys) for row in self.rows]
        printed = [pair and round(pair[0] * column.scale, column.digits) for pair in pairs]
        ranked = [column.better * value for value in printed if value is not None]
        cells = []
        for row, pair, value in zip(self.rows, pairs, printed, strict=True):
            if pair is None or value is None:
                cells.append("–")
                continue
            spread = f" ± {pair[1] * column.scale:.{column.digits}f}" if len(row.runs) > 1 else ""
            best = len(ranked) > 1 and column.better * value == max(ranked)
            cells.append(f"{value:.{column.digits}f}{spread}{' *' if best else ''}")
        return cells

    def __str__(self) -> str:
        lines = [self.head(), *self.cells()]
        # the mark hangs to the right of the number, so that numbers stay in line
        wide = [max(len(line[at].removesuffix(" *")) for line in lines) for at in range(len(lines[0]))]
        text = []
        for line in lines:
            left = [cell.ljust(width) for cell, width in zip(line[:2], wide[:2], strict=True)]
            right = [
                cell.removesuffix(" *").rjust(width) + (" *" if cell.endswith(" *") else "  ")
                for cell, width in zip(line[2:], wide[2:], strict=True)
            ]
            text.append("  ".join([*left, *right]).rstrip())
        return "\n".join(text)


def _seeds(folder: Path) -> list[Path]:
    """The run folders of a folder: its seed-* folders, or itself."""
    return sorted(path for path in folder.glob("seed-*") if path.is_dir()) or [folder]


def compare(folders: Sequence[Path]) -> Comparison:
    """A row for each folder; one that holds seed-* folders gives mean ± sample standard deviation."""
    if not folders:
        raise HardyError("no run folder to compare (0 given). Name at least one.")
    twice = {name for name, count in Counter(path.resolve().name for path in folders).items() if count > 1}
    rows = [
        Row(
            name=str(path) if path.resolve().name in twice else path.resolve().name,
            runs=[read_run(part) for part in _seeds(path)],
        )
        for path in folders
    ]
    threats = dict.fromkeys(
        name for row in rows for run in row.runs for name in run.summary.get("robust_accuracy") or {}
    )
    macs = max(number(run.summary, "macs") or 0.0 for row in rows for run in row.runs)
    prefix, unit = next(((p, u) for p, u in (("P", 1e15), ("T", 1e12), ("G", 1e9)) if macs >= u), ("M", 1e6))
    accuracies = {
        "mean %": ("standard_accuracy", "mean"),
        "worst client %": ("standard_accuracy", "worst_client"),
        **{f"{name} %": ("robust_accuracy", name, "mean") for name in threats},
    }
    columns = [
        *(Column(title=title, keys=keys, scale=100, digits=1, better=1) for title, keys in accuracies.items()),
        Column(title="seconds", keys=("seconds",), scale=1, digits=1, better=-1),
        Column(title="MB up", keys=("bytes_up",), scale=1e-6, digits=2, better=-1),
        Column(title=f"{prefix}MACs", keys=("macs",), scale=1 / unit, digits=2, better=-1),
    ]
    return Comparison(rows=rows, columns=columns)


def _curve(row: Row, along: Callable[[StoredRun], dict[float, float]]) -> Series:
    """Mean accuracy over the seeds at the rounds that all of them evaluated, with a band of one deviation."""
    curves = [dict(run.series("standard_accuracy", "mean")) for run in row.runs]
    axes = [along(run) for run in row.runs]
    shared = sorted(set.intersection(*(set(curve) & set(axis) for curve, axis in zip(curves, axes, strict=True))))
    points, band = [], []
    for at in shared:
        x, values = mean(axis[at] for axis in axes), [curve[at] for curve in curves]
        points.append((x, mean(values)))
        if len(values) > 1:
            spread = stdev(values)
            band.append((x, mean(values) - spread, mean(values) + spread))
    return Series(label=row.name, points=points, band=band)


def _swept(row: Row, curve: tuple[str, str]) -> Series:
    """Mean accuracy over the seeds along one setting of a threat."""
    found = [dict(run.sweeps().get(curve, [])) for run in row.runs]
    shared = sorted(set.intersection(*map(set, found)))
    return Series(label=row.name, points=[(at, mean(points[at] for points in found)) for at in shared])


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    """The table of `compare` and its curves, over rounds, bytes sent up and radii of attacks, as one HTML file."""
    compared = compare(folders)
    cells = [
        [
            f'<span class="key c{at % COLOURS}"></span>{escape(row[0])}',
            *(f'<span class="best">{escape(c[:-2])}</span>' if c.endswith(" *") else escape(c) for c in row[1:]),
        ]
        for at, row in enumerate(compared.cells())
    ]
    title = f"{len(cells)} runs compared" if len(cells) > 1 else "One run"
    seeds = " ± and shaded bands: one standard deviation over the seeds."
    note = "* best of its column." + (seeds if any(len(row.runs) > 1 for row in compared.rows) else "")
    body = (
        f"<h1>{title}</h1>",
        table(compared.head(), cells, words=2),
        f'<p class="note">{note}</p>',
        _accuracy_curves(compared.rows),
        _attack_curves(compared.rows),
    )
    with disk(str(out)):
        out.write_text(page(title, *body), "utf-8")
    return out


def _accuracy_curves(rows: Sequence[Row]) -> str:
    over_rounds = [_curve(row, lambda run: {line["round"]: line["round"] for line in run.rounds}) for row in rows]
    over_bytes = [_curve(row, lambda run: {at: sent / 1e6 for at, sent in run.cumulative("bytes_up")}) for row in rows]
    return section(
        "Mean accuracy",
        [
            figure("Over rounds", lines(over_rounds, title="Mean accuracy over rounds", y=percent)),
            figure(
                "Over bytes sent up",
                lines(
                    over_bytes,
                    title="Mean accuracy over bytes sent up",
                    y=percent,
                    x_name="MB",
                    x_step=0.0,
                ),
            ),
        ],
    )


def _attack_curves(rows: Sequence[Row]) -> str:
    curves = dict.fromkeys(curve for row in rows for run in row.runs for curve in run.sweeps())
    return section(
        "Mean accuracy under attacks and shifts",
        [
            figure(
                f"{threat}: against the {setting}",
                lines(
                    [_swept(row, (setting, threat)) for row in rows],
                    title=f"Mean accuracy against the {setting}",
                    y=percent,
                    x_name=setting,
                    x_step=0.0,
                ),
            )
            for setting, threat in curves
        ],
    )


def _over(accuracies: Sequence[Any]) -> dict[str, Any]:
    """Accuracy objects as one, with deviations."""
    domains = dict.fromkeys(d for accuracy in accuracies for d in (accuracy or {}).get("by_domain") or {})
    inner = {domain: _mean_and_std(accuracies, "by_domain", domain) for domain in domains}
    found: dict[str, Any] = {}
    for key in ("mean", "worst_client"):
        if pair := _mean_and_std(accuracies, key):
            found[key], found[f"{key}_std"] = pair
    found["by_domain"] = {domain: pair[0] for domain, pair in inner.items() if pair}
    found["by_domain_std"] = {domain: pair[1] for domain, pair in inner.items() if pair}
    return found


def seeds_summary(folders: Sequence[Path]) -> dict[str, Any]:
    """Mean and sample standard deviation (0 for one run) of the accuracies over the seeds of one experiment.

    {"runs": n,
     "standard_accuracy": {"mean": m, "mean_std": s, "worst_client": m, "worst_client_std": s,
                           "by_domain": {domain: m}, "by_domain_std": {domain: s}},
     "robust_accuracy": {threat: the same shape}}
    A value that only some runs have is taken over those that have it; one that none has is left out.
    """
    summaries = [read_run(folder).summary for folder in folders]
    robust = [summary.get("robust_accuracy") or {} for summary in summaries]
    return {
        "runs": len(summaries),
        "standard_accuracy": _over([summary.get("standard_accuracy") for summary in summaries]),
        "robust_accuracy": {
            threat: _over([accuracies.get(threat) for accuracies in robust])
            for threat in dict.fromkeys(threat for accuracies in robust for threat in accuracies)
        },
    }
