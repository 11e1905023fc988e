"""Charts of counts: columns over rounds, and cells of rows and columns."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hardy.report.chart import (
    COLOURS,
    LINE,
    chart_frame,
    grid_lines,
    label_width,
    plain,
    series_style,
    shortened,
    spread_lines,
    stretched,
    text_at,
    ticks,
)

_LEVELS = 8


def stacked(counts: Mapping[str, Sequence[int]], *, title: str, x_name: str = "round") -> str:
    """Counts per round as stacked columns, one colour a label; past 120, neighbours share a column."""
    rounds = max((len(values) for values in counts.values()), default=0)
    if not any(map(sum, counts.values())):
        return ""
    columns = min(rounds, 120)
    place = np.arange(rounds) * columns // rounds
    binned = {label: np.bincount(place, values, columns) for label, values in counts.items() if any(values)}
    rungs = ticks(0.0, float(sum(binned.values(), np.zeros(columns)).max()), least=1.0)
    base, width, height, paths, labels = np.zeros(columns), 1000 / columns, 140, [], []
    for at, (label, values) in enumerate(binned.items()):
        top = base + values
        boxes = "".join(
            f"M{width * c:.1f} {1000 - 1000 * base[c] / rungs[-1]:.0f}h{width * 0.8:.1f}"
            f"V{1000 - 1000 * top[c] / rungs[-1]:.0f}h-{width * 0.8:.1f}z"
            for c in np.flatnonzero(values)
        )
        paths.append(f'<path class="{series_style(at)}" d="{boxes}"/>')
        labels.append(f"{label} {int(values.sum())}")
        base = top
    names = [
        text_at("100%", f"{height - LINE * at - 6:g}", label, series_style(at), right=9)
        for at, label in enumerate(labels)
    ]
    across = [t for t in ticks(1.0, float(rounds), least=1.0) if 1 <= t <= rounds]
    grid = grid_lines(
        [((t - 0.5) / rounds, plain(t)) for t in across],
        [(1 - rung / rungs[-1], plain(rung)) for rung in rungs],
        x_name,
    )
    return chart_frame(
        grid + stretched("".join(paths)) + "".join(names),
        title=title,
        height=height,
        left=label_width([plain(rung) for rung in rungs]),
        right=max(label_width(labels), label_width([x_name]) + 26),
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
    pitch = min(12.0, max(3.0, 330 / rows, (LINE - 6) * len(small) / rows))  # room for every group's name
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
        labels.append((f"{shortened(name)} ({len(groups[name])})", style))
        tops.append((start + tall * len(group) / 2) * height / 1000)
        start += tall * len(group) + 6000 / height
    beside = [
        text_at("0", f"{y:.1f}", label, f"end {style}", right=-10)
        for (label, style), y in zip(labels, spread_lines(tops, height), strict=True)
    ]
    step = math.ceil(columns / 12)
    room = max(3, 66 // math.ceil(columns / step))  # letters under a column
    words = [shortened(name, room) for name in names] or [plain(first + int(c * wide)) for c in range(columns)]
    ticks = [((c + 0.47) / columns, words[c]) for c in range(0, columns, step)]
    return chart_frame(
        grid_lines(ticks, [], "") + stretched("".join(paths)) + "".join(beside),
        title=title,
        height=math.ceil(height),
        left=label_width([label for label, _ in labels]),
        right=8,
    )
