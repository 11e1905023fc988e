"""Experiments as TOML: a tree of dataclasses, checked key by key. An unknown key is an error with the nearest name."""

import dataclasses
import inspect
import math
import tomllib
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hardy.attacks.threats import parse_threat
from hardy.core.admission import Admission
from hardy.core.method import Method
from hardy.core.protocols import Metric, Optimiser
from hardy.core.server import Cohort
from hardy.core.training import Training
from hardy.data.kinds import Affording
from hardy.engines.auto import EngineChoice
from hardy.errors import HardyError, unknown
from hardy.faults.injection import Faults
from hardy.parts.compression import Compression
from hardy.registry import KINDS, PARTS, find, name_of

Table = dict[str, Any]
FROM_PYTHON = "from Python"
"""stands in config.toml for what has no name"""


@dataclass(frozen=True, kw_only=True)
class DataChoice:
    """`[data]`: which images, and who holds them."""

    source: str | Table = "mini_digits"
    """a name, or a table with a name and the source's options"""
    split: str | Table = "blocks"
    """how a domain's rows are dealt to its clients"""
    clients: int = 2
    """clients a domain; in all, when pooled"""
    pooled: bool = False
    """deal the rows of all domains together"""
    validation: float = 0.1
    """share of a client's rows kept for validation"""
    test: Literal["split", "shared", "matched"] = "split"
    """test rows: cut among a domain's clients, all rows for each, or matched to a client's classes"""
    limit: int | None = None
    """training rows a domain"""
    shift: str | Table | None = None
    """how the clients' devices differ: each takes its training and validation rows in its own way"""
    shift_test: bool = False
    """test rows too are taken by the clients' devices; else they are as they come, as in FedRobust"""
    adversarial: Affording = None
    """who is of kind AT, for objective by_kind: a share of each domain's clients, a list of domains or of clients'
    numbers, or a share for each of some domains ({ mnist = 0.2 }); the others are ST. Absent: nobody is kept from it"""
    capacity: str | Table | None = None
    """the width each client can train, a share of the ×1 network's; absent: 1 for all"""

    def __post_init__(self) -> None:
        if self.shift_test and self.shift is None:
            raise HardyError("data.shift_test is true, but there is no data.shift, so it has no effect. Leave it out.")


@dataclass(frozen=True, kw_only=True)
class EvaluationChoice:
    """`[evaluation]`: when accuracy is measured."""

    every: int = 1
    """rounds between two evaluations; the last round is always evaluated"""
    threats: tuple[str, ...] = ()
    """attacks the finished run is measured under, such as ["pgd-20", "autoattack"]"""
    select: str | None = None
    """attack under which accuracy on validation rows chooses the best round; absent: clean accuracy does, which may
    rise on under adversarial training while robustness falls"""
    attack_branch: str | None = None
    """statistics the attacks climb on; absent: those that predictions are made with"""
    predict_branch: str | None = None
    """statistics images are judged with, attacked or not; absent: those of the branch that the norm serves with"""
    robustness: tuple[float, ...] = ()
    """levels λ at which every width of the finished run is measured, under the threats too; needs a dual norm"""
    metrics: tuple[Metric, ...] = ()
    """figures to record at every evaluation besides loss and accuracy, such as ["primal_gap"]"""
    drift: bool = False
    """record each round how far the clients' weights lie apart; costs a pass over all replies, held in memory"""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise HardyError(f"evaluation.every is {self.every}; it must be 1 or more.")
        for threat in (*self.threats, *self.selecting):
            parse_threat(threat)
        for level in self.robustness:
            if not 0 <= level <= 1:
                raise HardyError(f"evaluation.robustness holds {level}; each level must be in [0, 1].")

    @property
    def selecting(self) -> tuple[str, ...]:
        """The attack of `select`, if there is one."""
        return (self.select,) if self.select else ()


@dataclass(frozen=True, kw_only=True)
class CheckpointChoice:
    """`[checkpoint]`: when the run is saved."""

    every: int | None = None
    """rounds between two checkpoints; absent: as often as costs less than a twentieth of the time"""

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise HardyError(f"checkpoint.every is {self.every}; it must be 1 or more, or absent.")


@dataclass(frozen=True, kw_only=True)
class NetworkChoice:
    """`[network]`: what a run over Flower expects of its nodes."""

    clients: int | None = None
    """nodes the run is for; absent: as many as [data] makes clients"""
    deadline: float = 600.0
    """seconds a round waits for a reply"""
    replies: int = 1
    """fewest replies a round needs; with fewer the missing clients are asked again"""
    patience: float = 1800.0
    """seconds to wait for the first roll call, or for enough replies, before giving up"""
    compression: Compression | None = None
    """of what clients send up; absent: every bit travels, and the run is that of the other engines"""

    def __post_init__(self) -> None:
        for name in ("deadline", "patience"):
            if not getattr(self, name) > 0:
                raise HardyError(f"network.{name} is {getattr(self, name)}; it must be above 0 seconds.")
        if self.replies < 1:
            raise HardyError(f"network.replies is {self.replies}; it must be 1 or more.")
        if self.clients is not None and self.clients < 1:
            raise HardyError(f"network.clients is {self.clients}; it must be 1 or more, or absent.")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything a run depends on."""

    name: str = "experiment"
    """names the run folder and the report"""
    seed: int = 0
    """all randomness follows from it"""
    rounds: int = 20
    """rounds of the federation"""
    data: DataChoice = field(default_factory=DataChoice)
    model: str | Table = "tiny_cnn"
    """a name, or a table with a name and the model's options"""
    method: str | Table = "fedavg"
    """a name, or a table with a name, the method's options, and parts in place of its own"""
    optimiser: Optimiser | None = None
    """how clients step; absent: the method's own, plain SGD for most. A method adds its links (SCAFFOLD's control)"""
    training: Training = field(default_factory=Training)
    cohort: Cohort = field(default_factory=Cohort)
    faults: Faults = field(default_factory=Faults)
    admission: Admission = field(default_factory=Admission)
    engine: EngineChoice = field(default_factory=EngineChoice)
    network: NetworkChoice = field(default_factory=NetworkChoice)
    evaluation: EvaluationChoice = field(default_factory=EvaluationChoice)
    checkpoint: CheckpointChoice = field(default_factory=CheckpointChoice)

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise HardyError(f"rounds is {self.rounds}; it must be 1 or more.")
        if not 0 <= self.seed < 2**63:
            raise HardyError(f"seed is {self.seed}; it must be in [0, 2^63).")
        if self.network != NetworkChoice() and self.engine.name not in ("flower", "auto"):
            raise HardyError(
                f"[network] has no effect with engine {self.engine.name!r}. Leave it out, or take engine flower."
            )

    def to_toml(self) -> str:
        return dump(_table(self))


def bundled() -> list[str]:
    """Names of the experiments that come with the package."""
    folder = resources.files("hardy") / "bundled"
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read(source: str, overrides: Iterable[str] = (), *, check: bool = True) -> Experiment:
    """An experiment from a TOML file or a bundled name, with key=value overrides."""
    path = Path(source)
    if path.is_file():
        text = _text(path)
    elif source in bundled():
        text = (resources.files("hardy") / "bundled" / f"{source}.toml").read_text(encoding="utf-8")
    elif path.suffix == ".toml" or len(path.parts) > 1:
        raise HardyError(f"no experiment file {source!r}. Bundled ones: {', '.join(bundled())}.")
    else:
        raise unknown("experiment (no such file either)", source, bundled())
    return parse(text, overrides, where=source, check=check)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HardyError(f"cannot read {path}: {error}. It must be a TOML file in UTF-8.") from error


def parse(text: str, overrides: Iterable[str] = (), *, where: str = "experiment", check: bool = True) -> Experiment:
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise HardyError(f"{where} is not valid TOML: {error}.") from error
    table.pop("versions", None)  # written by a run, for the reader
    for override in overrides:
        _override(table, override)
    _refuse_renamed(table)
    experiment: Experiment = construct(Experiment, table, "")
    if check:
        method(experiment)  # a mistake in a part shows before anything is loaded
    return experiment


RENAMED = {
    "training.momentum": 'optimiser = { name = "sgd", momentum = ... }',
    "training.weight_decay": 'optimiser = { name = "sgd", weight_decay = ... }',
    "faults.lie": "faults.byzantine",
    "faults.on": "faults.affects",
    "evaluation.diagnose": 'evaluation.metrics = ["primal_gap"]',
    "method.norm.serving": "method.norm.inference_statistics (post is now recomputed)",
    "method.aggregator.stages": "method.aggregator.pre, of aggregator pipeline",
}
"""keys of version 0.1 -> what they are now"""


def _refuse_renamed(table: Table) -> None:
    for old, new in RENAMED.items():
        *path, last = old.split(".")
        found: Any = table
        for step in path:
            found = found.get(step) if isinstance(found, dict) else None
        if isinstance(found, dict) and last in found:
            raise HardyError(f"{old} is now {new}. Change the key.")
    aggregator = table.get("method", {}).get("aggregator") if isinstance(table.get("method"), dict) else None
    if isinstance(aggregator, dict) and aggregator.get("name") == "chain":
        raise HardyError("aggregator chain is now pipeline, with pre in place of stages. Change the name.")


def _override(table: Table, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise HardyError(f"{override!r} is not an override; write key=value, for example training.rate=0.1.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text  # a bare word is a string
    *path, last = key.split(".")
    for step in path:
        below = table.setdefault(step, {})
        if isinstance(below, str):  # method="fedprox" and method.strength=1 mean one table
            below = table[step] = {"name": below}
        if not isinstance(below, dict):
            raise HardyError(f"override {override!r}: {step!r} is not a table.")
        table = below
    table[last] = value  # a new name takes the place of the old one's options too


def method(experiment: Experiment) -> Method:
    """The method a table names: a paper's factory with its arguments, then other parts in place of its own."""
    name, options = named(experiment.method, "method")
    if name == FROM_PYTHON:
        raise HardyError(
            "this run was started from Python with objects of its own; pass them to hardy.resume or hardy.load."
        )
    factory = find("method", name)
    taken = inspect.signature(factory).parameters
    if "optimiser" in options:
        raise HardyError("method.optimiser is the table [optimiser]: write optimiser = ... beside method.")
    parts = {
        key: options.pop(key)
        for key in ("norm", "objective", "budget", "aggregator")
        if key in options and key not in taken
    }
    given = {} if experiment.optimiser is None else {"optimiser": experiment.optimiser}
    if given and "optimiser" not in taken:  # a method of a user's own
        made: Method = construct(factory, options, "method").replace(**given)
    else:
        made = construct(factory, options, "method", **given)
    hints = get_type_hints(Method)
    return made.replace(**{key: convert(value, hints[key], f"method.{key}") for key, value in parts.items()})


def named(choice: str | Table, path: str) -> tuple[str, Table]:
    """(name, options) of a part written as a word or as a table with a name."""
    if isinstance(choice, str):
        return choice, {}
    options = dict(choice)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise HardyError(f'{path} needs a name: a word, or a table with name = "..." (got {choice!r}).')
    return name, options


def construct(factory: Callable[..., Any], table: object, path: str, **given: Any) -> Any:
    """factory(**table, **given), every value of the table checked against the signature."""
    if not isinstance(table, dict):
        raise HardyError(f"{path or 'the experiment'} is {table!r}; it must be a table.")
    parameters = inspect.signature(factory).parameters
    hints = get_type_hints(factory)
    arguments = dict(given)
    for key, value in table.items():
        if key not in parameters or key in given:
            raise unknown(f"key in {path or 'the experiment'}", key, parameters.keys() - given.keys())
        arguments[key] = convert(value, hints[key], f"{path}.{key}".lstrip("."))
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in arguments:
            raise HardyError(f"{path} needs a value for {key!r}.")
    return factory(**arguments)


def convert(value: Any, hint: Any, path: str) -> Any:
    """A TOML value as the type an argument asks for."""
    if hint is Any:
        return value
    if isinstance(hint, type):
        return _plain(value, hint, path)
    kinds = get_args(hint)
    origin = get_origin(hint)
    if origin is Literal:
        if value not in kinds:
            raise unknown(f"value for {path}", value, map(str, kinds))
        return value
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        errors = []
        for kind in kinds:
            if kind is not types.NoneType:
                try:
                    return convert(value, kind, path)
                except HardyError as error:
                    errors.append(error)
        raise errors[0]
    if origin is Sequence and isinstance(value, list):
        return tuple(convert(v, kinds[0], f"{path}[{i}]") for i, v in enumerate(value))
    if origin is tuple and isinstance(value, list):
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            return tuple(convert(v, kinds[0], f"{path}[{i}]") for i, v in enumerate(value))
        if len(kinds) == len(value):
            return tuple(convert(v, kind, f"{path}[{i}]") for i, (v, kind) in enumerate(zip(value, kinds, strict=True)))
        raise HardyError(f"{path} is {value!r}; it must hold {len(kinds)} values.")
    if origin is dict and isinstance(value, dict):
        return {key: convert(v, kinds[1], f"{path}.{key}") for key, v in value.items()}
    raise HardyError(f"{path} is {value!r}; it must be a {'table' if origin is dict else 'list'}.")


def _plain(value: Any, hint: type, path: str) -> Any:
    if hint in KINDS:
        if hint is Optimiser and isinstance(value, dict) and "name" not in value:
            value = {"name": "sgd", **value}
        name, options = named(value if isinstance(value, (str, dict)) else {}, path)
        return construct(find(KINDS[hint], name), options, path)
    if dataclasses.is_dataclass(hint):
        return construct(hint, value, path)
    if issubclass(hint, Enum):
        allowed = {str(member.value): member for member in hint}
        if value not in allowed:
            raise unknown(f"value for {path}", value, allowed)
        return allowed[value]
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isnan(value):
            raise HardyError(f"{path} is nan; it must be a number.")
        return float(value)
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word in quotes"}
    raise HardyError(f"{path} is {value!r}; it must be {words.get(hint, hint.__name__)}.")


def _table(value: Any) -> Any:
    """A tree of dataclasses as tables; a part among them gets its name."""
    if isinstance(value, tuple):
        return tuple(_table(one) for one in value)
    if not dataclasses.is_dataclass(value):
        return value
    named = {"name": name_of(type(value))} if isinstance(value, tuple(KINDS)) else {}
    return named | {f.name: _table(getattr(value, f.name)) for f in dataclasses.fields(value)}


def dump(table: Table, path: str = "") -> str:
    """TOML of nested tables; None means absent."""
    lines = [f"{_key(k)} = {_value(v)}" for k, v in table.items() if v is not None and not isinstance(v, dict)]
    if path and (lines or not table):
        lines.insert(0, f"\n[{path}]")
    for key, value in table.items():
        if isinstance(value, dict):
            lines.append(dump(value, f"{path}.{_key(key)}".lstrip(".")))
    return "\n".join(lines)


def _key(key: str) -> str:
    return key if key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key) else _value(key)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(v) for v in value)}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(k)} = {_value(v)}' for k, v in value.items() if v is not None)} }}"
    escaped = "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in str(value).replace("\\", "\\\\"))
    return '"' + escaped.replace('"', '\\"') + '"'


__all__ = [
    "PARTS",
    "DataChoice",
    "Experiment",
    "bundled",
    "construct",
    "convert",
    "dump",
    "method",
    "named",
    "parse",
    "read",
]
