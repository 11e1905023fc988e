"""Small SVG charts whose text keeps its size at any width, on a phone as on a wall.

Colours are classes of style.css: c0 to c7 tell things apart, ink and muted do not. What belongs to a name carries it as
`data-name`, and a curve its values, so that page.js can show and hide them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from hardy.report.chart import (
    LINE,
    Format,
    chart_frame,
    grid_lines,
    label_width,
    path_through,
    percent,
    plain,
    series_style,
    shortened,
    spread_lines,
    stretched,
    text_at,
    thin,
    ticks,
)
from hardy.report.stored_run import Point

_STARTS = {"round": (1.0,), "seconds": (0.0,), "MB": (0.0,)}
"""where axes of these names start, although nothing was measured there"""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve. `band` holds (x, low, high) around it; `style` names classes, by default the next colour."""

    label: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()
    style: str = ""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A value from 0 to 1, and the worst one behind that mean."""

    label: str
    value: float
    worst: float | None = None
    style: str = "ink"


@dataclass(frozen=True, kw_only=True)
class Dots:
    """A named row of (value, what the dot is)."""

    label: str
    values: Sequence[tuple[float, str]]
    style: str = "ink"


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """Named points (x, y, what it is), drawn as dots or as crosses."""

    label: str
    points: Sequence[tuple[float, float, str]]
    style: str = "ink"
    cross: bool = False


def lines(
    series: Sequence[Series],
    *,
    title: str,
    y: Format = plain,
    x_name: str = "round",
    x_step: float = 1.0,
    zero: bool = False,
) -> str:
    """Curves, each named at its end with its last value; nothing when no curve has a point.

    `zero` starts the vertical axis at nought; `x_step` is the least step of the other one.
    """
    styled = [(one, one.style or series_style(at)) for at, one in enumerate(series)]
    drawn = [(one, style) for one, style in styled if one.points]
    if not drawn:
        return ""
    xs = [px for one, _ in drawn for px, _ in one.points]
    ys = [py for one, _ in drawn for py in (*(p[1] for p in one.points), *(v for b in one.band for v in b[1:]))]
    left_end, right_end = min([*xs, *_STARTS.get(x_name, ())]), max(xs)
    rungs = ticks(min([*ys, 0.0]) if zero else min(ys), max(ys))
    height = max(200.0, LINE * len(drawn))

    def place(point: Point) -> Point:
        return (
            (point[0] - left_end) / ((right_end - left_end) or 1.0),
            (rungs[-1] - point[1]) / (rungs[-1] - rungs[0]),
        )

    bands, curves, marks, labels, tops = [], [], [], [], []
    for one, style in drawn:
        points = [place(point) for point in thin(one.points)]
        if one.band:
            upper = [place(point) for point in thin([(px, high) for px, _, high in one.band])]
            lower = [place(point) for point in thin([(px, low) for px, low, _ in one.band])]
            around = path_through([*upper, *reversed(lower)])
            bands.append(f'<path class="band {style}" data-name="{escape(one.label)}" d="{around}z"/>')
        last = f"{shortened(one.label)} {y(one.points[-1][1])}"
        shown = thin(one.points)
        told = f'data-name="{escape(one.label)}" data-x="{"|".join(plain(px) for px, _ in shown)}"'
        told += f' data-y="{escape("|".join(y(py) for _, py in shown))}"'
        curves.append(
            f'<path class="curve {style}" d="{path_through(points)}" {told}><title>{escape(one.label)}</title></path>'
        )
        end_x, end_y = points[-1]
        marks.append(
            f'<circle cx="{end_x:.2%}" cy="{end_y:.2%}" r="2.5" class="{style}" data-name="{escape(one.label)}"/>'
        )
        labels.append((last, style))
        tops.append(end_y * height)
    names = [
        text_at("100%", f"{top:.1f}", label, style, right=9, name=one.label)
        for (label, style), top, (one, _) in zip(labels, spread_lines(tops, height), drawn, strict=True)
    ]
    across = [t for t in ticks(left_end, right_end, least=x_step) if left_end <= t <= right_end]
    if x_name == "round":  # the first one has its place too
        across = [left_end, *(t for t in across if t - left_end > 0.1 * (right_end - left_end))]
    down = [(place((left_end, rung))[1], y(rung)) for rung in rungs]
    grid = grid_lines([(place((t, rungs[0]))[0], plain(t)) for t in across], down, x_name)
    return chart_frame(
        grid + stretched("".join(bands + curves)) + "".join(marks + names),
        title=title,
        height=height,
        left=label_width([label for _, label in down]),
        right=max(label_width([label for label, _ in labels]), label_width([x_name]) + 26),
    )


def bars(rows: Sequence[Bar], *, title: str) -> str:
    """Lying bars from 0 to 100%, each with its value and a mark at the worst."""
    if not rows:
        return ""
    pitch, parts, notes = 30, [], []
    for at, bar in enumerate(rows):
        middle = at * pitch + pitch / 2
        note = percent(bar.value) + (f" · worst {percent(bar.worst)}" if bar.worst is not None else "")
        notes.append(note)
        parts.append(
            f'<g data-name="{escape(bar.label)}"><rect y="{middle - 6:g}" width="100%" height="12" class="track"/>'
        )
        parts.append(f'<rect y="{middle - 6:g}" width="{bar.value:.2%}" height="12" class="{bar.style}"/>')
        if bar.worst is not None:
            span = f'x1="{bar.worst:.2%}" x2="{bar.worst:.2%}" y1="{middle - 9:g}" y2="{middle + 9:g}"'
            parts.append(f'<line {span} class="mean"/>')
        parts.append(text_at("0", f"{middle:g}", shortened(bar.label), "end ink", right=-10))
        parts.append(text_at("100%", f"{middle:g}", note, "ink", right=9) + "</g>")
    return chart_frame(
        "".join(parts),
        title=title,
        height=pitch * len(rows),
        left=label_width([shortened(bar.label) for bar in rows]),
        right=label_width(notes),
        below=8,
    )


def strip(rows: Sequence[Dots], *, title: str, x: Format = percent, most: int = 800) -> str:
    """A dot for each value and a bar at each row's mean. Past `most`, rows show evenly chosen ranks."""
    drawn = [row for row in rows if row.values]
    if not drawn:
        return ""
    every = [value for row in drawn for value, _ in row.values]
    rungs, pitch, parts = ticks(min(every), max(every)), 36, []

    def place(value: float) -> float:
        return (value - rungs[0]) / (rungs[-1] - rungs[0])

    for at, row in enumerate(drawn):
        middle = at * pitch + pitch / 2
        parts.append(
            f'<line x2="100%" y1="{middle:g}" y2="{middle:g}" class="rule"/><g data-name="{escape(row.label)}">'
        )
        ranked = sorted(row.values)
        shown = np.linspace(0, len(ranked) - 1, min(len(ranked), max(2, most // len(drawn)))).astype(int)
        for rank, chosen in enumerate(shown):
            value, what = ranked[chosen]
            level = middle + 18 * ((rank * 0.618) % 1 - 0.5)  # the golden ratio keeps neighbours apart
            parts.append(
                f'<circle cx="{place(value):.2%}" cy="{level:.0f}" r="3.5" class="dot {row.style}">'
                f"<title>{escape(what)}</title></circle>"
            )
        mean = place(sum(value for value, _ in row.values) / len(row.values))
        span = f'x1="{mean:.2%}" x2="{mean:.2%}" y1="{middle - 13:g}" y2="{middle + 13:g}"'
        parts.append(f'<line {span} class="mean"/>')
        parts.append(text_at("0", f"{middle:g}", shortened(row.label), "end ink", right=-10) + "</g>")
    return chart_frame(
        grid_lines([(place(rung), x(rung)) for rung in rungs], [], "") + "".join(parts),
        title=title,
        height=pitch * len(drawn),
        left=label_width([shortened(row.label) for row in drawn]),
        right=22,
    )


def scatter_plot(clouds: Sequence[Cloud], *, title: str) -> str:
    """Points in a plane whose axes have no names; clouds of one label are named once."""
    drawn = [cloud for cloud in clouds if cloud.points]
    if not drawn:
        return ""
    xs, ys = [x for c in drawn for x, _, _ in c.points], [y for c in drawn for _, y, _ in c.points]
    wide, tall = (max(xs) - min(xs)) or 1.0, (max(ys) - min(ys)) or 1.0
    parts = []
    for cloud in drawn:
        for x, y, what in cloud.points:
            left, top = f"{(x - min(xs)) / wide:.2%}", f"{(max(ys) - y) / tall:.2%}"
            told = f"<title>{escape(what)}</title>"
            if cloud.cross:
                parts.append(f'<text x="{left}" y="{top}" dy="4" class="middle {cloud.style}">×{told}</text>')
            else:
                parts.append(f'<circle cx="{left}" cy="{top}" r="3.5" class="dot {cloud.style}">{told}</circle>')
    labels = {cloud.label: cloud.style for cloud in drawn}
    names = [
        text_at("100%", f"{LINE * at + 6:g}", shortened(label), style, right=18)
        for at, (label, style) in enumerate(labels.items())
    ]
    return chart_frame(
        "".join(parts + names),
        title=title,
        height=max(240, LINE * len(labels)),
        left=10,
        right=label_width([shortened(label) for label in labels]) + 9,
        below=14,
    )
