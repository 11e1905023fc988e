"""Norms and representations as points in a plane (FedRBN)."""

from collections.abc import Sequence
from html import escape

from hardy.report.chart import COLOURS
from hardy.report.page import figure, section
from hardy.report.plots import Cloud, scatter_plot
from hardy.report.stored_run import StoredRun


def projections_section(run: StoredRun) -> str:
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
        crosses = " Dots: clean, crosses: adversarial." if any(branch != "clean" for *_, branch in points) else ""
        note = f"A point is a client's mean and variance, by their principal components.{crosses}"
        drawn.append(figure(title, scatter_plot(clouds(points, known), title=title), note))
    for found in told.get("domains") or []:
        title = f"Representations, {found['domain']} (client {found['client']})"
        if lost := found.get("left_out"):
            left_out.append(f"{title}: {len(lost)} of {len(lost) + len(found['points'])} points")
        points = [(x, y, name, state) for x, y, name, state in found["points"]]
        note = f"Images of some classes before the last layer. Dots: clean, crosses: attacked by {told.get('threat')}."
        drawn.append(figure(title, scatter_plot(clouds(points, sorted({p[2] for p in points})), title=title), note))
    said = f"<p>Left out, since not finite (training diverged): {escape('; '.join(left_out))}.</p>" if left_out else ""
    return section("Norms and representations", drawn, said)
