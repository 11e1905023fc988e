"""From a TOML file and overrides to an experiment, and from an experiment to its method."""

import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from hardy import user_code
from hardy.config.experiment import FROM_PYTHON, Experiment
from hardy.config.values import Table, construct, convert, keys_below, named
from hardy.core.method import Method
from hardy.errors import HardyError, unknown
from hardy.registry import KINDS, PARTS, find
from hardy.user_code import RUN_FOLDER, USER, Allow

ARMS = ("arms", "look", "measure")
"""keys for `hardy run` alone: see hardy.config.arm_table"""
REPLACEABLE = ("norm", "objective", "budget", "aggregator")
"""parts that a method's table may put in place of the method's own"""


def bundled() -> list[str]:
    """Names of the experiments that come with the package."""
    folder = resources.files("hardy") / "bundled"
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read(
    source: str | Path,
    overrides: Iterable[str] = (),
    *,
    check: bool = True,
    imports: Iterable[str] = (),
    allow: Allow | None = None,
) -> Experiment:
    """An experiment from a TOML file or a bundled name, with key=value overrides.

    Code of your own that it names (`module:name`, `file.py:name`, `imports`) is imported; files are looked for beside
    the TOML file, then here. Code that a run folder's config.toml names is imported only if you named it before. With
    `allow`, another rule holds.
    """
    text, path = experiment_text(source)
    allow = allow or (RUN_FOLDER if path.name == "config.toml" else USER)
    places = [user_code.import_code(place) for place in imports]
    return parse(text, overrides, where=str(source), check=check, allow=allow, folder=path.parent, imports=places)


def experiment_text(source: str | Path) -> tuple[str, Path]:
    """The text of a TOML file or a bundled experiment, and the path that was asked for."""
    path = Path(source)
    if path.is_file():
        return _text(path), path
    if str(source) in bundled():
        return (resources.files("hardy") / "bundled" / f"{source}.toml").read_text(encoding="utf-8"), path
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise HardyError(f"no experiment file {str(source)!r}. Bundled ones: {', '.join(bundled())}.")
    raise unknown("experiment (no such file either)", source, bundled())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HardyError(f"cannot read {path}: {error}. It must be a TOML file in UTF-8.") from error


def parse(
    text: str,
    overrides: Iterable[str] = (),
    *,
    where: str = "experiment",
    check: bool = True,
    allow: Allow = Allow(),
    folder: Path | None = None,
    imports: Sequence[str] = (),
) -> Experiment:
    """An experiment from TOML. Code it names is imported only as far as `allow` says; code that the overrides name is
    the user's word. `imports` are added to those of the text."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise HardyError(f"{where} is not valid TOML: {error}.") from error
    written = {key: table.pop(key, {}) for key in ("code", "versions")}  # by a run
    if any(written.values()):
        allow = replace(allow, everything=False)
    for key in ARMS:
        table.pop(key, None)
    here = Path.cwd()
    folders = [folder or here, here]
    table = _located(table, folders)
    records = written["code"] if isinstance(written["code"], dict) else {}
    user_code.permit(table, allow, records, folders)
    for override in overrides:
        _override(table, override)
    _import(table, imports)
    _refuse_renamed(table)
    experiment: Experiment = construct(Experiment, table, "")
    if check:
        method(experiment)  # a mistake in a part shows before anything is loaded
    return experiment


def _located(table: Table, folders: Sequence[Path]) -> Table:
    """The table with whole paths for files of code."""
    located: Table = user_code.absolute(table, folders)
    if isinstance(imports := located.get("imports"), list):
        located["imports"] = [user_code.located(one, folders) if isinstance(one, str) else one for one in imports]
    return located


def _import(table: Table, more: Sequence[str]) -> None:
    """Runs the modules that register parts."""
    written = table.get("imports", [])
    if isinstance(written, list):
        for place in written:
            user_code.resolve(str(place))
        table["imports"] = [*written, *(place for place in more if place not in written)]


RENAMED = {
    "training.momentum": 'optimiser = { name = "sgd", momentum = ... }',
    "training.weight_decay": 'optimiser = { name = "sgd", weight_decay = ... }',
    "faults.lie": "faults.byzantine",
    "faults.on": "faults.affects",
    "evaluation.diagnose": 'evaluation.diagnosis = ["primal_gap"]',
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
    evaluation = table.get("evaluation")
    metrics = evaluation.get("metrics") if isinstance(evaluation, dict) else None
    for metric in metrics if isinstance(metrics, list) else ():
        if isinstance(metric, str) and metric in PARTS["diagnosis"]:
            raise HardyError(f"{metric} is a diagnosis: write evaluation.diagnosis = [{metric!r}].")
    aggregator = table.get("method", {}).get("aggregator") if isinstance(table.get("method"), dict) else None
    if isinstance(aggregator, dict) and aggregator.get("name") == "chain":
        raise HardyError("aggregator chain is now pipeline, with pre in place of stages. Change the name.")


def _key_and_value(override: str) -> tuple[str, Any]:
    """Of key=value; the value is None where there is none, which removes the key."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise HardyError(f"{override!r} is not an override; write key=value, for example training.rate=0.1.")
    try:
        return key, tomllib.loads(f"value = {text}")["value"] if text else None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        if text.startswith(("[", "{")):
            example = '["a", "b"]' if text[0] == "[" else '{name="a"}'
            raise HardyError(
                f"override {override!r} is not valid TOML: {str(error).partition(' (at')[0]}. A shell takes quotes "
                f"away: write the whole in single ones, such as '{key}={example}'."
            ) from error
        return key, text  # a bare word is a string


def _override(table: Table, override: str) -> None:
    key, value = _key_and_value(override)
    if key == "imports" and isinstance(value, list):
        value = [user_code.import_code(str(one)) for one in value]
    value = user_code.named_by_user(value)
    *path, last = key.split(".")
    for step in path:
        below = table.setdefault(step, {})
        if isinstance(below, str):  # method="fedprox" and method.strength=1 mean one table
            below = table[step] = {"name": below}
        if not isinstance(below, dict):
            raise HardyError(f"override {override!r}: {step!r} is not a table.")
        table = below
    if value is not None:
        table[last] = value  # a new name takes the place of the old one's options too
    elif table.pop(last, None) is None:
        raise HardyError(f"override {override!r} removes a key that the experiment does not set. Leave it out.")


def changed(experiment: Experiment, changes: Mapping[str, Any] | Iterable[str]) -> Experiment:
    """The experiment with other values: {"rounds": 3, "training.rate": 0.1}, {"training": {"rate": 0.1}}, or
    ["rounds=3"]."""
    pairs = changes.items() if isinstance(changes, Mapping) else map(_key_and_value, changes)
    table: Table = {}
    for key, value in pairs:
        *path, last = key.split(".")
        at = table
        for step in path:
            at = at.setdefault(step, {})
        at[last] = {**at.get(last, {}), **value} if isinstance(value, dict) else value
    made: Experiment = _replaced(experiment, user_code.named_by_user(table), "")
    return made


def _replaced(held: Any, table: Table, path: str) -> Any:
    """A table of the experiment with other values for some of its keys."""
    hints, new = get_type_hints(type(held)), {}
    for key, value in table.items():
        if key not in hints:
            raise unknown(
                f"key in {path or 'the experiment'}", key, hints, elsewhere=() if path else keys_below(Experiment)
            )
        where, old = f"{path}.{key}".lstrip("."), getattr(held, key)
        if isinstance(value, dict) and is_dataclass(old) and not isinstance(old, tuple(KINDS)):
            new[key] = _replaced(old, value, where)
            continue
        if isinstance(value, dict) and "name" not in value and isinstance(old, str | dict):
            value = {**({"name": old} if isinstance(old, str) else old), **value}
        value = list(value) if isinstance(value, tuple) else value
        if value is None:  # as if the key were absent
            value = getattr(type(held)(), key)
        new[key] = value if value is None or is_dataclass(value) else convert(value, hints[key], where)
    return replace(held, **new)


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
    parts = {key: options.pop(key) for key in REPLACEABLE if key in options and key not in taken}
    given = {} if experiment.optimiser is None else {"optimiser": experiment.optimiser}
    later = {} if "optimiser" in taken else given  # a method of a user's own
    hints = get_type_hints(Method)

    def build(options: Table) -> tuple[Method, Method]:
        """The factory's method, and the same with the parts that take the place of its own."""
        made: Method = construct(factory, options, "method", **({} if later else given))
        if not isinstance(made, Method):
            raise HardyError(f"method {user_code.short(name)} gives {type(made).__name__}; it must be a hardy.Method.")
        made = made.replace(**later)
        new = {k: convert(value, hints[k], f"method.{k}", getattr(made, k)) for k, value in parts.items()}
        return made, made.replace(**new)

    own, whole = build(options)
    if parts:
        _refuse_lost_options(options, parts, own, whole, build)
    return whole


def _refuse_lost_options(
    options: Table, parts: Table, own: Method, whole: Method, build: Callable[[Table], tuple[Method, Method]]
) -> None:
    """Refuses an option of a method that is lost with the part it was of, which another takes the place of."""
    for key in options:
        try:
            own_without, whole_without = build({k: v for k, v in options.items() if k != key})
        except HardyError:
            continue  # the method needs it
        if own != own_without and whole == whole_without:
            others = " or ".join(f"method.{name}" for name in parts)
            raise HardyError(
                f"method.{key} has no effect: it is an option of a part whose place {others} takes. Leave one of them "
                "out, or write the option there."
            )
