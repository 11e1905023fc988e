"""Several runs side by side."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from hardy.core.files import write_atomic
from hardy.errors import HardyError
from hardy.report.chart import COLOURS, percent
from hardy.report.differences import Difference, Row, difference, unlike
from hardy.report.page import figure, page, section, table
from hardy.report.plots import Series, lines
from hardy.report.stored_run import StoredRun, number, read_run, seed_folders


def _mean_and_std(objects: Sequence[Any], *keys: str) -> tuple[float, float] | None:
    """Over the objects that hold a number there, or None; the sample deviation, 0 for a single one."""
    found = [value for one in objects if (value := number(one, *keys)) is not None]
    return (mean(found), stdev(found) if len(found) > 1 else 0.0) if found else None


@dataclass(frozen=True, kw_only=True)
class Column:
    """A number of the summary: where it is, how it is printed, whether more (1) or less (-1) is better. An exact one
    has no noise: any difference counts that is seen."""

    title: str
    keys: tuple[str, ...]
    scale: float
    digits: int
    better: int
    exact: bool = False


Cells = list[list[str]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rows and columns; str() is what `hardy compare` prints. In a column `*` marks the best and those that cannot be
    told from it, if some row is worse beyond chance."""

    rows: list[Row]
    columns: list[Column]

    def head(self) -> list[str]:
        return ["run", "method", "rounds", *(column.title for column in self.columns)]

    def cells(self) -> Cells:
        """The printed table without its head."""
        marked = [self._marked(column) for column in self.columns]
        return [
            [row.title, row.told("method"), row.told("rounds"), *(column[at] for column in marked)]
            for at, row in enumerate(self.rows)
        ]

    def _marked(self, column: Column) -> list[str]:
        pairs = [_mean_and_std([run.summary for run in row.runs], *column.keys) for row in self.rows]
        best = self._best(column, [pair and pair[0] for pair in pairs])
        cells = []
        for at, (row, pair) in enumerate(zip(self.rows, pairs, strict=True)):
            if pair is None:
                cells.append("–")
                continue
            value, spread = (f"{one * column.scale:.{column.digits}f}" for one in pair)
            cells.append(value + (f" ± {spread}" if len(row.runs) > 1 else "") + (" *" if at in best else ""))
        return cells

    def _best(self, column: Column, values: Sequence[float | None]) -> set[int]:
        """The rows to mark."""
        known = {at: value for at, value in enumerate(values) if value is not None}
        if not known:
            return set()
        first = max(known, key=lambda at: column.better * known[at])
        if column.exact:
            seen = {at: round(value * column.scale, column.digits) for at, value in known.items()}
            tied = {at for at in known if seen[at] == seen[first]}
            return tied if len(tied) < len(known) else set()
        found = {at: difference(self.rows[first], self.rows[at], column.keys) for at in known if at != first}
        tied = {at for at, one in found.items() if one is not None and not one.beyond_chance}
        worse = any(one is not None and one.beyond_chance for one in found.values())
        return {first, *tied} if worse else set()

    @property
    def accuracies(self) -> list[Column]:
        """The columns of accuracies."""
        return [column for column in self.columns if column.scale == 100]

    def difference_cells(self) -> Cells:
        """The rows after the first minus the first, ± standard error, with a head; empty where nothing is paired."""
        columns, lines = self.accuracies, []
        for row in self.rows[1:]:
            found = [difference(row, self.rows[0], column.keys) for column in columns]
            pairs = dict.fromkeys(f"{one.pairs} {one.over}" for one in found if one)
            if pairs:
                lines.append([row.title, ", ".join(pairs), *map(_difference_cell, found)])
        head = [f"minus {self.rows[0].name}", "pairs", *(column.title for column in columns)]
        return [head, *lines] if lines else []

    def __str__(self) -> str:
        differences = self.difference_cells()
        blocks = [
            aligned([self.head(), *self.cells()], words=2),
            aligned(differences, words=2) if differences else "",
            "\n".join(unlike(self.rows)),
        ]
        return "\n\n".join(block for block in blocks if block)


def _difference_cell(found: Difference | None) -> str:
    if found is None:
        return "–"
    return f"{100 * found.mean:+.1f} ± {100 * found.error:.1f}{' *' if found.beyond_chance else ''}"


def aligned(lines: Cells, words: int) -> str:
    """Words to the left, numbers to the right; a mark hangs behind its number, so that numbers stay in line."""
    wide = [max(len(line[at].removesuffix(" *")) for line in lines) for at in range(len(lines[0]))]
    text = []
    for line in lines:
        left = [cell.ljust(width) for cell, width in zip(line[:words], wide[:words], strict=True)]
        right = [
            cell.removesuffix(" *").rjust(width) + (" *" if cell.endswith(" *") else "  ")
            for cell, width in zip(line[words:], wide[words:], strict=True)
        ]
        text.append("  ".join([*left, *right]).rstrip())
    return "\n".join(text)


def accuracy_cell(row: Row, keys: Sequence[str]) -> str:
    """An accuracy in % with its standard error, where it is known: over the seeds, or of the test images of one run."""
    found = [value for run in row.runs if (value := number(run.summary, *keys)) is not None]
    if not found:
        return "–"
    error = stdev(found) / math.sqrt(len(found)) if len(found) > 1 else None
    if len(row.runs) == 1 and keys[-1] == "mean":
        error = number(row.runs[0].summary, *keys[:-1], "standard_error")
    return f"{100 * mean(found):.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def _row(path: Path, name: str) -> Row:
    folders = list(seed_folders(path).values()) or [path]
    finished = [folder for folder in folders if (folder / "summary.json").exists()]
    return Row(name=name, runs=[read_run(folder) for folder in finished or folders], planned=len(folders))


def compare(folders: Sequence[Path]) -> Comparison:
    """A row for each folder; one of several seeds gives mean ± sample standard deviation."""
    if not folders:
        raise HardyError("no run folder to compare (0 given). Name at least one.")
    twice = {name for name, count in Counter(path.resolve().name for path in folders).items() if count > 1}
    rows = [_row(path, str(path) if path.resolve().name in twice else path.resolve().name) for path in folders]
    threats = dict.fromkeys(
        name for row in rows for run in row.runs for name in run.summary.get("robust_accuracy") or {}
    )
    macs = max(number(run.summary, "macs") or 0.0 for row in rows for run in row.runs)
    prefix, unit = next(((p, u) for p, u in (("P", 1e15), ("T", 1e12), ("G", 1e9)) if macs >= u), ("M", 1e6))
    accuracies = {
        "mean %": ("standard_accuracy", "mean"),
        "worst client %": ("standard_accuracy", "worst_client"),
        **{f"{name} %": ("robust_accuracy", name, "mean") for name in threats},
        **{
            f"{', '.join(filter(None, [domain, threat]))}, held out %": (*place, "held_out", domain)
            for row in rows
            for run in row.runs
            for threat, place in {
                "": ("standard_accuracy",),
                **{name: ("robust_accuracy", name) for name in run.summary.get("robust_accuracy") or {}},
            }.items()
            for domain in _below(run.summary, *place).get("held_out") or {}
        },
        **{
            f"certified at L2 {radius}, {name} %": ("certified_accuracy", name, "radii", radius, "mean")
            for row in rows
            for run in row.runs
            for name, found in (run.summary.get("certified_accuracy") or {}).items()
            for radius in found["radii"]
        },
    }
    columns = [
        *(Column(title=title, keys=keys, scale=100, digits=1, better=1) for title, keys in accuracies.items()),
        *_metric_columns([run.summary for row in rows for run in row.runs]),
        Column(title="seconds", keys=("seconds",), scale=1, digits=1, better=-1),
        Column(title="MB up", keys=("bytes_up",), scale=1e-6, digits=2, better=-1, exact=True),
        Column(title=f"{prefix}MACs", keys=("macs",), scale=1 / unit, digits=2, better=-1, exact=True),
    ]
    return Comparison(rows=rows, columns=columns)


def _below(summary: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The table at a place of a summary; {} where there is none."""
    for key in keys:
        summary = summary.get(key) or {}
    return summary


def _metric_columns(summaries: Sequence[dict[str, Any]]) -> list[Column]:
    """A column for each metric, clean and under each threat."""
    found: dict[str, Column] = {}
    for summary in summaries:
        places: dict[tuple[str, ...], dict[str, Any]] = {("metrics",): summary.get("metrics") or {}}
        for threat, metrics in (summary.get("robust_metrics") or {}).items():
            places["robust_metrics", threat] = metrics
        for place, metrics in places.items():
            for name, figures in metrics.items():
                title = ", ".join([name, *place[1:]])
                better = -1 if figures.get("better") == "lower" else 1
                found[title] = Column(title=title, keys=(*place, name, "mean"), scale=1, digits=3, better=better)
    return sorted(found.values(), key=lambda column: len(column.keys))  # clean ones first


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


_MARKED = "Bold: the best of its column and those that cannot be told from it, if some row is worse beyond chance."
_DIFFERENCES = "Differences ± standard error of the pairs; bold: beyond the 95 % interval of Student's t."


def _html_cell(cell: str) -> str:
    return f'<span class="best">{escape(cell[:-2])}</span>' if cell.endswith(" *") else escape(cell)


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    """The table of `compare` and its curves, over rounds, bytes sent up and radii of attacks, as one HTML file."""
    compared = compare(folders)
    cells = [
        [f'<span class="key c{at % COLOURS}"></span>{escape(row[0])}', *map(_html_cell, row[1:])]
        for at, row in enumerate(compared.cells())
    ]
    title = f"{len(cells)} runs compared" if len(cells) > 1 else "One run"
    seeds = " ± and shaded bands: one standard deviation over the seeds."
    note = _MARKED + (seeds if any(len(row.runs) > 1 for row in compared.rows) else "")
    head, *differences = compared.difference_cells() or [[]]
    body = (
        f"<h1>{title}</h1>",
        table(compared.head(), cells, words=2),
        f'<p class="note">{note}</p>',
        *(f'<p class="note">{escape(line)}</p>' for line in unlike(compared.rows)),
        table(head, [[*map(_html_cell, row)] for row in differences], words=2) if differences else "",
        f'<p class="note">{_DIFFERENCES}</p>' if differences else "",
        _accuracy_curves(compared.rows),
        _attack_curves(compared.rows),
    )
    write_atomic(out, page(title, *body).encode())
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
    unseen = dict.fromkeys(d for accuracy in accuracies for d in (accuracy or {}).get("held_out") or {})
    outer = {domain: _mean_and_std(accuracies, "held_out", domain) for domain in unseen}
    if outer:
        found["held_out"] = {domain: pair[0] for domain, pair in outer.items() if pair}
        found["held_out_std"] = {domain: pair[1] for domain, pair in outer.items() if pair}
    return found


def seeds_summary(folders: Sequence[Path]) -> dict[str, Any]:
    """Mean and sample standard deviation (0 for one run) of the accuracies over the seeds of one experiment.

    {"runs": n,
     "standard_accuracy": {"mean": m, "mean_std": s, "worst_client": m, "worst_client_std": s,
                           "by_domain": {domain: m}, "by_domain_std": {domain: s}},
     "robust_accuracy": {threat: the same shape},
     "metrics": {metric: the same shape}, "robust_metrics": {threat: {metric: the same shape}}}
    A value that only some runs have is taken over those that have it; one that none has is left out.
    """
    return over_seeds([read_run(folder).summary for folder in folders])


def over_seeds(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The same over summaries or evaluations."""
    attacked = [one.get("robust_metrics") or {} for one in found]
    return {
        "runs": len(found),
        "standard_accuracy": _over([one.get("standard_accuracy") for one in found]),
        "robust_accuracy": _each_over([one.get("robust_accuracy") for one in found]),
        "metrics": _each_over([one.get("metrics") for one in found]),
        "robust_metrics": {
            threat: _each_over([metrics.get(threat) for metrics in attacked])
            for threat in dict.fromkeys(threat for metrics in attacked for threat in metrics)
        },
    }


def _each_over(found: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """The same by name."""
    named = [one or {} for one in found]
    return {key: _over([one.get(key) for one in named]) for key in dict.fromkeys(key for one in named for key in one)}
