"""Every table and figure of the papers with its state, and the pages that the program writes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hardy.core.files import write_atomic
from hardy.errors import HardyError, unknown
from hardy.reproduce import advice
from hardy.reproduce.definition import Paper, ResultTable, read_paper, read_table, table_files
from hardy.reproduce.drawing import draw
from hardy.reproduce.published_pages import block, chosen_records, table_block, written
from hardy.reproduce.records import read_records

STATES = ("full length", "all rounds", "shorter", "reduced", "embedded only", "not run")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of the list."""

    paper: str
    published: str
    """as the paper calls it; absent: ours"""
    table: str
    """PAPER/TABLE; absent: nothing to run"""
    shows: str
    state: str


def papers(folder: Path) -> dict[str, Paper]:
    """The five papers, then what stands beside them."""
    found = {path.parent.name: read_paper(path.parent) for path in sorted(folder.glob("*/paper.toml"))}
    return dict(sorted(found.items(), key=lambda item: item[1].ours))


def state(table: ResultTable) -> str:
    """How far a table is measured. Full length is said of a paper's own table in its own setting alone."""
    records = read_records(table, quick=False)
    runnable = table.rows_of()
    shown = {row: chosen_records(table, records, row) for row in runnable}
    run = {row: found for row, found in shown.items() if found}
    if not run:
        if read_records(table, quick=True):
            return "embedded only"
        return f"not run: {table.not_run or 'GPU time'}"
    part = "" if len(run) == len(runnable) else f"{len(run)} of {len(runnable)} rows, "
    seeds = [len(found) if found[0]["seed"] is not None else _counted(found) for found in run.values()]
    counted = f"{_span(seeds)} seed{'s' * (max(seeds) > 1)}"
    short = {
        row: found[0]["rounds"]
        for row, found in run.items()
        if found[0]["rounds"] is not None and found[0]["rounds"] < table.wanted_rounds(row)
    }
    if short:
        wanted = _span([table.wanted_rounds(row) for row in short])
        smaller = f"; {table.reduced}" if table.reduced else ""
        return f"shorter: {_span(list(short.values()))} of {wanted} rounds, {part}{counted}{smaller}"
    if table.reduced:
        return f"reduced: {table.reduced}; {part}{counted}"
    return f"{'full length' if table.published else 'all rounds'}, {part}{counted}"


def _span(values: Sequence[int]) -> str:
    """1 to 3, or 3 where all are alike."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _counted(found: list[dict[str, object]]) -> int:
    figures = found[0]["figures"]
    assert isinstance(figures, dict)
    return max((figure.get("seeds", 1) for figure in figures.values()), default=1)


def entries(folder: Path, paper: str = "") -> Iterator[Entry]:
    """Every table and figure, in the papers' order; then tables of ours."""
    known = papers(folder)
    if paper and paper not in known:
        raise unknown("paper", paper, known)
    for name, one in known.items():
        if paper and name != paper:
            continue
        tables = {path.stem: read_table(path) for path in table_files(folder, name)}
        states = {stem: state(table) for stem, table in tables.items()}
        for published, place in one.published.items():
            for stem in place.tables:
                yield Entry(
                    paper=name,
                    published=published,
                    table=f"{name}/{stem}",
                    shows=place.shows if len(place.tables) == 1 else f"{place.shows}: {tables[stem].title}",
                    state=states[stem],
                )
            if place.why:
                yield Entry(paper=name, published=published, table="", shows=place.shows, state=place.why)
        taken = {stem for place in one.published.values() for stem in place.tables}
        for stem, table in tables.items():
            if stem not in taken:
                yield Entry(paper=name, published="", table=table.path, shows=table.title, state=states[stem])


def listing(folder: Path, paper: str = "") -> str:
    """The list as text, a paper after the other."""
    found, lines = list(entries(folder, paper)), []
    wide = max(len(entry.table) for entry in found)
    for name, one in papers(folder).items():
        own = [entry for entry in found if entry.paper == name]
        if own:
            lines += ["", f"{one.title} ({one.reference})"]
        lines += [f"  {e.table or '-':<{wide}}  {e.published or 'ours':<10}  {e.shows}: {e.state}" for e in own]
    counts = {word: sum(entry.state.startswith(word) for entry in found) for word in STATES}
    counts["in words"] = len(found) - sum(counts.values())
    total = ", ".join(f"{count} {word}" for word, count in counts.items())
    return "\n".join([*lines, "", f"{len(found)} tables and figures: {total}"]).lstrip("\n")


def list_markdown(folder: Path, paper: str = "") -> str:
    """The list as a table of a page."""
    lines = ["| table | in the paper | shows | state |", "|---|---|---|---|"]
    for entry in entries(folder, paper):
        up = "" if paper else f"{entry.paper}/"
        place = f"[{entry.table}]({up}{entry.table.partition('/')[2]}.toml)" if entry.table else ""
        first = place or f"{entry.paper}"
        lines.append(f"| {first} | {entry.published or 'ours'} | {entry.shows} | {entry.state} |")
    return "\n".join(lines)


def page_contents(folder: Path) -> dict[Path, str]:
    """Every page and picture that the program writes, as it should be."""
    made: dict[Path, str] = {}
    for name, one in papers(folder).items():
        tables = [read_table(path) for path in table_files(folder, name)]
        page = folder / name / "README.md"
        head = f"**Claim** ({one.reference}): {one.claim}\n\n**Verdict.** {one.verdict}\n\n"
        text = written(_read(page), "list", head + list_markdown(folder, name), str(page))
        for table in tables:
            content = table_block(table, read_records(table, quick=False), read_records(table, quick=True))
            head = f"**{table.title}** ([{table.name}.toml]({table.name}.toml)): {state(table)}."
            text = written(text, table.path, f"{head}\n\n{content}", str(page))
        made[page] = text
        by_name = {table.name: table for table in tables}
        for picture in one.pictures:
            made[(folder / name / picture.file).resolve()] = draw(picture, by_name)
    if (folder / advice.FILE).is_file():
        choices, page = advice.read_choices(folder), folder.parent / advice.PAGE
        made[page] = written(_read(page), "choices", advice.advice_markdown(choices), str(page))
        made[folder.parent / advice.PICTURE] = advice.draw_advice(choices)
    front, page = folder / "README.md", folder.parent / "README.md"
    text = f"{_verdicts(papers(folder))}\n\n{list_markdown(folder)}"
    made[front] = written(_read(front), "list", text, str(front))
    if page.is_file() and block("verdicts").search(first := page.read_text("utf-8")):
        five = {name: one for name, one in papers(folder).items() if not one.ours}
        made[page] = written(first, "verdicts", _verdicts(five, f"{folder.name}/"), str(page))
    return made


def _verdicts(known: dict[str, Paper], up: str = "") -> str:
    lines = [f"| [{one.title}]({up}{name}/README.md) | {one.verdict} |" for name, one in known.items()]
    return "\n".join(["| paper | verdict |", "|---|---|", *lines])


def _read(page: Path) -> str:
    try:
        return page.read_text("utf-8")
    except OSError as error:
        raise HardyError(
            f"cannot read {page}: {error.strerror}. Every paper has a README.md with places for its tables."
        ) from None


def write_pages(folder: Path) -> list[Path]:
    """Writes what is not as it should be; the files that changed."""
    changed = []
    for path, text in page_contents(folder).items():
        if not path.is_file() or path.read_text("utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text.encode())
            changed.append(path)
    return changed
