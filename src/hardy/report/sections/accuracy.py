"""What the run reached: its headline, its accuracy, and its accuracy under attack."""

import json
from html import escape
from typing import Any

from hardy.report.chart import COLOURS, percent, plain, si
from hardy.report.page import duration, figure, section, shown, table
from hardy.report.plots import Bar, Dots, Series, bars, lines, strip
from hardy.report.stored_run import StoredRun, number

_FLAG = ("name", "client", "message", "advice")


def header(run: StoredRun) -> str:
    summary = run.summary
    about = [
        str(summary.get("method", "")),
        *(f"{key} {summary[key]}" for key in ("engine", "device", "seed") if key in summary),
        shown(number(summary, "parameters"), lambda v: f"{plain(v)} parameters"),
    ]
    numbers = {
        "mean accuracy": shown(number(summary, "standard_accuracy", "mean")),
        "worst client": shown(number(summary, "standard_accuracy", "worst_client")),
        "rounds": shown(number(summary, "rounds"), plain),
        "time": shown(number(summary, "seconds"), duration),
        "sent up": shown(number(summary, "bytes_up"), lambda v: si(v, "B")),
        "sent down": shown(number(summary, "bytes_down"), lambda v: si(v, "B")),
        "MACs": shown(number(summary, "macs"), si),
    }
    headline = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in numbers.items())
    state = (
        f'<p class="about">Still training: round {len(run.rounds)} is the last one here.</p>' if run.unfinished else ""
    )
    return (
        f"<h1>{escape(str(summary.get('name', run.folder.name)))}</h1>"
        f'<p class="about">{escape(" · ".join(about))}</p>{state}'
        f'<dl class="headline">{headline}</dl>{_filter(run)}'
    )


def _filter(run: StoredRun) -> str:
    """What page.js needs to look at one domain or client; nothing to see without it."""
    under = {f"under {name}": figures for name, figures in (run.summary.get("robust_accuracy") or {}).items()}
    scores = {"on clean images": run.summary.get("standard_accuracy") or {}, **under}
    clients = []
    for at, client in enumerate(run.clients):
        found = {name: (figures.get("by_client") or [None] * (at + 1))[at : at + 1] for name, figures in scores.items()}
        known = {name: number(values[0]) if values else None for name, values in found.items()}
        told = [f"{percent(value)} {name}" for name, value in known.items() if value is not None]
        words = [f"{client.get('train')} training images", str(client.get("kind") or ""), *told]
        domain = str(client.get("domain", ""))
        clients.append({"client": client.get("client", at), "domain": domain, "words": ", ".join(filter(None, words))})
    if len(clients) < 2:
        return ""
    told_to_page = escape(json.dumps({"domains": run.domains(), "clients": clients}))
    return f'<div class="filter" hidden data-known="{told_to_page}"></div>'


def _curves(run: StoredRun) -> list[str]:
    attack = (run.summary.get("best") or {}).get("select")
    overall = [
        Series(label="mean", points=run.series("standard_accuracy", "mean"), style="ink"),
        Series(label="worst client", points=run.series("standard_accuracy", "worst_client"), style="c1"),
        Series(label="validation", points=run.series("validation_accuracy", "mean"), style="muted dashed"),
        Series(label=f"{attack}, validation", points=run.series("selection_accuracy", "mean"), style="c2 dashed"),
    ]
    by_domain = [
        Series(label=domain, points=run.series("standard_accuracy", "by_domain", domain)) for domain in run.domains()
    ]
    by_domain += [
        Series(
            label=f"{domain}, held out", points=run.series("standard_accuracy", "held_out", domain), style="ink dashed"
        )
        for domain in (run.summary.get("standard_accuracy") or {}).get("held_out") or {}
    ]
    return [
        figure("Accuracy over rounds", lines(overall, title="Accuracy over rounds", y=percent, zero=True)),
        figure("Accuracy by domain over rounds", lines(by_domain, title="Accuracy by domain", y=percent, zero=True)),
        figure(
            "Accuracy over time",
            lines(
                [Series(label="mean", points=run.over_time("standard_accuracy", "mean"), style="ink")],
                title="Accuracy over time",
                y=percent,
                x_name="seconds",
                x_step=0.0,
                zero=True,
            ),
        ),
    ]


def _table(run: StoredRun) -> str:
    """Every accuracy of the summary, by domain too."""
    best, domains = run.summary.get("best") or {}, run.domains()
    unseen = list((run.summary.get("standard_accuracy") or {}).get("held_out") or {})
    found = {"standard": run.summary.get("standard_accuracy")}
    if best and best.get("round") != run.summary.get("rounds"):
        found[f"standard, best round ({best.get('round')})"] = best.get("standard_accuracy")
    cells = [
        [
            escape(name),
            _with_error(accuracy),
            shown(number(accuracy, "worst_client")),
            *(shown(number(accuracy, "by_domain", domain)) for domain in domains),
            *(shown(number(accuracy, "held_out", domain)) for domain in unseen),
        ]
        for name, accuracy in (found | (run.summary.get("robust_accuracy") or {})).items()
    ]
    told = f'<p class="note">±: standard error over {_drawn(run)}.</p>' if any("±" in row[1] for row in cells) else ""
    held_out = (escape(f"{domain} (held out)") for domain in unseen)
    return table(["accuracy", "mean", "worst client", *domains, *held_out], cells) + told


def _drawn(run: StoredRun) -> str:
    """What the figures are a sample of."""
    measured, clients = (number(run.summary, "standard_accuracy", key) for key in ("measured", "clients"))
    if measured is None or clients is None:
        return "test images"
    return f"the {measured:,.0f} clients measured of {clients:,.0f}, and their test images"


def _with_error(accuracy: Any) -> str:
    """60.7% ± 1.3"""
    error = number(accuracy, "standard_error")
    return shown(number(accuracy, "mean")) + (f" ± {100 * error:.1f}" if error else "")


def _by_client(run: StoredRun) -> dict[str, list[tuple[float, str]]]:
    """Each client's final accuracy and what is said of it, by domain."""
    found: dict[str, list[tuple[float, str]]] = {domain: [] for domain in run.domains()}
    for at, raw in enumerate((run.summary.get("standard_accuracy") or {}).get("by_client") or []):
        client = run.clients[at] if at < len(run.clients) else {}
        name = ", ".join(str(client[key]) for key in ("domain", "kind") if client.get(key))
        if (value := number(raw)) is not None:
            what = f"client {client.get('client', at)}{f' ({name})' if name else ''}: {percent(value)}"
            found.setdefault(str(client.get("domain", "all")), []).append((value, what))
    return found


def accuracy_section(run: StoredRun) -> str:
    """Accuracy over rounds and time; at the end by domain, client and threat."""
    final, groups = run.summary.get("standard_accuracy") or {}, _by_client(run)
    by_domain = [
        Bar(
            label=domain,
            value=value,
            worst=min(dots)[0] if (dots := groups.get(domain)) else None,
            style=f"c{at % COLOURS}",
        )
        for at, domain in enumerate(run.domains())
        if (value := number(final, "by_domain", domain)) is not None
    ]
    threats = [
        Bar(label=name, value=mean, worst=number(accuracy, "worst_client"), style="muted")
        for name, accuracy in {"none": final, **(run.summary.get("robust_accuracy") or {})}.items()
        if (mean := number(accuracy, "mean")) is not None
    ]
    rows = [
        Dots(label=domain, values=dots, style=f"c{at % COLOURS}") for at, (domain, dots) in enumerate(groups.items())
    ]
    lowest = min((dot for dots in groups.values() for dot in dots), default=(0.0, ""))[1]
    return section(
        "Accuracy",
        [
            *_curves(run),
            figure(
                "Final accuracy by domain",
                bars(by_domain, title="Final accuracy by domain"),
                "Bar: mean. Line: the domain's worst client.",
            ),
            figure(
                "Final accuracy by client",
                strip(rows, title="Final accuracy by client"),
                f"A dot is a client, the line their mean. Lowest: {lowest}.",
            ),
            figure(
                "Accuracy under attack",
                bars(threats, title="Accuracy by threat") if len(threats) > 1 else "",
                "Bar: mean. Line: worst client.",
            ),
        ],
        _table(run),
    )


def robustness_section(run: StoredRun) -> str:
    """Accuracy against the radius of an attack, and the red flags, as `hardy evaluate` left them."""
    found, curves = run.evaluation, run.sweeps()
    drawings = [
        figure(
            f"Accuracy against the {setting}",
            lines(
                [Series(label=threat, points=points) for (axis, threat), points in curves.items() if axis == setting],
                title=f"Accuracy against the {setting}",
                y=percent,
                x_name=setting,
                x_step=0.0,
            ),
        )
        for setting in dict.fromkeys(axis for axis, _ in curves)
    ]
    certified = found.get("certified_accuracy") or {}
    drawings.append(
        figure(
            "Certified accuracy against the L2 radius",
            lines(
                [
                    Series(label=name, points=[(r, share) for r, share in one["curve"] if share is not None])
                    for name, one in certified.items()
                ],
                title="Certified accuracy against the L2 radius",
                y=percent,
                x_name="L2 radius",
                x_step=0.0,
            ),
            "; ".join(
                f"{escape(name)}: each row's certificate holds with confidence {1 - one['alpha']:g}, "
                f"{shown(number(one, 'abstained'))} abstained"
                for name, one in certified.items()
            )
            + ". The certificates are of the network smoothed with this noise, and hold against every change of an "
            "image up to the radius.",
        )
        if certified
        else ""
    )
    flags = [
        f"<li><b>{name}</b> (client {client}): {message} {advice}"
        for flag in found.get("flags") or []
        for name, client, message, advice in [[escape(str(flag[key])) for key in _FLAG]]
    ]
    said = f"<h3>Red flags</h3><ul>{''.join(flags)}</ul>" if flags else ""
    if "flags" in found and not flags:
        said = '<p class="note">No red flag: the figures under attack passed the checks for masked gradients.</p>'
    return section("Robustness", drawings, said)
