"""Tables as Markdown, with the paper's figures and the noise beside ours; pages are written between markers."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from hardy.errors import HardyError
from hardy.reproduce.definition import ResultTable, split_column
from hardy.reproduce.records import Record, value_of
from hardy.reproduce.row_tuning import tuning_words

ENOUGH_SEEDS = 3
"""fewer say too little of the noise between seeds for a difference to be set in bold"""
_NO_FIGURE = {"standard_error": None, "images": None}
SURE = 2.0
"""standard errors a difference must have to be told from noise"""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A column of a row over its seeds."""

    values: tuple[float, ...]
    seeds: int
    deviation: float | None
    """between seeds; None: of one seed"""
    error: float | None
    """standard error of the test sample; None: not known"""
    bound: bool = False
    """whether `error` is at most that: p (1 - p) / n of all images together"""
    images: int | None = None

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def noise(self) -> float | None:
        """Standard error of the mean: of the test sample and, where there are several, of the seeds."""
        if self.error is None:
            return None
        return math.hypot(self.error, (self.deviation or 0.0) / math.sqrt(self.seeds))


def chosen_records(table: ResultTable, records: Sequence[Record], row: str) -> list[Record]:
    """The records of a row that are shown: those of one configuration and length, the longest, of these the newest."""
    groups: dict[tuple[int, str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record["row"] == row:
            mark = record["configuration"]
            groups[record["rounds"] or 0, record["date"] if mark else "", mark or ""].append(record)
    merged: dict[tuple[int, str], list[Record]] = defaultdict(list)
    for (rounds, _, mark), found in sorted(groups.items(), key=lambda item: item[0]):
        merged[rounds, mark].extend(found)
    if not merged:
        return []
    best = max(merged, key=lambda key: (key[0], max(r["date"] if key[1] else "" for r in merged[key])))
    return sorted(merged[best], key=lambda r: -1 if r["seed"] is None else r["seed"])


def score(records: Sequence[Record], column: str) -> Score | None:
    """A column over the seeds of a row; None: nothing measured."""
    measure, key = split_column(column)
    known = [(r["figures"].get(measure, _NO_FIGURE), v) for r in records if (v := value_of(r, column)) is not None]
    if not known:
        return None
    values = tuple(value for _, value in known)
    figure = known[0][0]
    deviation = stdev(values) if len(values) > 1 else _kept_deviation(figure, key)
    count = len(values) if len(values) > 1 else figure.get("seeds", 1)
    error, bound = None, False
    if key == "mean":
        errors = [f["standard_error"] for f, _ in known if f["standard_error"] is not None]
        if len(errors) == len(known):
            error = mean(errors)
        elif all(f["images"] for f, _ in known) and 0 <= mean(values) <= 1:
            share = mean(values)
            error, bound = math.sqrt(share * (1 - share) / figure["images"]), True
    return Score(values=values, seeds=count, deviation=deviation, error=error, bound=bound, images=figure["images"])


def _kept_deviation(figure: Record, key: str) -> float | None:
    """Between seeds, of a record that is itself a mean over them."""
    name = key.replace(" ", "_")
    kept = figure.get("deviation" if key == "mean" else f"{name}_deviation")
    found: float | None = (figure.get("by_domain_deviation") or {}).get(key) if kept is None else kept
    return found


@dataclass(frozen=True, kw_only=True)
class RowDifference:
    """A row's figure against another's."""

    value: float
    noise: float | None
    seeds: int
    """the fewer of the two rows'"""

    @property
    def certain(self) -> bool | None:
        """Whether it can be told from noise; None: the noise is not known."""
        return None if self.noise is None else abs(self.value) > SURE * self.noise

    @property
    def bold(self) -> bool:
        return self.certain is True and self.seeds >= ENOUGH_SEEDS


def row_difference(own: Sequence[Record], other: Sequence[Record], column: str) -> RowDifference | None:
    """Seed by seed where both have the same seeds, so that what they share does not count as noise."""
    one, two = score(own, column), score(other, column)
    if one is None or two is None:
        return None
    value, count = one.mean - two.mean, min(one.seeds, two.seeds)
    if one.error is None or two.error is None:
        return RowDifference(value=value, noise=None, seeds=count)
    sample = math.hypot(one.error, two.error)
    pairs = {r["seed"]: v for r in other if (v := value_of(r, column)) is not None}
    paired = [v - pairs[r["seed"]] for r in own if (v := value_of(r, column)) is not None and r["seed"] in pairs]
    if len(paired) > 1 and len(paired) == one.seeds == two.seeds:
        between = stdev(paired) / math.sqrt(len(paired))
    else:
        between = math.hypot(*((s.deviation or 0.0) / math.sqrt(s.seeds) for s in (one, two)))
    return RowDifference(value=value, noise=math.hypot(sample, between), seeds=count)


def in_unit(value: float, unit: str, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}" if unit == "%" else f"{value:.3g}"


def shown_score(found: Score | None, unit: str) -> str:
    """43.5 ± 0.4 (3): mean, deviation and number of seeds."""
    if found is None:
        return ""
    deviation = found.deviation
    spread = "" if deviation is None else f" ± {in_unit(deviation, unit) if unit == '%' else format(deviation, '.1g')}"
    return f"{in_unit(found.mean, unit)}{spread} ({found.seeds})"


def shown_difference(found: RowDifference | None, unit: str) -> str:
    """+4.1 ± 0.7, bold where it is certain over enough seeds; a difference within noise says so."""
    if found is None:
        return ""
    words = f"{'−' if found.value < 0 else '+'}{in_unit(abs(found.value), unit)}"
    if found.noise is None:
        return f"{words}, noise not known"
    if not found.certain:
        return f"{words} ± {in_unit(found.noise, unit)}: within noise"
    words = f"**{words}**" if found.bold else words
    return f"{words} ± {in_unit(found.noise, unit)}"


def table_markdown(table: ResultTable, records: Sequence[Record], *, quick: bool = False) -> str:
    """The table: rows in the order of the TOML, those without any figure left out."""
    columns = table.columns_of(quick=quick)
    compared = [c for c in columns if c in table.compare or (quick and table.compare and split_column(c)[1] == "mean")]
    published = [] if quick else [c for c in columns if any(c in row.paper for row in table.rows.values())]
    found = {row: chosen_records(table, records, row) for row in table.rows}
    rows = [row for row in table.rows if found[row] or (table.rows[row].paper and not quick)]
    shorter = {row for row in rows if found[row] and _shorter(table, row, found[row], quick=quick)}
    others = {row: table.compared_with(row) for row in rows}
    several = len({name for name in others.values() if name}) > 1
    heads = ["", *(f"{c}, paper" for c in published), *columns]
    if compared:
        heads += [*(f"{c}, difference" for c in compared), *(["from"] if several else [])]
    if shorter:
        heads.append("rounds")
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        cells = [row, *(_paper_cell(table, row, column) for column in published)]
        cells += [shown_score(score(found[row], column), table.unit) for column in columns]
        other = others[row]
        gaps = [row_difference(found[row], found.get(other, []), column) if other else None for column in compared]
        if compared:
            cells += [
                *(shown_difference(gap, table.unit) for gap in gaps),
                *([other if any(gaps) else ""] if several else []),
            ]
        if shorter:
            cells.append(f"{found[row][0]['rounds']:,}" if found[row] else "")
        lines.append(cells)
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{text}\n\n{_caption(table, found, columns, others, compared)}"


def _paper_cell(table: ResultTable, row: str, column: str) -> str:
    value = table.rows[row].paper.get(column)
    return "" if value is None else f"{value:g}"


def _shorter(table: ResultTable, row: str, records: Sequence[Record], *, quick: bool) -> bool:
    wanted = table.row_rounds(row, quick=True) if quick else table.wanted_rounds(row)
    rounds = records[0]["rounds"]
    return rounds is not None and bool(rounds != wanted)


def _caption(
    table: ResultTable,
    found: dict[str, list[Record]],
    columns: Sequence[str],
    others: dict[str, str],
    compared: Sequence[str],
) -> str:
    """Where the figures are from, and how far the test sample lets them be trusted."""
    records = [record for row in found.values() for record in row]
    if not records:
        return "Not run."
    worst: dict[int, Score] = {}
    for row in found.values():
        for one in (score(row, column) for column in columns):
            if one is not None and one.error is not None and one.images:
                known = worst.get(one.images)
                worst[one.images] = one if known is None or one.error > (known.error or 0.0) else known
    errors = [
        f"{'at most ' if one.bound else 'up to '}{in_unit(one.error or 0.0, table.unit)} on {images:,} images"
        for images, one in sorted(worst.items(), reverse=True)
    ]
    parts = ["Ours: mean ± deviation (seeds)."]
    parts += [f"Standard error of the test sample: {', '.join(errors)}."] if errors else []
    names = sorted({name for name in others.values() if name})
    if compared and len(names) == 1:
        parts.append(f"Differences are from {names[0]}.")
    if compared and any(len(row) == 1 and row[0]["seed"] is not None for row in found.values()):
        parts.append(f"Bold needs {ENOUGH_SEEDS} seeds: the noise between seeds is not in a difference of one.")
    devices = ", ".join(sorted({r["device"] or "device not recorded" for r in records}))
    dates = sorted({r["date"] for r in records if r["date"]})
    when = "date not recorded" if not dates else dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    parts.append(f"{devices}; {when}.")
    return " ".join(parts)


def block(name: str) -> re.Pattern[str]:
    """What stands between the markers of a name."""
    return re.compile(
        rf"(<!-- {re.escape(name)}, written by `hardy reproduce --write` -->\n).*?(<!-- end -->)", re.DOTALL
    )


def written(text: str, name: str, content: str, where: str) -> str:
    """The page with a block's content."""
    made, count = block(name).subn(lambda found: f"{found[1]}\n{content}\n\n{found[2]}", text)
    if count != 1:
        raise HardyError(
            f"{where} has {count} places for {name!r}; it needs one: a line "
            f"`<!-- {name}, written by `hardy reproduce --write` -->` and below it `<!-- end -->`."
        )
    return made


def table_block(table: ResultTable, records: Sequence[Record], quick: Sequence[Record]) -> str:
    """What stands in a page for a table: on its data, and below that with --quick."""
    parts = []
    if records or any(row.paper for row in table.rows.values()):
        parts += [table_markdown(table, records), tuning_words(table, table.rows, quick=False)]
    if quick:
        parts += ["On the embedded digits (`--quick`):", table_markdown(table, quick, quick=True)]
        parts.append(tuning_words(table, table.rows, quick=True))
    parts = list(filter(None, parts))
    return "\n\n".join(parts) or "Not run."
