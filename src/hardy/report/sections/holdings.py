"""What the clients hold."""

from collections import Counter
from typing import Any

import numpy as np

from hardy.report.chart import COLOURS, plain
from hardy.report.count_plots import heat
from hardy.report.page import figure, section
from hardy.report.plots import Dots, strip
from hardy.report.stored_run import StoredRun, number

_NAMED = 20
"""classes called by name under a figure"""


def clients_section(run: StoredRun) -> str:
    groups: dict[str, list[dict[str, Any]]] = {domain: [] for domain in run.domains()}
    for client in run.clients:
        groups[str(client.get("domain", ""))].append(client)
    classes = max((len(client.get("labels") or []) for client in run.clients), default=0)
    names = [str(name) for name in run.summary.get("classes") or []]
    names = names if len(names) == classes else []
    labels = {
        domain: np.array([(*(c.get("labels") or []), *[0] * classes)[:classes] for c in clients], float)
        for domain, clients in groups.items()
    }
    most = max((counts.max() for counts in labels.values() if counts.size), default=0)
    sizes = [
        Dots(
            label=domain,
            values=[(number(c, "train") or 0.0, f"client {c.get('client')}: {c.get('train')}") for c in clients],
            style=f"c{at % COLOURS}",
        )
        for at, (domain, clients) in enumerate(groups.items())
    ]
    held = ", ".join(
        f"{plain(sum(number(c, part) or 0 for c in run.clients))} {part}" for part in ("train", "validation", "test")
    )
    kinds = Counter(str(client["kind"]) for client in run.clients if client.get("kind"))
    mixed = f" Kinds: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}." if len(kinds) > 1 else ""
    return section(
        "Data",
        [
            figure(
                "Training images by client and class",
                heat(labels, title="Training images by client and class", names=names),
                "A row is a client, grouped by domain; a column is a class"
                f"{f' ({_listed(names)})' if names else ''}. The strongest colour is {most:.0f} images.",
            ),
            figure(
                "Training images by client",
                strip(sizes, title="Training images by client", x=plain),
                f"{len(run.clients)}{_of(run)} clients hold {held} images.{mixed}",
            ),
        ],
    )


def _of(run: StoredRun) -> str:
    """How many clients there are, where some are listed."""
    clients = number(run.summary, "standard_accuracy", "clients")
    return "" if clients is None else f" of {clients:,.0f}"


def _listed(names: list[str]) -> str:
    """The first names of a list."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
