"""What a TOML of a published table or figure says: rows by name, what is measured of each, and the paper's figures."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import hardy
from hardy.attacks.threats import parse_threat
from hardy.config.values import construct
from hardy.core.engine import DataPart
from hardy.errors import HardyError, unknown
from hardy.user_code import import_code

CLEAN = "clean"
"""the measure without an attack"""
COST = "cost"
"""the measure whose keys are what the training took, such as "cost: macs a round"; it is always known"""
FOLDER = "experiments"
_OWN = ("title", "published", "not_run", "reduced", "quick")
"""keys that `like` does not take over"""


@dataclass(frozen=True, kw_only=True)
class RowMeasure:
    """How a figure is measured: accuracy of the last round on all test rows, unless it says otherwise."""

    name: str
    """what columns and records call it"""
    threat: str = ""
    """attack; absent: none"""
    rows: str = ""
    """pattern of the names of the rows that have it; absent: all"""
    limit: int | None = None
    """rows of each client; absent: all"""
    part: DataPart = "test"
    """test, validation or train rows"""
    width: float = 1.0
    robustness: float | None = None
    """level λ"""
    attack_branch: str | None = None
    predict_branch: str | None = None
    best: bool = False
    """of the networks at the best round on validation rows"""
    fine_tune: dict[str, Any] = field(default_factory=dict)
    """after every client went on alone, with the options of Run.fine_tune"""
    metric: str = ""
    """a metric that the run itself took in its last round, such as backdoor_success, or a number of that round's line
    in metrics.jsonl, such as drift or smoothness.L1, in place of accuracy"""

    def __post_init__(self) -> None:
        others = self.threat, self.limit, self.robustness, self.attack_branch, self.predict_branch, self.fine_tune
        if self.metric and (any(others) or self.best or self.part != "test" or self.width != 1):
            raise HardyError(
                f"measure {self.name!r}: metric {self.metric!r} is as the run took it, so options beside it have no "
                f"effect. Leave them out."
            )
        if self.threat:
            parse_threat(self.threat)
        re.compile(self.rows)


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A line of the table: overrides of the experiment, and what the paper has."""

    set: tuple[str, ...] = ()
    """overrides, such as ["method=fatbn"]; "@NAME" stands for a list under [overrides]"""
    quick: tuple[str, ...] | None = None
    """overrides with --quick; absent: those of `set`"""
    same: str = ""
    """TABLE/ROW of the same paper that this row shares its runs with"""
    against: str = ""
    """the row that this one is compared with; absent: the table's"""
    paper: dict[str, float] = field(default_factory=dict)
    """column -> the paper's figure"""
    not_run: str = ""
    """why it cannot be run here"""
    vary: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """the row's one parameter that tuning varies beside what the table varies for all rows, and its values"""
    options: dict[str, Any] = field(default_factory=dict)
    """what the table's program is told of the row"""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the options of every row are chosen, by `--tune`: the best on validation rows of a seed of its own."""

    vary: dict[str, tuple[Any, ...]]
    """key -> values that every row tries, such as {"training.rate" = [0.02, 0.1]}"""
    seed: int
    """which no figure of the table comes from"""
    by: tuple[str, ...] = (CLEAN,)
    """clean, threats and measures of the table, whose mean on validation rows decides"""
    limit: int | None = None
    """validation rows of each client; absent: all"""
    set: tuple[str, ...] = ()
    """overrides while it tunes, such as fewer rounds"""

    def __post_init__(self) -> None:
        if not self.vary or not all(self.vary.values()) or not self.by:
            raise HardyError('tuning needs values to vary and a measure to choose by, such as by = ["clean"].')


@dataclass(frozen=True, kw_only=True)
class Quick:
    """`--quick`: the table in minutes on a CPU, on the embedded digits."""

    experiment: str = ""
    set: tuple[str, ...] = ()
    rows: str = ""
    """pattern of the rows it has; absent: all"""
    columns: tuple[str, ...] = ()
    """absent: the table's"""
    limit: int | None = None
    """test rows of each client under attack; absent: all"""
    tuning: tuple[str, ...] | None = None
    """overrides while it tunes; absent: those of [tuning]"""


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """A published table or figure. Columns are "MEASURE" or "MEASURE: KEY", such as "pgd-7: worst client"; a measure
    that [[measures]] does not define is "clean" or a threat."""

    title: str
    published: str = ""
    """which table or figure of the paper; absent: ours"""
    experiment: str = ""
    """the experiment file beside it"""
    program: str = ""
    """a module beside it in place of an experiment: measure_row(options, seed, quick) gives the figures, each a number
    or its mean, images and standard_error"""
    code: str = ""
    """a module beside it with parts of its own"""
    set: tuple[str, ...] = ()
    """overrides of every row"""
    columns: tuple[str, ...] = (CLEAN,)
    compare: tuple[str, ...] = ()
    """columns whose differences are shown"""
    against: str = ""
    """the row that others are compared with"""
    unit: str = "%"
    """% for accuracies; "" for plain numbers"""
    rounds: int | None = None
    """the paper's length; absent: the experiment's"""
    reduced: str = ""
    """what is smaller than in the paper besides the rounds, in words"""
    not_run: str = ""
    """why nobody has run it, in words for the list; figures take its place"""
    overrides: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rows: dict[str, TableRow]
    measures: tuple[RowMeasure, ...] = ()
    tuning: Tuning | None = None
    quick: Quick | None = None

    # where it was read from
    paper: str = ""
    name: str = ""
    folder: Path = Path()

    @property
    def path(self) -> str:
        return f"{self.paper}/{self.name}"

    @cached_property
    def known_rounds(self) -> int:
        """Rounds of the experiment, whose TOML alone is read."""
        return int(read_toml(self.folder / self.experiment).get("rounds", 20)) if self.experiment else 0

    def row_rounds(self, row: str, *, quick: bool = False) -> int:
        """Rounds that a row is to be run for."""
        where = self.quick.experiment if quick and self.quick else ""
        usual = int(read_toml(self.folder / where).get("rounds", 20)) if where else self.known_rounds
        given = [word for word in self.overrides_of(row, quick=quick) if word.startswith("rounds=")]
        return int(given[-1].removeprefix("rounds=")) if given else usual

    def wanted_rounds(self, row: str) -> int:
        """Rounds at full length: the row's, or the paper's where the experiment is shorter."""
        return max(self.row_rounds(row), self.rounds or 0)

    def overrides_of(self, row: str, *, quick: bool = False) -> list[str]:
        """Every override of a row, in the order they apply."""
        one = self.rows[row]
        own = one.quick if quick and one.quick is not None else one.set
        common = self.quick.set if quick and self.quick else ()
        given = [*(self.set if not (quick and self.quick and self.quick.experiment) else ()), *common, *own]
        return [word for text in given for word in (self.overrides[text[1:]] if text.startswith("@") else (text,))]

    def columns_of(self, *, quick: bool = False) -> tuple[str, ...]:
        return self.quick.columns if quick and self.quick and self.quick.columns else self.columns

    def rows_of(self, *, quick: bool = False) -> list[str]:
        """The rows that can be run."""
        pattern = self.quick.rows if quick and self.quick else ""
        return [name for name, row in self.rows.items() if not row.not_run and re.search(pattern, name)]

    def measures_of(self, row: str, *, quick: bool = False) -> list[RowMeasure]:
        """What a row is measured by, for its columns."""
        asked = dict.fromkeys(split_column(column)[0] for column in self.columns_of(quick=quick))
        asked.pop(COST, None)
        found = []
        for name in asked:
            defined = [one for one in self.measures if one.name == name]
            if not defined:
                found.append(RowMeasure(name=name, threat="" if name == CLEAN or self.program else name))
            found += [one for one in defined if re.search(one.rows, row)]
        return found

    def compared_with(self, row: str) -> str:
        """The row a row is compared with; none: itself or nothing."""
        other = self.rows[row].against or self.against
        return "" if other == row else other

    def check(self) -> None:
        """Refuses what would have no effect or cannot be run."""
        where = f"{self.folder / self.name}.toml"
        if bool(self.experiment) == bool(self.program):
            raise HardyError(f"{where} needs an experiment or a program, one of the two.")
        if not (self.folder / (self.experiment or self.program)).is_file():
            raise HardyError(f"{where}: there is no {self.experiment or self.program} beside it. Check the name.")
        columns = {*self.columns, *self.columns_of(quick=True)}
        for column in self.compare:
            if column not in columns:
                raise unknown(f"column under compare in {where}", column, columns)
        for name, row in self.rows.items():
            for other in filter(None, (row.against, self.against)):
                if other not in self.rows:
                    raise unknown(f"row under against in {where}", other, self.rows)
            for column in row.paper:
                if column not in columns:
                    raise unknown(f"column of the paper in {where}, row {name!r}", column, columns)
            for text in (*row.set, *(row.quick or ()), *self.set):
                if text.startswith("@") and text[1:] not in self.overrides:
                    raise unknown(f"list of overrides in {where}", text[1:], self.overrides)
            common = {*self.tuning.vary} if self.tuning else set()
            if row.vary and (not common or len(row.vary) > 1 or row.same or row.vary.keys() & common):
                raise HardyError(
                    f"{where}: row {name!r} varies {', '.join(row.vary)}; a row may vary one key, which the table does "
                    "not vary, and only with [tuning] and runs of its own."
                )
            if told := {word.partition("=")[0] for word in row.set} & {*common, *row.vary}:
                raise HardyError(f"{where}: row {name!r} sets {min(told)}, which tuning varies. Leave one of them out.")
            if row.not_run and (row.set or row.same):
                raise HardyError(f"{where}: row {name!r} is not run, so `set` has no effect. Leave one of them out.")
        if self.tuning and self.program:
            raise HardyError(f"{where} is measured by {self.program}, so [tuning] has no effect. Leave it out.")
        for by in self.tuning.by if self.tuning else ():
            if by != CLEAN and by not in [measure.name for measure in self.measures]:
                parse_threat(by)
        for measure in self.measures:
            if not any(re.search(measure.rows, name) for name in self.rows):
                raise HardyError(f"{where}: no row has the measure {measure.name!r} ({measure.rows!r}).")


def split_column(column: str) -> tuple[str, str]:
    """A column's measure, and what is shown of it: its mean, or another key or domain."""
    measure, _, key = column.partition(": ")
    return measure, key or "mean"


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as it is."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise HardyError(f"cannot read {path}: {error}.") from error


def _table_toml(path: Path) -> dict[str, Any]:
    """What a TOML says; with `like`, after what the table of that name beside it says. Of overrides those of the same
    name are replaced. A state, what was reduced and the short form are the other table's own."""
    table = read_toml(path)
    if not (name := table.pop("like", "")):
        return table
    other = read_toml(path.parent / f"{name}.toml")
    if "like" in other:
        raise HardyError(f"{path} is like {name!r}, which is like another. Name that one.")
    both = {key: value for key, value in other.items() if key not in _OWN} | table
    return both | {"overrides": other.get("overrides", {}) | table.get("overrides", {})}


def read_table(path: Path) -> ResultTable:
    """The table of a TOML file."""
    table = _table_toml(path)
    rows = table.get("rows")
    if not isinstance(rows, dict) or not rows:
        raise HardyError(f"{path} has no rows, so it is no table. An experiment is run by `hardy run {path}`.")
    if code := table.get("code"):
        import_code(str((path.parent / str(code)).resolve()))  # before threats are looked up
    for name in ("paper", "name", "folder"):
        if name in table:
            raise unknown(f"key in {path}", name, [])
    made: ResultTable = construct(
        ResultTable, table, str(path), paper=path.parent.name, name=path.stem, folder=path.parent
    )
    made.check()
    return made


def find_folder(given: Path | None = None) -> Path:
    """The folder of tables: the one given, `experiments` here, or that of the checkout Hardy was installed from."""
    places = [given] if given else [Path(FOLDER), Path(hardy.__file__).parents[2] / FOLDER]
    for place in places:
        if any(place.glob("*/paper.toml")):
            return place
    raise HardyError(
        f"no tables in {', '.join(map(str, places))}. They belong to Hardy's repository: work in a checkout, or give "
        f"its folder by --folder."
    )


def table_files(folder: Path, paper: str = "*") -> Iterator[Path]:
    """The TOML files that are tables: those with rows, their own or another table's."""
    for path in sorted(folder.glob(f"{paper}/*.toml")):
        if path.name != "paper.toml" and {"rows", "like"} & read_toml(path).keys():
            yield path


def find_table(folder: Path, name: str) -> ResultTable:
    """The table called PAPER/TABLE."""
    path = folder / f"{name.removesuffix('.toml')}.toml"
    if path.is_file() and path.name != "paper.toml":
        return read_table(path)
    raise unknown("table", name, [f"{at.parent.name}/{at.stem}" for at in table_files(folder)])


@dataclass(frozen=True, kw_only=True)
class Published:
    """A table or figure as the paper has it, and where it is here."""

    shows: str
    """what it shows, in a few words"""
    tables: tuple[str, ...] = ()
    """tables of this folder"""
    why: str = ""
    """its state, where there is no table to run: not run and why, or where else it is"""


@dataclass(frozen=True, kw_only=True)
class ResultPicture:
    """A picture drawn from records."""

    file: str
    """path from the paper's folder"""
    title: str
    table: str
    kind: str = "rows"
    """rows: a value a row with its error; rounds: accuracy over the rounds; points: curves through pairs of columns"""
    rows: dict[str, str] = field(default_factory=dict)
    """row of the table -> its words in the picture"""
    columns: tuple[str, ...] = ()
    """rows: the columns drawn; points: pairs x, y of columns, in the order of a curve"""
    x_name: str = "round"
    quick: bool = False
    """from the records of --quick"""
    step: float = 10.0
    """between two lines across, in the unit of the table"""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A folder of tables."""

    title: str
    reference: str
    claim: str
    verdict: str
    published: dict[str, Published] = field(default_factory=dict)
    pictures: tuple[ResultPicture, ...] = ()
    ours: bool = False
    """whether it is of Hardy's five papers: false; tables beside them: true"""


def read_paper(folder: Path) -> Paper:
    """What paper.toml says."""
    made: Paper = construct(Paper, read_toml(folder / "paper.toml"), str(folder / "paper.toml"))
    for name, one in made.published.items():
        if bool(one.tables) == bool(one.why):
            raise HardyError(f"{folder / 'paper.toml'}: {name} needs tables, or why there are none.")
        for table in one.tables:
            if not (folder / f"{table}.toml").is_file():
                raise HardyError(f"{folder / 'paper.toml'}: {name} names {table}, but there is no {table}.toml.")
    return made


def same_row(table: ResultTable, row: str, folder: Mapping[str, ResultTable] | None = None) -> tuple[ResultTable, str]:
    """The table and row whose runs a row shares; itself, if it has its own."""
    shared = table.rows[row].same
    if not shared:
        return table, row
    name, _, other = shared.partition("/")
    found = (folder or {}).get(name) or read_table(table.folder / f"{name}.toml")
    if other not in found.rows:
        raise unknown(f"row of {found.path}, the same as {row!r} of {table.path}", other, found.rows)
    if found.rows[other].same:
        raise HardyError(f"{table.path}: {row!r} is the same as {shared}, which is the same as another. Name that one.")
    return found, other
