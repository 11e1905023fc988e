"""A run as one HTML file that needs nothing else."""

from base64 import b64encode
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from hardy.report.page import duration, figure, page, section, shown, table
from hardy.report.paper_sections import convergence, customising, drift, planes
from hardy.report.pictures import row_labels
from hardy.report.plots import COLOURS, Bar, Dots, Series, bars, heat, lines, percent, plain, si, stacked, strip
from hardy.report.stored_run import Run, number, read_run

_REASONS = ("dropped", "late", "crashed", "refused")
_KNOWN = {"round", "seconds", "loss", "bytes_up", "bytes_down", "macs", "cohort", "slots", "drift", "variance"}
_KNOWN |= {"primal_gap", "phi_gradient", "wasserstein_bound"}


def _header(run: Run) -> str:
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
    return (
        f"<h1>{escape(str(summary.get('name', run.folder.name)))}</h1>"
        f'<p class="about">{escape(" · ".join(about))}</p>'
        f'<dl class="headline">{headline}</dl>'
    )


def _curves(run: Run) -> list[str]:
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
    return [
        figure("Accuracy over rounds", lines(overall, title="Accuracy over rounds", y=percent)),
        figure("Accuracy by domain over rounds", lines(by_domain, title="Accuracy by domain", y=percent)),
        figure(
            "Accuracy over time",
            lines(
                [Series(label="mean", points=run.over_time("standard_accuracy", "mean"), style="ink")],
                title="Accuracy over time",
                y=percent,
                x_name="seconds",
                x_step=0.0,
            ),
        ),
    ]


def _accuracies(run: Run) -> dict[str, Any]:
    """Every accuracy of the summary by its name, in the order of the table."""
    best = run.summary.get("best") or {}
    found = {"standard": run.summary.get("standard_accuracy")}
    if best and best.get("round") != run.summary.get("rounds"):
        found[f"standard, best round ({best.get('round')})"] = best.get("standard_accuracy")
    return found | (run.summary.get("robust_accuracy") or {})


def _results(run: Run) -> str:
    final, domains = run.summary.get("standard_accuracy") or {}, run.domains()
    groups: dict[str, list[tuple[float, str]]] = {domain: [] for domain in domains}
    for at, raw in enumerate(final.get("by_client") or []):
        client = run.clients[at] if at < len(run.clients) else {}
        name = ", ".join(str(client[key]) for key in ("domain", "kind") if client.get(key))
        if (value := number(raw)) is not None:
            what = f"client {client.get('client', at)}{f' ({name})' if name else ''}: {percent(value)}"
            groups.setdefault(str(client.get("domain", "all")), []).append((value, what))
    by_domain = [
        Bar(
            label=domain,
            value=value,
            worst=min(dots)[0] if (dots := groups.get(domain)) else None,
            style=f"c{at % COLOURS}",
        )
        for at, domain in enumerate(domains)
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
    cells = [
        [
            escape(name),
            shown(number(accuracy, "mean")),
            shown(number(accuracy, "worst_client")),
            *(shown(number(accuracy, "by_domain", domain)) for domain in domains),
        ]
        for name, accuracy in _accuracies(run).items()
    ]
    return section(
        "Accuracy",
        [
            *_curves(run),
            figure(
                "Final accuracy by domain",
                bars(by_domain, title="Final accuracy by domain"),
                "Bar: mean. Notch: the domain's worst client.",
            ),
            figure(
                "Final accuracy by client",
                strip(rows, title="Final accuracy by client"),
                f"A dot is a client, the line their mean. Lowest: {lowest}.",
            ),
            figure(
                "Accuracy under attack",
                bars(threats, title="Accuracy by threat") if len(threats) > 1 else "",
                "Bar: mean. Notch: worst client.",
            ),
        ],
        table(["accuracy", "mean", "worst client", *domains], cells),
    )


def _training(run: Run) -> str:
    broken = sum("loss" in row and number(row, "loss") is None for row in run.rounds)
    traffic = [
        Series(label="up", points=run.cumulative("bytes_up")),
        Series(label="down", points=run.cumulative("bytes_down")),
    ]
    macs = Series(label="total", points=run.cumulative("macs"), style="ink")
    extra = dict.fromkeys(key for row in run.rounds for key, value in row.items() if number(value) is not None)
    return section(
        "Training",
        [
            figure(
                "Loss",
                lines([Series(label="loss", points=run.series("loss"), style="ink")], title="Loss", zero=True),
                f"Not a number in {broken} of {len(run.rounds)} rounds." if broken else "",
            ),
            figure(
                "Traffic, cumulative",
                lines(traffic, title="Cumulative traffic", y=lambda v: si(v, "B"), zero=True),
            ),
            figure(
                "Multiply-accumulates (MACs), cumulative",
                lines([macs], title="Cumulative MACs", y=si, zero=True),
            ),
            *(
                figure(title, lines([Series(label="", points=run.series(key), style="ink")], title=title))
                for key in extra
                if key not in _KNOWN and (title := key.replace("_", " ").capitalize())
            ),
        ],
        _wire(run),
    )


def _wire(run: Run) -> str:
    """What each client received and sent over a network, evaluation included; nothing where there was none."""
    counted: dict[str, list[float]] = {}
    for row in run.rounds:
        for client, ways in (row.get("wire") or {}).items():
            total = counted.setdefault(client, [0.0, 0.0, 0.0])
            for at, value in enumerate((1.0, number(ways, "down") or 0.0, number(ways, "up") or 0.0)):
                total[at] += value
    cells = ([escape(client), plain(n), si(down, "B"), si(up, "B")] for client, (n, down, up) in counted.items())
    return table(["on the wire: client", "rounds", "received", "sent"], cells)


def _lost(run: Run) -> str:
    last = run.rounds[-1]["round"] if run.rounds else 0
    counts = {reason: [0] * last for reason in _REASONS}
    causes: Counter[str] = Counter()
    for row in run.rounds:
        for told in (row.get("lost") or {}).values():
            reason = str(told).partition(":")[0].strip()
            counts.setdefault(reason, [0] * last)[row["round"] - 1] += 1
            causes[str(told)] += 1
    return section(
        "Lost replies",
        [
            figure(
                "By round",
                stacked(counts, title="Lost replies by round"),
                "Replies the server went without. Where rounds are many, a column sums neighbours.",
            )
        ],
        table(
            ["most frequent causes", "replies"],
            [[escape(cause), str(count)] for cause, count in causes.most_common(8)],
        ),
    )


def _split(run: Run) -> str:
    groups: dict[str, list[dict[str, Any]]] = {domain: [] for domain in run.domains()}
    for client in run.clients:
        groups[str(client.get("domain", ""))].append(client)
    classes = max((len(client.get("labels") or []) for client in run.clients), default=0)
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
                heat(labels, title="Training images by client and class"),
                "A row is a client, grouped by domain; a column is a class. "
                f"The strongest colour is {most:.0f} images.",
            ),
            figure(
                "Training images by client",
                strip(sizes, title="Training images by client", x=plain),
                f"{len(run.clients)} clients hold {held} images.{mixed}",
            ),
        ],
    )


def _pictures(run: Run) -> str:
    figures = []
    for path in sorted((run.folder / "pictures").glob("*.png")):
        png = path.read_bytes()
        labels = row_labels(png)
        image = f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{b64encode(png).decode()}">'
        figures.append(figure(path.stem, image, f"Rows: {', '.join(labels)}." if labels else ""))
    return section("Pictures", figures)


def _settings(run: Run) -> str:
    versions = " · ".join(f"{name} {version}" for name, version in (run.summary.get("versions") or {}).items())
    config = f"<details><summary>config.toml</summary><pre>{escape(run.config)}</pre></details>" if run.config else ""
    return section("Settings", [], config, f'<p class="note">{escape(versions)}</p>' if versions else "")


def _robustness(run: Run) -> str:
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
    flags = [
        f"<li><b>{escape(f['name'])}</b> (client {f['client']}): {escape(f['message'])} {escape(f['advice'])}"
        for f in found.get("flags") or []
    ]
    said = f"<h3>Red flags</h3><ul>{''.join(flags)}</ul>" if flags else ""
    if "flags" in found and not flags:
        said = '<p class="note">No red flag: the figures under attack passed the checks for masked gradients.</p>'
    return section("Robustness", drawings, said)


def write_report(folder: Path) -> Path:
    """Draw the run in this folder to folder/report.html."""
    run, out = read_run(folder), folder / "report.html"
    name = str(run.summary.get("name", folder.name))
    accuracy, training = (_header, _results, _robustness, customising), (_training, convergence, drift, _lost)
    parts = (*accuracy, *training, _split, planes, _pictures, _settings)
    out.write_text(page(name, *(part(run) for part in parts)), "utf-8")
    return out
