"""What each width and robustness costs and scores (Split-Mix)."""

from collections.abc import Sequence
from typing import Any

from hardy.report.chart import COLOURS, Format, percent, plain, si
from hardy.report.page import figure, section, shown, table
from hardy.report.plots import Bar, Dots, Series, bars, lines, strip
from hardy.report.stored_run import StoredRun, number


def customising_section(run: StoredRun) -> str:
    """What every width and robustness costs and scores, and what training cost clients of unlike capacity."""
    found: list[dict[str, Any]] = run.settings.get("settings") or []
    if len(found) < 2 and len({row["capacity"] for row in run.settings.get("clients") or []}) < 2:
        return ""  # one network for all
    threats = list(found[0]["robust_accuracy"]) if found else []
    levels, widths = ([*dict.fromkeys(row[key] for row in found)] for key in ("robustness", "width"))

    def frontier(level: float | None) -> list[tuple[float, float]]:
        rows = [row for row in found if row["robustness"] == level]
        return sorted((row["macs"], mean) for row in rows if (mean := number(row, "standard_accuracy", "mean")))

    drawn = [
        figure(
            "Accuracy against multiply-accumulates of an image",
            lines(
                [Series(label="" if level is None else f"λ = {level:g}", points=frontier(level)) for level in levels],
                title="Accuracy against MACs",
                y=percent,
                x_name="MACs",
                x_step=0.0,
            )
            if len(widths) > 1
            else "",
            "A point is a width.",
        )
    ]
    for threat in threats if len(levels) > 1 else ():
        curves = [
            Series(
                label=f"×{width:g}",
                points=sorted(
                    (100 * row["standard_accuracy"]["mean"], row["robust_accuracy"][threat]["mean"])
                    for row in found
                    if row["width"] == width
                ),
            )
            for width in widths
        ]
        title = f"Accuracy under {threat} against standard accuracy"
        drawing = lines(curves, title=title, y=percent, x_name="standard accuracy, %", x_step=0.0)
        drawn.append(figure(title, drawing, "A point is a robustness λ."))
    cells = [
        [
            f"×{row['width']:g}",
            "–" if row["robustness"] is None else f"{row['robustness']:g}",
            plain(row["bases"]),
            si(row["macs"]),
            si(row["parameters"]),
            si(row["bytes"], "B"),
            shown(number(row, "standard_accuracy", "mean")),
            *(shown(number(row, "robust_accuracy", threat, "mean")) for threat in threats),
        ]
        for row in found
    ]
    head = ["width", "robustness", "bases", "MACs", "parameters", "memory", "standard", *threats]
    return section("Width and robustness", [*drawn, *_client_costs(run)], table(head, cells, words=0))


def _client_costs(run: StoredRun) -> list[str]:
    """Accuracy and costs of a round by capacity, and the share of all parameters that a domain's clients trained."""
    costs: list[dict[str, Any]] = run.settings.get("clients") or []
    scores = (run.summary.get("standard_accuracy") or {}).get("by_client") or [None] * len(costs)
    capacities = sorted({row["capacity"] for row in costs})

    def dots(form: Format, values: Sequence[float | None]) -> list[Dots]:
        held = zip(range(len(costs)), costs, values, strict=False)
        named = [(row["capacity"], v, f"client {n}: {form(v)}") for n, row, v in held if v is not None]
        return [
            Dots(label=f"can train ×{c:g}", values=[(v, what) for own, v, what in named if own == c], style=f"c{at}")
            for at, c in enumerate(capacities[:COLOURS])
        ]

    trained = [Bar(label=name, value=share) for name, share in (run.settings.get("trained") or {}).items()]
    drawings = {
        "Accuracy by capacity": strip(dots(percent, scores), title="Accuracy by capacity"),
        "MACs of a round by capacity": strip(dots(si, [r["macs"] for r in costs]), title="MACs of a round", x=si),
        "Parameters a round by capacity": strip(dots(si, [r["parameters"] for r in costs]), title="Parameters", x=si),
        "Share of all parameters trained in a domain": bars(trained, title="Share of parameters trained"),
    }
    return [figure(title, drawing) for title, drawing in drawings.items()]
