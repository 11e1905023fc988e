"""Metrics besides accuracy: over rounds, and at the end by domain and threat."""

from html import escape
from typing import Any

from hardy.report.page import figure, section, shown, table
from hardy.report.plots import Series, lines
from hardy.report.stored_run import StoredRun, number


def metrics_section(run: StoredRun) -> str:
    names = dict.fromkeys(name for row in run.rounds for name in row.get("metrics") or {})
    return section("Metrics", [_curve(run, name) for name in names], _table(run))


def _curve(run: StoredRun, name: str) -> str:
    series = [
        Series(label="mean", points=run.series("metrics", name, "mean"), style="ink"),
        Series(label="worst client", points=run.series("metrics", name, "worst_client"), style="c1"),
        Series(label="validation", points=run.series("validation_metrics", name, "mean"), style="muted dashed"),
    ]
    return figure(f"{name} over rounds", lines(series, title=f"{name} over rounds"))


def _table(run: StoredRun) -> str:
    """Every metric of the summary, clean and under threats."""
    found: dict[str, Any] = dict(run.summary.get("metrics") or {})
    for threat, metrics in (run.summary.get("robust_metrics") or {}).items():
        found |= {f"{name}, {threat}": figures for name, figures in metrics.items()}
    domains = run.domains()
    cells = [
        [
            escape(name),
            *(shown(number(figures, key), "{:.3f}".format) for key in ("mean", "worst_client")),
            *(shown(number(figures, "by_domain", domain), "{:.3f}".format) for domain in domains),
            escape(str(figures.get("better", "–"))),
            str(len(figures.get("missing") or [])),
        ]
        for name, figures in found.items()
    ]
    return table(["metric", "mean", "worst client", *domains, "better", "clients without a figure"], cells)
