"""Small SVG charts whose text keeps its size at any width, on a phone as on a wall.

Positions are percentages of the plot area. Curves and cells, which SVG cannot place by percentage, lie in an
inner picture of 1000 x 1000 units that is stretched without its strokes. Colours are classes of style.css:
c0 to c7 tell things apart, ink and muted do not.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hardy.report.stored_run import Point

Format = Callable[[float], str]
COLOURS = 8
_CHARACTER, _LINE, _TICK = 7.4, 15, 10.0  # pixels: a character, a line of text, room beside a label
_LEVELS = 8


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


def percent(value: float) -> str:
    """71.2%"""
    return f"{100 * value:.1f}".removesuffix(".0") + "%"


def plain(value: float) -> str:
    """Three digits, or all of them when it is a whole number."""
    return f"{value:,.0f}".replace(",", "\u202f") if float(value).is_integer() else f"{value:.3g}"


def si(value: float, unit: str = "") -> str:
    """1.23 GB"""
    for factor, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def thin(points: Sequence[Point], limit: int = 400) -> list[Point]:
    """At most `limit` points: both ends, and the lowest and highest of each stretch between: peaks stay."""
    if len(points) <= limit:
        return list(points)
    edges = np.linspace(1, len(points) - 1, limit // 2).astype(int)
    kept = {0, len(points) - 1}
    for start, stop in pairwise(edges):
        stretch = [y for _, y in points[start:stop]]
        kept |= {start + int(np.argmin(stretch)), start + int(np.argmax(stretch))}
    return [points[at] for at in sorted(kept)]


def _ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """About four round numbers that enclose low and high."""
    if math.isclose(low, high):  # a constant is drawn against nought
        low, high = min(low, 0.0), max(high, 0.0) or float(low == 0.0)
    raw = max((high - low) / 4, least)
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    return [k * step for k in range(first, max(math.ceil(high / step - 1e-9), first + 1) + 1)]


def _spread(tops: Sequence[float], bottom: float) -> list[float]:
    """Move text lines apart, the least way down or up, so that none overlap."""
    order = sorted(range(len(tops)), key=lambda at: tops[at])
    placed = list(tops)
    for above, at in pairwise(order):
        placed[at] = max(placed[at], placed[above] + _LINE)
    limit = bottom
    for at in reversed(order):
        placed[at] = min(placed[at], limit)
        limit = placed[at] - _LINE
    return placed


def _width(labels: Sequence[str]) -> int:
    return math.ceil(_CHARACTER * max((len(label) for label in labels), default=0) + _TICK)


def _short(label: str, length: int = 16) -> str:
    return label if len(label) <= length else label[: length - 1].rstrip() + "…"


def _text(x: str, y: str, label: str, style: str, *, right: float = 0, down: float = 4) -> str:
    """Text at a place of the plot area, moved by pixels; 4 down centres it on its place."""
    return f'<text x="{x}" y="{y}" dx="{right:g}" dy="{down:g}" class="{style}">{escape(label)}</text>'


def _stretched(body: str) -> str:
    return f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">{body}</svg>'


def _chart(body: str, *, title: str, height: float, left: int, right: int, below: int = 22) -> str:
    return (
        f'<svg class="chart" role="img" aria-label="{escape(title)}" height="{height:g}" '
        f'style="width:calc(100% - {left + right}px);margin:14px {right}px {below}px {left}px">{body}</svg>'
    )


def _grid(x: Sequence[tuple[float, str]], y: Sequence[tuple[float, str]], x_name: str) -> str:
    """Rules and their labels, at fractions from the left and from the top."""
    parts = []
    for at, label in y:
        parts.append(f'<line x2="100%" y1="{at:.2%}" y2="{at:.2%}" class="rule"/>')
        parts.append(_text("0", f"{at:.2%}", label, "tick end", right=-8))
    parts += (_text(f"{at:.2%}", "100%", label, "tick middle", down=17) for at, label in x)
    if x_name:
        parts.append(_text("100%", "100%", x_name, "tick", right=26, down=17))
    return "".join(parts)


def _path(points: Sequence[Point]) -> str:
    return "M" + " ".join(f"{1000 * x:.0f} {1000 * y:.0f}" for x, y in points)


def _style(at: int) -> str:
    return f"c{at % COLOURS}" + (" dashed" if at // COLOURS % 2 else "")


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
    styled = [(one, one.style or _style(at)) for at, one in enumerate(series)]
    drawn = [(one, style) for one, style in styled if one.points]
    if not drawn:
        return ""
    xs = [px for one, _ in drawn for px, _ in one.points]
    ys = [py for one, _ in drawn for py in (*(p[1] for p in one.points), *(v for b in one.band for v in b[1:]))]
    left_end, right_end = min(xs), max(xs)
    rungs = _ticks(min([*ys, 0.0]) if zero else min(ys), max(ys))
    height = max(200.0, _LINE * len(drawn))

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
            bands.append(f'<path class="band {style}" d="{_path([*upper, *reversed(lower)])}z"/>')
        last = f"{_short(one.label)} {y(one.points[-1][1])}"
        curves.append(f'<path class="curve {style}" d="{_path(points)}"><title>{escape(one.label)}</title></path>')
        end_x, end_y = points[-1]
        marks.append(f'<circle cx="{end_x:.2%}" cy="{end_y:.2%}" r="2.5" class="{style}"/>')
        labels.append((last, style))
        tops.append(end_y * height)
    names = [
        _text("100%", f"{top:.1f}", label, style, right=9)
        for (label, style), top in zip(labels, _spread(tops, height), strict=True)
    ]
    across = [t for t in _ticks(left_end, right_end, least=x_step) if left_end <= t <= right_end]
    down = [(place((left_end, rung))[1], y(rung)) for rung in rungs]
    grid = _grid([(place((t, rungs[0]))[0], plain(t)) for t in across], down, x_name)
    return _chart(
        grid + _stretched("".join(bands + curves)) + "".join(marks + names),
        title=title,
        height=height,
        left=_width([label for _, label in down]),
        right=max(_width([label for label, _ in labels]), _width([x_name]) + 26),
    )


def bars(rows: Sequence[Bar], *, title: str) -> str:
    """Lying bars from 0 to 100%, each with its value and a notch at the worst."""
    if not rows:
        return ""
    pitch, parts, notes = 30, [], []
    for at, bar in enumerate(rows):
        middle = at * pitch + pitch / 2
        note = percent(bar.value) + (f" · worst {percent(bar.worst)}" if bar.worst is not None else "")
        notes.append(note)
        parts.append(f'<rect y="{middle - 6:g}" width="100%" height="12" class="track"/>')
        parts.append(f'<rect y="{middle - 6:g}" width="{bar.value:.2%}" height="12" class="{bar.style}"/>')
        if bar.worst is not None:
            span = f'x1="{bar.worst:.2%}" x2="{bar.worst:.2%}" y1="{middle - 9:g}" y2="{middle + 9:g}"'
            parts.append(f'<line {span} class="notch"/>')
        parts.append(_text("0", f"{middle:g}", _short(bar.label), "end ink", right=-10))
        parts.append(_text("100%", f"{middle:g}", note, "ink", right=9))
    return _chart(
        "".join(parts),
        title=title,
        height=pitch * len(rows),
        left=_width([_short(bar.label) for bar in rows]),
        right=_width(notes),
        below=8,
    )


def strip(rows: Sequence[Dots], *, title: str, x: Format = percent, most: int = 800) -> str:
    """A dot for each value and a bar at each row's mean. Past `most`, rows show evenly chosen ranks."""
    drawn = [row for row in rows if row.values]
    if not drawn:
        return ""
    every = [value for row in drawn for value, _ in row.values]
    rungs, pitch, parts = _ticks(min(every), max(every)), 36, []

    def place(value: float) -> float:
        return (value - rungs[0]) / (rungs[-1] - rungs[0])

    for at, row in enumerate(drawn):
        middle = at * pitch + pitch / 2
        parts.append(f'<line x2="100%" y1="{middle:g}" y2="{middle:g}" class="rule"/>')
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
        parts.append(_text("0", f"{middle:g}", _short(row.label), "end ink", right=-10))
    return _chart(
        _grid([(place(rung), x(rung)) for rung in rungs], [], "") + "".join(parts),
        title=title,
        height=pitch * len(drawn),
        left=_width([_short(row.label) for row in drawn]),
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
        _text("100%", f"{_LINE * at + 6:g}", _short(label), style, right=18)
        for at, (label, style) in enumerate(labels.items())
    ]
    return _chart(
        "".join(parts + names),
        title=title,
        height=max(240, _LINE * len(labels)),
        left=10,
        right=_width([_short(label) for label in labels]) + 9,
        below=14,
    )


def stacked(counts: Mapping[str, Sequence[int]], *, title: str, x_name: str = "round") -> str:
    """Counts per round as stacked columns, one colour a label; past 120, neighbours share a column."""
    rounds = max((len(values) for values in counts.values()), default=0)
    if not any(map(sum, counts.values())):
        return ""
    columns = min(rounds, 120)
    place = np.arange(rounds) * columns // rounds
    binned = {label: np.bincount(place, values, columns) for label, values in counts.items() if any(values)}
    rungs = _ticks(0.0, float(sum(binned.values(), np.zeros(columns)).max()), least=1.0)
    base, width, height, paths, labels = np.zeros(columns), 1000 / columns, 140, [], []
    for at, (label, values) in enumerate(binned.items()):
        top = base + values
        boxes = "".join(
            f"M{width * c:.1f} {1000 - 1000 * base[c] / rungs[-1]:.0f}h{width * 0.8:.1f}"
            f"V{1000 - 1000 * top[c] / rungs[-1]:.0f}h-{width * 0.8:.1f}z"
            for c in np.flatnonzero(values)
        )
        paths.append(f'<path class="{_style(at)}" d="{boxes}"/>')
        labels.append(f"{label} {int(values.sum())}")
        base = top
    names = [
        _text("100%", f"{height - _LINE * at - 6:g}", label, _style(at), right=9) for at, label in enumerate(labels)
    ]
    across = [t for t in _ticks(1.0, float(rounds), least=1.0) if 1 <= t <= rounds]
    grid = _grid(
        [((t - 0.5) / rounds, plain(t)) for t in across],
        [(1 - rung / rungs[-1], plain(rung)) for rung in rungs],
        x_name,
    )
    return _chart(
        grid + _stretched("".join(paths)) + "".join(names),
        title=title,
        height=height,
        left=_width([plain(rung) for rung in rungs]),
        right=max(_width(labels), _width([x_name]) + 26),
    )


def heat(
    groups: Mapping[str, NDArray[np.float64]],
    *,
    title: str,
    most: int = 160,
    first: int = 0,
    wide: float = 1.0,
    names: Sequence[str] = (),
) -> str:
    """Grouped [row, column] counts: the stronger the colour, the more. Past `most`, rows are averaged.

    Columns have `names`, or are numbered from `first` on; each then stands for `wide` numbers.
    """
    share = max(1, math.ceil(sum(len(group) for group in groups.values()) / most))
    small = {
        name: np.stack([group[at : at + share].mean(0) for at in range(0, len(group), share)])
        for name, group in groups.items()
        if group.size
    }
    if not small:
        return ""
    top = max(group.max() for group in small.values()) or 1.0
    rows, columns = sum(len(group) for group in small.values()), max(g.shape[1] for g in small.values())
    pitch = min(12.0, max(3.0, 330 / rows, (_LINE - 6) * len(small) / rows))  # room for every group's name
    height = pitch * rows + 6 * (len(small) - 1)
    width, tall = 1000 / columns, 1000 * pitch / height
    box = width * 0.94
    start, paths, labels, tops = 0.0, [], [], []
    for name, group in small.items():
        style = f"c{list(groups).index(name) % COLOURS}"
        levels = np.ceil(_LEVELS * np.sqrt(group / top)).astype(int)  # the root keeps single images visible
        for level in range(1, _LEVELS + 1):
            cells = "".join(
                f"M{width * c:.0f} {start + tall * r:.1f}h{box:.0f}v{tall * 0.88:.1f}h-{box:.0f}z"
                for r, c in np.argwhere(levels == level)
            )
            if cells:
                paths.append(f'<path class="{style}" fill-opacity="{level / _LEVELS:.2f}" d="{cells}"/>')
        labels.append((f"{_short(name)} ({len(groups[name])})", style))
        tops.append((start + tall * len(group) / 2) * height / 1000)
        start += tall * len(group) + 6000 / height
    beside = [
        _text("0", f"{y:.1f}", label, f"end {style}", right=-10)
        for (label, style), y in zip(labels, _spread(tops, height), strict=True)
    ]
    step = math.ceil(columns / 12)
    room = max(3, 66 // math.ceil(columns / step))  # letters under a column
    words = [_short(name, room) for name in names] or [plain(first + int(c * wide)) for c in range(columns)]
    ticks = [((c + 0.47) / columns, words[c]) for c in range(0, columns, step)]
    return _chart(
        _grid(ticks, [], "") + _stretched("".join(paths)) + "".join(beside),
        title=title,
        height=math.ceil(height),
        left=_width([label for label, _ in labels]),
        right=8,
    )
