"""The page "Which method should I take?": comparisons out of the tables' records, as a list and as a picture.

`experiments/which_method.toml` names them; every figure comes with its noise and the table it is from.
"""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from hardy.config.values import construct
from hardy.errors import unknown
from hardy.reproduce.definition import ResultTable, read_table, read_toml
from hardy.reproduce.drawing import as_svg, svg_words
from hardy.reproduce.published_pages import SURE, RowDifference, chosen_records, row_difference, shown_difference
from hardy.reproduce.records import read_records

FILE, PAGE, PICTURE = "which_method.toml", "docs/which_method.md", "docs/images/which_method.svg"
_WIDTH, _NAMES, _PITCH, _HEAD = 900, 430, 22, 30
_CROWDED = 120
"""points between the ends from which every second line is left out, so that their numbers do not touch"""


@dataclass(frozen=True, kw_only=True)
class MethodChoice:
    """A method against another, in one column of a table."""

    when: str
    """how the clients differ, or what is needed"""
    take: str
    rather_than: str
    table: str
    """PAPER/TABLE"""
    row: str
    against: str
    column: str = "clean"
    quick: bool = False
    """of the short form on the embedded digits"""
    lower_is_better: bool = False


@dataclass(frozen=True, kw_only=True)
class MeasuredChoice:
    """The same with what the records say of it."""

    choice: MethodChoice
    table: ResultTable
    found: RowDifference | None

    @property
    def embedded(self) -> bool:
        return self.choice.quick or "embedded" in self.table.reduced

    @property
    def seeds(self) -> str:
        count = self.found.seeds if self.found else 0
        return f"{count} seed{'s' * (count != 1)}"


def read_choices(folder: Path) -> list[MeasuredChoice]:
    """The comparisons of the file, measured."""
    path = folder / FILE
    made = []
    for at, given in enumerate(read_toml(path).get("choices", [])):
        choice: MethodChoice = construct(MethodChoice, given, f"{path}, choice {at + 1}")
        table = read_table(folder / f"{choice.table}.toml")
        for row in (choice.row, choice.against):
            if row not in table.rows:
                raise unknown(f"row of {choice.table} in {path}", row, table.rows)
        records = read_records(table, quick=choice.quick)
        own, other = (chosen_records(table, records, row) for row in (choice.row, choice.against))
        made.append(MeasuredChoice(choice=choice, table=table, found=row_difference(own, other, choice.column)))
    return made


def advice_markdown(choices: list[MeasuredChoice]) -> str:
    """The comparisons as a table of the page."""
    lines = ["| clients | take | rather than | measured | in | table |", "|---|---|---|---|---|---|"]
    before = ""
    for one in choices:
        choice = one.choice
        data = "embedded digits" if one.embedded else "real data"
        shown = shown_difference(one.found, one.table.unit) or "not run yet"
        column = "" if choice.column == "clean" else f", {choice.column}"
        place = f"[{choice.table}](../experiments/{choice.table.partition('/')[0]}/README.md)"
        when = choice.when if choice.when != before else ""
        before = choice.when
        lines.append(
            f"| {when} | {choice.take} | {choice.rather_than} | {shown}{column} | {data}, {one.seeds} | {place} |"
        )
    return "\n".join(lines)


def draw_advice(choices: list[MeasuredChoice]) -> str:
    """A line a comparison: the difference in points, two standard errors to either side, by what clients differ in."""
    known = [one for one in choices if one.found is not None and one.found.noise is not None]
    reach = 10.0 * (1 + max((_points(one)[0] + _points(one)[1] for one in known), default=0.0) // 10)
    low = -10.0 * (1 + max((_points(one)[1] - _points(one)[0] for one in known), default=0.0) // 10)
    groups = list(dict.fromkeys(one.choice.when for one in known))
    height = 60 + _PITCH * len(known) + _HEAD * len(groups) + 30

    def place(value: float) -> float:
        return _NAMES + (_WIDTH - _NAMES - 30) * (value - low) / (reach - low)

    title = "What the measured tables say, in points, ± 2 standard errors"
    body = [
        svg_words(12, 18, title, weight="bold"),
        svg_words(12, 36, "filled: real data; ring: embedded digits; grey: within noise"),
    ]
    step = 10 if reach - low <= _CROWDED else 20
    for value in range(-(int(-low) // step) * step, int(reach) + 1, step):
        stroke = "#888" if value == 0 else "#e4e4e4"
        body.append(f'<path d="M{place(value):.1f} 48V{height - 24}" stroke="{stroke}"/>')
        body.append(svg_words(place(value), height - 8, f"{value:+d}" if value else "0", anchor="middle"))
    y = 56.0
    for group in groups:
        y += _HEAD
        body.append(svg_words(12, y - 8, f"clients {group}", weight="bold"))
        for one in (one for one in known if one.choice.when == group):
            body += _line(one, y + _PITCH / 2, place)
            y += _PITCH
    return as_svg(_WIDTH, height, body, title)


def _points(one: MeasuredChoice) -> tuple[float, float]:
    """The gain in points, and two standard errors of it; where lower is better, less is a gain."""
    assert one.found is not None and one.found.noise is not None
    scale = 100.0 if one.table.unit == "%" else 1.0
    return scale * one.found.value * (-1 if one.choice.lower_is_better else 1), scale * SURE * one.found.noise


def _line(one: MeasuredChoice, y: float, place: Callable[[float], float]) -> list[str]:
    value, error = _points(one)
    assert one.found is not None
    colour = "#999" if not one.found.certain else "#1f4e8c" if value > 0 else "#c4510d"
    fill = "#fff" if one.embedded else colour
    words = f"{one.choice.take} over {one.choice.rather_than}"
    if one.choice.column != "clean":
        words += f", {one.choice.column}"
    note = f"<title>{escape(words)}: {value:+.1f} ± {error / SURE:.1f} ({escape(one.choice.table)})</title>"
    left, right = place(value - error), place(value + error)
    return [
        svg_words(_NAMES - 14, y + 4, words, anchor="end"),
        f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="{colour}" stroke-width="2"/>',
        f'<circle cx="{place(value):.1f}" cy="{y:.1f}" r="4.5" fill="{fill}" stroke="{colour}" stroke-width="2">{note}'
        "</circle>",
    ]


__all__ = ["FILE", "PAGE", "PICTURE", "advice_markdown", "draw_advice", "read_choices"]
