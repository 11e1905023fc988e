"""What every chart is made of. Positions are percentages of the plot area. Curves and cells, which SVG cannot place by
percentage, lie in an inner picture of 1000 x 1000 units that is stretched without its strokes.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise

import numpy as np

from hardy.report.stored_run import Point

Format = Callable[[float], str]
COLOURS = 8
LINE = 15
"""pixels of a line of text"""
_CHARACTER, _TICK = 7.4, 10.0  # pixels: a character, room beside a label


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


def ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """About four round numbers that enclose low and high."""
    if math.isclose(low, high):  # a constant is drawn against nought
        low, high = min(low, 0.0), max(high, 0.0) or float(low == 0.0)
    raw = max((high - low) / 4, least)
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    return [k * step for k in range(first, max(math.ceil(high / step - 1e-9), first + 1) + 1)]


def spread_lines(tops: Sequence[float], bottom: float) -> list[float]:
    """Move text lines apart, the least way down or up, so that none overlap."""
    order = sorted(range(len(tops)), key=lambda at: tops[at])
    placed = list(tops)
    for above, at in pairwise(order):
        placed[at] = max(placed[at], placed[above] + LINE)
    limit = bottom
    for at in reversed(order):
        placed[at] = min(placed[at], limit)
        limit = placed[at] - LINE
    return placed


def label_width(labels: Sequence[str]) -> int:
    return math.ceil(_CHARACTER * max((len(label) for label in labels), default=0) + _TICK)


def shortened(label: str, length: int = 16) -> str:
    return label if len(label) <= length else label[: length - 1].rstrip() + "…"


def text_at(x: str, y: str, label: str, style: str, *, right: float = 0, down: float = 4, name: str = "") -> str:
    """Text at a place of the plot area, moved by pixels; 4 down centres it on its place. `name` is what it names."""
    whose = f' data-name="{escape(name)}"' if name else ""
    return f'<text x="{x}" y="{y}" dx="{right:g}" dy="{down:g}" class="{style}"{whose}>{escape(label)}</text>'


def stretched(body: str) -> str:
    return f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">{body}</svg>'


def chart_frame(body: str, *, title: str, height: float, left: int, right: int, below: int = 22) -> str:
    return (
        f'<svg class="chart" role="img" aria-label="{escape(title)}" height="{height:g}" '
        f'style="width:calc(100% - {left + right}px);margin:14px {right}px {below}px {left}px">{body}</svg>'
    )


def grid_lines(x: Sequence[tuple[float, str]], y: Sequence[tuple[float, str]], x_name: str) -> str:
    """Rules and their labels, at fractions from the left and from the top."""
    parts = []
    for at, label in y:
        parts.append(f'<line x2="100%" y1="{at:.2%}" y2="{at:.2%}" class="rule"/>')
        parts.append(text_at("0", f"{at:.2%}", label, "tick end", right=-8))
    parts += (text_at(f"{at:.2%}", "100%", label, "tick middle", down=17) for at, label in x)
    if x_name:
        parts.append(text_at("100%", "100%", x_name, "tick", right=26, down=17))
    return "".join(parts)


def path_through(points: Sequence[Point]) -> str:
    return "M" + " ".join(f"{1000 * x:.0f} {1000 * y:.0f}" for x, y in points)


def series_style(at: int) -> str:
    return f"c{at % COLOURS}" + (" dashed" if at // COLOURS % 2 else "")
