"""A run as one HTML file that needs nothing else."""

from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from hardy.report.folder import Run, number, read_run
from hardy.report.pictures import row_labels
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
    stacked,
    strip,
)

_REASONS = ("dropped", "late", "crashed", "refused")
_KNOWN = {"round", "seconds", "loss", "bytes_up", "bytes_down", "macs", "cohort", "slots", "drift", "variance"}
_KNOWN |= {"primal_gap", "phi_gradient", "wasserstein_bound"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, *body: str) -> str:
    """The whole document around these parts; its policy forbids every request."""
    style = Path(__file__).with_name("style.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def figure(title: str, drawing: str, note: str = "") -> str:
    """A titled drawing, or nothing without one."""
    told = f"<p>{escape(note)}</p>" if note else ""
    caption = f"<figcaption><h3>{escape(title)}</h3>{told}</figcaption>"
    return f"<figure>{caption}{drawing}</figure>" if drawing else ""


def section(title: str, figures: Iterable[str], *more: str) -> str:
    """A heading over figures and other parts, or nothing without any."""
    drawn = "\n".join(filter(None, figures))
    grid = f'<div class="figures">{drawn}</div>' if drawn else ""
    return f"<h2>{escape(title)}</h2>{grid}{''.join(more)}" if grid or any(more) else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """Heads over cells that are HTML already, or nothing without rows; `words` columns hold no numbers."""

    def line(kind: str, cells: Iterable[str]) -> str:
        return "<tr>" + "".join(
            f"<{kind}{' class=left' if at < words else ''}>{cell}</{kind}>" for at, cell in enumerate(cells)
        )

    body = "".join(line("td", row) for row in rows)
    whole = f"<table><thead>{line('th', map(escape, head))}<tbody>{body}</table>"
    return f'<div class="scroll">{whole}</div>' if body else ""


def duration(seconds: float) -> str:
    """1 h 04 min"""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _shown(value: float | None, form: Format = "{:.1%}".format) -> str:
    return "–" if value is None else form(value)


def _header(run: Run) -> str:
    summary = run.summary
    about = [
        str(summary.get("method", "")),
        *(f"{key} {summary[key]}" for key in ("engine", "device", "seed") if key in summary),
        _shown(number(summary, "parameters"), lambda v: f"{plain(v)} parameters"),
    ]
    numbers = {
        "mean accuracy": _shown(number(summary, "standard_accuracy", "mean")),
        "worst client": _shown(number(summary, "standard_accuracy", "worst_client")),
        "rounds": _shown(number(summary, "rounds"), plain),
        "time": _shown(number(summary, "seconds"), duration),
        "sent up": _shown(number(summary, "bytes_up"), lambda v: si(v, "B")),
        "sent down": _shown(number(summary, "bytes_down"), lambda v: si(v, "B")),
        "MACs": _shown(number(summary, "macs"), si),
    }
    headline = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in numbers.items())
    return (
        f"<h1>{escape(str(summary.get('name', run.folder.name)))}</h1>"
        f'<p class="about">{escape(" · ".join(about))}</p>'
        f'<dl class="headline">{headline}</dl>'
    )


def _curves(run: Run) -> list[str]:
    overall = [
        Series(label="mean", points=run.series("standard_accuracy", "mean"), style="ink"),
        Series(label="worst client", points=run.series("standard_accuracy", "worst_client"), style="c1"),
        Series(label="validation", points=run.series("validation_accuracy", "mean"), style="muted dashed"),
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
            _shown(number(accuracy, "mean")),
            _shown(number(accuracy, "worst_client")),
            *(_shown(number(accuracy, "by_domain", domain)) for domain in domains),
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


def _convergence(run: Run) -> str:
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


def _drift(run: Run) -> str:
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


def _planes(run: Run) -> str:
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

    drawn = []
    for found in told.get("norms") or []:
        title = f"BatchNorm statistics, {found['layer']}"
        points = [(x, y, homes.get(client, ""), branch) for x, y, client, branch in found["points"]]
        note = (
            "A point is a client's mean and variance, by their principal components. Dots: clean, crosses: adversarial."
        )
        drawn.append(figure(title, scatter(clouds(points, known), title=title), note))
    for found in told.get("domains") or []:
        title = f"Representations, {found['domain']} (client {found['client']})"
        points = [(x, y, name, state) for x, y, name, state in found["points"]]
        note = f"Images of some classes before the last layer. Dots: clean, crosses: attacked by {told.get('threat')}."
        drawn.append(figure(title, scatter(clouds(points, sorted({p[2] for p in points})), title=title), note))
    return section("Norms and representations", drawn)


def _customising(run: Run) -> str:
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
            _shown(number(row, "standard_accuracy", "mean")),
            *(_shown(number(row, "robust_accuracy", threat, "mean")) for threat in threats),
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


def write_report(folder: Path) -> Path:
    """Draw the run in this folder to folder/report.html."""
    run, out = read_run(folder), folder / "report.html"
    name = str(run.summary.get("name", folder.name))
    accuracy, training = (_header, _results, _robustness, _customising), (_training, _convergence, _drift, _lost)
    parts = (*accuracy, *training, _split, _planes, _pictures, _settings)
    out.write_text(page(name, *(part(run) for part in parts)), "utf-8")
    return out
