"""Pictures drawn from records, as SVG files that stand alone."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from hardy.errors import HardyError, unknown
from hardy.reproduce.definition import ResultPicture, ResultTable
from hardy.reproduce.published_pages import chosen_records, in_unit, score
from hardy.reproduce.records import Record, read_records

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BELOW = 760, 320, 46, 250, 40
_PITCH, _NAMES = 26, 250
_APART = 5.0
"""between the columns of a row, so that their bars do not cover each other"""
_FEW = 12
"""points that are marked one by one"""
_COLOURS = ("#1f4e8c", "#c4510d", "#3c7a2e", "#8a2d6b", "#6b6b6b", "#0f8a8a", "#a07a00", "#444")
_TRUST = 2.0
"""standard errors that a bar of error reaches to either side"""
Curve = list[tuple[float, float]]


def draw(picture: ResultPicture, tables: Mapping[str, ResultTable]) -> str:
    """The picture that paper.toml asks for."""
    if picture.table not in tables:
        raise unknown(f"table of picture {picture.file}", picture.table, tables)
    table = tables[picture.table]
    records = read_records(table, quick=picture.quick)
    found = {row: chosen_records(table, records, row) for row in picture.rows}
    if missing := [row for row in found if row not in table.rows]:
        raise unknown(f"row of picture {picture.file}", missing[0], table.rows)
    if picture.kind == "rows":
        return _draw_rows(picture, table, found)
    curves: dict[str, Curve] = {}
    for row, words in picture.rows.items():
        one = found[row][:1]
        if picture.kind == "rounds":
            points = [(float(at), share) for record in one for at, share in record["curve"]]
        elif picture.kind == "points":
            points = _points(found[row], picture.columns)
        else:
            raise unknown(f"kind of picture {picture.file}", picture.kind, ("rows", "rounds", "points"))
        if points:  # rows that share their words share a curve
            curves[words] = [*curves.get(words, []), *points]
    return _draw_curves(picture, curves)


def _points(records: Sequence[Record], columns: Sequence[str]) -> Curve:
    """(x, y) of each pair of columns that the records have, their means over the seeds; x in % where it is an accuracy,
    counts in millions."""
    found = []
    for x, y in zip(columns[::2], columns[1::2], strict=True):
        across, up = score(records, x), score(records, y)
        if across is not None and up is not None:
            found.append((100 * across.mean if across.mean <= 1 else across.mean / 1e6, up.mean))
    return found


def _draw_rows(picture: ResultPicture, table: ResultTable, found: Mapping[str, list[Record]]) -> str:
    """A line a row: ours with its error, the paper's as a ring; a colour a column."""
    scores = {row: [score(records, column) for column in picture.columns] for row, records in found.items()}
    scale = 100 if table.unit == "%" else 1.0
    papers = {row: [table.rows[row].paper.get(column) for column in picture.columns] for row in found}
    values = [p for row in papers.values() for p in row if p]
    for one in (one for row in scores.values() for one in row if one):
        reach = _TRUST * (one.noise or 0.0)
        values += [scale * (one.mean - reach), scale * (one.mean + reach)]
    if not values:
        raise HardyError(f"picture {picture.file} has nothing to show: no row of {table.path} is measured.")
    step = picture.step
    low, high = step * int(min(values) // step), step * (int(max(values) // step) + 1)
    if table.unit == "%":  # no accuracy lies beyond, however wide its bar of error
        low, high = max(low, 0), min(high, 100)

    def place(value: float) -> float:
        return _NAMES + (_WIDTH - _NAMES - 30) * (min(max(value, low), high) - low) / (high - low)

    top = 52
    height = top + _PITCH * len(found) + 26
    body = [svg_words(12, 16, picture.title, weight="bold")]
    across = 12.0
    for column, colour in zip(picture.columns, _COLOURS, strict=False):
        body += [f'<circle cx="{across + 5:.0f}" cy="33" r="4.5" fill="{colour}"/>', svg_words(across + 14, 37, column)]
        across += 36 + 7.2 * len(column)
    if any(p for row in papers.values() for p in row):
        body += [f'<circle cx="{across + 5:.0f}" cy="33" r="4" fill="none" stroke="#666" stroke-width="1.5"/>']
        body += [svg_words(across + 14, 37, "the paper's")]
    for at in range(round((high - low) / step) + 1):
        x = place(low + at * step)
        body.append(f'<path d="M{x:.1f} {top - 4}V{height - 24}" stroke="#ddd"/>')
        body.append(svg_words(x, height - 8, f"{low + at * step:g}", anchor="middle"))
    for at, (row, words) in enumerate(picture.rows.items()):
        middle = top + _PITCH * at + _PITCH / 2
        body.append(svg_words(_NAMES - 12, middle + 4, words, anchor="end"))
        for place_in_row, (s, p, colour) in enumerate(zip(scores[row], papers[row], _COLOURS, strict=False)):
            y = middle + _APART * (place_in_row - (len(scores[row]) - 1) / 2)
            if p is not None:
                body.append(
                    f'<circle cx="{place(p):.1f}" cy="{y:.1f}" r="4" fill="none" stroke="{colour}" stroke-width="1.5"/>'
                )
            if s is None:
                continue
            x, reach = scale * s.mean, scale * _TRUST * (s.noise or 0.0)
            body.append(
                f'<path d="M{place(x - reach):.1f} {y:.1f}H{place(x + reach):.1f}" stroke="{colour}" stroke-width="2"/>'
            )
            note = f"<title>{escape(words)}: {in_unit(s.mean, table.unit)}</title>"
            body.append(f'<circle cx="{place(x):.1f}" cy="{y:.1f}" r="4.5" fill="{colour}">{note}</circle>')
    return as_svg(_WIDTH, height, body, picture.title)


def _draw_curves(picture: ResultPicture, curves: Mapping[str, Curve]) -> str:
    """Curves, each named at its end with its last value."""
    if not curves:
        raise HardyError(f"picture {picture.file} has nothing to show: no row of {picture.table} has a curve.")
    step, ups = picture.step, [100 * y for curve in curves.values() for _, y in curve]
    low, high = step * int(min(ups) // step), step * (int(max(ups) // step) + 1)
    xs = [x for curve in curves.values() for x, _ in curve]
    first, last = (0.0, max(xs)) if picture.kind == "rounds" else (min(xs), max(xs))
    top = 30.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / ((last - first) or 1.0)
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * across, top + (_HEIGHT - _BELOW - top) * (high - y) / (high - low)

    body = [svg_words(12, 16, picture.title, weight="bold")]
    for at in range(round((high - low) / step) + 1):
        y = low + at * step
        (x0, down), (x1, _) = place(first, y), place(last, y)
        body.append(f'<path d="M{x0:.0f} {down:.1f}H{x1:.0f}" stroke="#ddd"/>')
        body.append(svg_words(x0 - 8, down + 4, f"{y:g}", anchor="end"))
    for x in _round_numbers(first, last):
        body.append(svg_words(place(x, 0)[0], _HEIGHT - 20, f"{x:g}", anchor="middle"))
    body.append(svg_words(place((first + last) / 2, 0)[0], _HEIGHT - 4, picture.x_name, anchor="middle"))
    ends = sorted((place(curve[-1][0], 100 * curve[-1][1])[1], words) for words, curve in curves.items())
    tops: dict[str, float] = {}
    for end, words in ends:  # names from the top down, none upon another
        tops[words] = max(end + 4, max(tops.values(), default=0) + 15)
    for (words, curve), colour in zip(curves.items(), _COLOURS * 2, strict=False):
        path = "L".join("{:.1f} {:.1f}".format(*place(x, 100 * y)) for x, y in curve)
        body.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(curve) <= _FEW:
            spots = (place(x, 100 * y) for x, y in curve)
            body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots]
        body.append(svg_words(_WIDTH - _RIGHT + 8, tops[words], f"{words} {100 * curve[-1][1]:.1f}", colour=colour))
    return as_svg(_WIDTH, _HEIGHT, body, picture.title)


def _round_numbers(first: float, last: float) -> list[float]:
    """Three to seven of them between two numbers."""
    power = 10.0 ** math.floor(math.log10((last - first) / 3 or 1.0))
    step = next(m * power for m in (10, 5, 2, 1) if (last - first) / (m * power) >= 3)
    return [at * step for at in range(math.ceil(first / step), math.floor(last / step) + 1)]


def svg_words(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#333", weight: str = "normal"
) -> str:
    style = f'text-anchor="{anchor}" fill="{colour}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def as_svg(width: float, height: float, body: Sequence[str], title: str) -> str:
    head = (
        f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}"'
    )
    style = 'font-family="sans-serif" font-size="13"'
    inner = "\n".join(['<rect width="100%" height="100%" fill="#fff"/>', *body])
    return f"<svg {head} {style}>\n{inner}\n</svg>\n"
