"""How the clients move: towards a saddle point (FedRobust), and apart from each other (SFAT)."""

from collections import Counter
from html import escape

import numpy as np

from hardy.report.count_plots import heat
from hardy.report.page import figure, section
from hardy.report.plots import Series, lines
from hardy.report.stored_run import StoredRun


def convergence_section(run: StoredRun) -> str:
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


def drift_section(run: StoredRun) -> str:
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
