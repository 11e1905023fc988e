"""The sections that runs of one paper have: nothing is drawn where a run holds nothing of the kind."""

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from hardy.report.page import figure, section, shown, table
from hardy.report.plots import (
    COLOURS,
    Bar,
    Cloud,
    Dots,
    Format,
    Series,
    bars,
    heat,
    lines,
    percent,
    plain,
    scatter,
    si,
    strip,
)
from hardy.report.stored_run import Run, number


def convergence(run: Run) -> str:
    """How near a minimax method is to its saddle point, as `evaluation.diagnose` measured it (FedRobust)."""
    told = [row for row in run.rounds if "broken_conditions" in row]
    named = {
        "primal_gap": ("Primal gap", "Φ(w) − f(w, ψ): what the clients' shifts could still gain at these weights."),
        "phi_gradient": ("‖∇Φ(w)‖", "Against the worst shifts; small at a stationary point."),
        "wasserstein_bound": ("Wasserstein bound", "Of the learnt shifts (Theorem 4), mean over clients."),
    }
    broken = [f"<li>{escape(str(text))}" for text in (told[-1]["broken_conditions"] or [] if told else [])]
    said = f"<h3>Conditions of Theorem 2 that the step sizes break</h3><ul>{''.join(broken)}</ul>" if broken else ""
    if told and not broken:
        said = '<p class="note">No condition of Theorem 2 was seen broken, which does not prove that all hold.</p>'
    return section(
        "Convergence",
        [
            figure(title, lines([Series(label="", points=run.series(key), style="ink")], title=title, zero=True), note)
            for key, (title, note) in named.items()
        ],
        said,
    )


def drift(run: Run) -> str:
    """How far the clients drift apart, and whom the aggregation favoured in which round (SFAT)."""
    chosen = {row["round"]: row["up_weighted"] for row in run.rounds if isinstance(row.get("up_weighted"), list)}
    times = Counter(client for clients in chosen.values() for client in clients)
    last = max(chosen, default=1)
    grid = np.zeros((len(run.clients), min(last, 120)))
    for at, clients in chosen.items():
        for client in (c for c in clients if c < len(grid)):
            grid[client, (at - 1) * grid.shape[1] // last] += 1
    domains = np.array([str(client.get("domain", "")) for client in run.clients])
    groups = {domain: grid[domains == domain] for domain in run.domains()} if times else {}
    most, turns = times.most_common(1)[0] if times else (0, 0)
    return section(
        "Drift and slack",
        [
            figure(
                "Client drift",
                lines([Series(label="mean", points=run.series("drift"), style="ink")], title="Client drift", zero=True),
                "Distance of a client's weights from the new shared ones.",
            ),
            figure(
                "Variance of the updates",
                lines([Series(label="", points=run.series("variance"), style="ink")], title="Variance", zero=True),
                "Mean squared distance of the clients' weights from their own mean.",
            ),
            figure(
                "Up-weighted clients",
                heat(groups, title="Up-weighted clients by round", first=1, wide=last / grid.shape[1]),
                "A row is a client, grouped by domain; a column is a round, or some of them. "
                f"Most often: client {most}, in {turns} of {len(chosen)} rounds.",
            ),
        ],
    )


def planes(run: Run) -> str:
    """Norms of the clients and representations of images, by their two principal components."""
    told, known = run.projections, run.domains()
    homes = {client.get("client"): str(client.get("domain", "")) for client in run.clients}

    def clouds(points: Sequence[tuple[float, float, str, str]], names: Sequence[str]) -> list[Cloud]:
        return [
            Cloud(
                label=name,
                points=[
                    (x, y, f"{name}, {mark}")
                    for x, y, who, mark in points
                    if who == name and plain is (mark == "clean")
                ],
                style=f"c{at % COLOURS}",
                cross=not plain,
            )
            for at, name in enumerate(names)
            for plain in (True, False)
        ]

    drawn, left_out = [], []
    for found in told.get("norms") or []:
        title = f"BatchNorm statistics, {found['layer']}"
        if lost := found.get("left_out"):
            left_out.append(f"{title}: clients {', '.join(map(str, sorted({client for client, _ in lost})))}")
        points = [(x, y, homes.get(client, ""), branch) for x, y, client, branch in found["points"]]
        note = (
            "A point is a client's mean and variance, by their principal components. Dots: clean, crosses: adversarial."
        )
        drawn.append(figure(title, scatter(clouds(points, known), title=title), note))
    for found in told.get("domains") or []:
        title = f"Representations, {found['domain']} (client {found['client']})"
        if lost := found.get("left_out"):
            left_out.append(f"{title}: {len(lost)} of {len(lost) + len(found['points'])} points")
        points = [(x, y, name, state) for x, y, name, state in found["points"]]
        note = f"Images of some classes before the last layer. Dots: clean, crosses: attacked by {told.get('threat')}."
        drawn.append(figure(title, scatter(clouds(points, sorted({p[2] for p in points})), title=title), note))
    said = f"<p>Left out, since not finite (training diverged): {escape('; '.join(left_out))}.</p>" if left_out else ""
    return section("Norms and representations", drawn, said)


def customising(run: Run) -> str:
    """What every width and robustness costs and scores, and what training cost clients of unlike capacity."""
    found: list[dict[str, Any]] = run.settings.get("settings") or []
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


def _client_costs(run: Run) -> list[str]:
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
