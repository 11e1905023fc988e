"""Code of a user's own by name: `module:name`, `file.py:name`, or an entry point of the group `hardy.parts`.

To import code is to run it, so it matters who names it:

- The user does: on the command line, in an experiment passed to `hardy run`, with `--import`. It is imported and
  remembered.
- A run folder does: imported if the user named the same code before on this machine, or names it now with `--import`.
- A server's experiment does, at a node: imported if the node's own configuration lists it.

`resolve` imports nothing that `permit` has not let in, so whatever forgets to ask is refused.
"""

import hashlib
import importlib
import importlib.metadata
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from hardy.errors import HardyError, unknown

GROUP = "hardy.parts"
"""of entry points; one is called KIND.NAME, such as objective.focal"""
_LOG = logging.getLogger("hardy")
_REFERENCE = re.compile(r"(?!hf:)([^:\n]+\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):[^\W\d]\w*(?=$|[-@])")


@dataclass(frozen=True, kw_only=True)
class Allow:
    """What may be imported of the code that an experiment names."""

    everything: bool = False
    """the user wrote the experiment, or chose to run it"""
    remembered: bool = False
    """what the user named before, on this machine"""
    listed: tuple[str, ...] = ()
    """files and modules; a file of the same name stands in for one of another folder"""
    remedy: str = "Pass an experiment file to hardy.read, or import the code yourself first."


RUN_FOLDER = Allow(
    remembered=True,
    remedy="A run folder may come from anybody, and you have not named this code on this machine. Read it, then add "
    "--import {place} (in Python: hardy.user_code.import_code).",
)
USER = replace(RUN_FOLDER, everything=True)
SERVER = replace(
    USER,
    remedy="Whoever wrote the app may be anybody, and this code was not named on the server. Get it, read it, and "
    "write the app again on the server, with `hardy deploy app`, as the user who runs `hardy deploy server`.",
)


@dataclass(frozen=True, kw_only=True)
class _Code:
    """Where a reference leads."""

    place: str
    """a module, or the path of a file"""
    file: Path | None
    """of a module: where it was, as far as that is known"""
    attribute: str
    """empty: the module as a whole"""
    remember: bool = False

    @property
    def is_file(self) -> bool:
        return self.place.endswith(".py")


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    module: ModuleType
    file: str
    sha256: str


_permitted: dict[str, _Code] = {}
_refused: dict[str, str] = {}
_recorded: dict[str, str] = {}
"""reference -> hash of its source when the run began"""
_warned: set[tuple[str, str]] = set()
_loaded: dict[str, _Loaded] = {}
"""place -> what is there"""
_listed: list[str] = []
"""what the user named with --import"""
_named: set[tuple[str, str]] = set()
"""(reference, file) that the user named since this process began; holds where the home folder cannot be written"""


# Names


def reference(text: object) -> str | None:
    """The `module:name` or `file.py:name` that a text is, without a threat's options; None if it is neither."""
    found = _REFERENCE.match(text) if isinstance(text, str) else None
    return found[0] if found else None


def short(name: str) -> str:
    """A reference without the folders of its file, as tables show it."""
    place, _, attribute = name.rpartition(":")
    return f"{Path(place).name}:{attribute}" if place.endswith(".py") else name


def absolute(value: Any, folders: Sequence[Path]) -> Any:
    """A table in which every `file.py:name` has the path of the first of the folders that holds the file."""
    if isinstance(value, dict):
        return {key: absolute(one, folders) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(absolute(one, folders) for one in value)
    name = reference(value)
    return value if name is None else f"{located(name.rpartition(':')[0], folders)}{value[name.rindex(':') :]}"


def located(place: str, folders: Sequence[Path]) -> str:
    """A module's name as it is; a file's path made absolute."""
    if not place.endswith(".py"):
        return place
    path = Path(place).expanduser()
    found = next((full for folder in folders if (full := folder / path).is_file()), folders[0] / path)
    return str(found.resolve())


def references(table: Mapping[str, Any]) -> Iterator[str]:
    """The references in an experiment's table, and what it imports."""
    imports = table.get("imports")
    yield from (place for place in (imports if isinstance(imports, list | tuple) else ()) if isinstance(place, str))
    yield from _strings({key: value for key, value in table.items() if key not in ("name", "imports")})


def places(table: Mapping[str, Any]) -> list[str]:
    """The modules and files that a table names code of."""
    return list(dict.fromkeys(name.rpartition(":")[0] or name for name in references(table)))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _strings(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _strings(one)
    elif (name := reference(value)) is not None:
        yield name


# Permission


def permit(table: Mapping[str, Any], allow: Allow, records: Mapping[str, Any], folders: Iterable[Path] = ()) -> None:
    """Decides which code of an experiment's table may be imported; nothing is imported yet.

    `records` says where it was and what its hash was when a run began. Modules that the user names are also looked for
    in the folders.
    """
    for name in dict.fromkeys([*references(table), *records]):
        record = records.get(name)
        record = record if isinstance(record, dict) else {}
        _recorded[name] = str(record.get("sha256", ""))
        code = _allowed(name, record, allow)
        for key in {name, short(name)}:
            _permitted.pop(key, None)
            if code is None:
                _refused[key] = allow.remedy
            else:
                _permitted[key] = code
        if code is not None and code.is_file:
            _forget_changed(code)
        elif code is not None and allow.everything:
            _search(folders)


def refused(table: Mapping[str, Any]) -> str | None:
    """The first reference of a table that may not be imported."""
    return next((name for name in references(table) if name not in _permitted), None)


def _allowed(name: str, record: Mapping[str, Any], allow: Allow) -> _Code | None:
    place, _, attribute = name.rpartition(":") if ":" in name else (name, "", "")
    where = place if place.endswith(".py") else record.get("file")
    code = _Code(place=place, file=Path(str(where)) if where else None, attribute=attribute)
    for listed in (*allow.listed, *_listed):
        if code.is_file and listed.endswith(".py") and Path(listed).name == Path(place).name:
            return replace(code, place=listed, file=Path(listed))
        if not listed.endswith(".py") and f"{place}.".startswith(f"{listed}."):
            return replace(code, file=None)
    if allow.everything:
        return replace(code, remember=True)
    return code if allow.remembered and _is_remembered(name, code.file) else None


def named_by_user(value: Any) -> Any:
    """A value that the user wrote, with whole paths for its files of code, which are looked for here and permitted."""
    value = absolute(value, [Path.cwd()])
    permit({"value": value}, USER, {}, [Path.cwd()])
    return value


def import_code(place: str) -> str:
    """Imports a module or a file that the user names; the parts in it are known by name from then on, and run folders
    may name them too. Returns the place, a file with its whole path."""
    place = located(place, [Path.cwd()])
    permit({"imports": [place]}, USER, {}, [Path.cwd()])
    resolve(place)
    if place not in _listed:
        _listed.append(place)
    return place


# Memory of what the user named


def _memory(name: str, file: Path | str) -> Path:
    home = os.environ.get("HARDY_HOME")
    key = hashlib.sha256(f"{name}\0{file}".encode()).hexdigest()
    return (Path(home) if home else Path.home() / ".hardy") / "trusted" / key


def _is_remembered(name: str, file: Path | None) -> bool:
    if (name, str(file)) in _named:
        return True
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        return file is not None and _memory(name, file).is_file()
    return False


def _remember(name: str, file: str) -> None:
    _named.add((name, file))
    with suppress(OSError, RuntimeError):  # then --import will be asked for
        path = _memory(name, file)
        if not path.is_file():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_text(f"{name}\n{file}\n", encoding="utf-8")


# Importing


def resolve(name: str) -> Any:
    """What a reference names; imported if it is permitted and not there yet."""
    code = _permitted.get(name)
    if code is None:
        place = name.rpartition(":")[0] or name
        raise HardyError(f"{name!r} is not imported. {_refused.get(name, Allow().remedy).format(place=place)}")
    found = _loaded.get(code.place)
    if found is None:
        found = _loaded[code.place] = _load(code)
        _LOG.info("imported %s", found.file)
    if code.remember:
        _remember(name, found.file)
    _warn_changed(name, found)
    if not code.attribute:
        return found.module
    if not hasattr(found.module, code.attribute):
        names = [key for key in vars(found.module) if not key.startswith("_")]
        raise unknown(f"name in {code.place}", code.attribute, names)
    return getattr(found.module, code.attribute)


def plugin(kind: str, name: str) -> Any:
    """The part that an installed package enters under KIND.NAME; None if no package does."""
    key = f"{kind}.{name}"
    entry = next(iter(importlib.metadata.entry_points(group=GROUP, name=key)), None)
    if entry is None:
        return None
    value = _guarded(f"entry point {key} ({entry.value})", entry.load)
    _loaded[key] = _with_hash(sys.modules[entry.module])
    _warn_changed(key, _loaded[key])
    return value


def plugins() -> list[tuple[str, str]]:
    """(kind, name) of all parts that installed packages enter."""
    names = {entry.name for entry in importlib.metadata.entry_points(group=GROUP)}
    return sorted((kind, name) for kind, _, name in (key.partition(".") for key in names) if name)


def code_table(table: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Each reference of a table that may be imported, with its file and the file's hash; and the entry points. What is
    not imported yet is now: a run folder names nothing that its user is not known to have named."""
    permitted = [name for name in references(table) if name in _permitted]
    for name in permitted:
        resolve(name)
    found = {name: _loaded[_permitted[name].place] for name in permitted}
    found |= {key: _loaded[key] for kind, name in plugins() if (key := f"{kind}.{name}") in _loaded}
    return {name: {"file": one.file, "sha256": one.sha256} for name, one in found.items()}


def in_words(error: BaseException, near: str = "") -> str:
    """An error of a user's code as one line, with the file and the line: of the file `near`, if the error passed it."""
    if isinstance(error, SyntaxError) and error.filename:
        where, line = error.filename, error.lineno
        said = error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((one for one in reversed(frames) if one.filename == near), frames[-1] if frames else None)
        where, line = (frame.filename, frame.lineno) if frame else (near, 0)
        said = " ".join(str(error).split())
    return f"{where}, line {line}: {type(error).__name__}: {said}".rstrip(": ")


def _guarded(what: str, load: Callable[[], Any], near: str = "") -> Any:
    try:
        return load()
    except HardyError:
        raise
    except (Exception, SystemExit) as error:
        raise HardyError(f"{what} cannot be imported: {in_words(error, near)}.") from error


def _load(code: _Code) -> _Loaded:
    if code.is_file:
        return _load_file(Path(code.place))
    if code.file is not None:
        deep = code.place.count(".") + (code.file.name == "__init__.py")
        _search(code.file.parents[deep : deep + 1])
    try:
        return _with_hash(_guarded(f"module {code.place}", lambda: importlib.import_module(code.place)))
    except HardyError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{code.place}.".startswith(f"{cause.name}."):
            raise HardyError(
                f"there is no module {cause.name!r} to import. Install it, start where Python finds it, or name a "
                "file: path/to/file.py:name."
            ) from cause
        raise


def _load_file(path: Path) -> _Loaded:
    """Runs exactly the bytes that are hashed."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise HardyError(f"cannot read the code in {path}: {error.strerror or error}. Give its path.") from error
    sha256 = hashlib.sha256(source).hexdigest()
    _search([path.parent])  # for what lies beside it
    module = ModuleType(f"hardy_user_{path.stem}_{hashlib.sha256(str(path).encode() + source).hexdigest()[:12]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and type hints look it up

    def run() -> None:
        exec(compile(source, str(path), "exec"), vars(module))

    try:
        _guarded(str(path), run, str(path))
    except HardyError:
        del sys.modules[module.__name__]
        raise
    return _Loaded(module=module, file=str(path), sha256=sha256)


def _with_hash(module: ModuleType) -> _Loaded:
    file = getattr(module, "__file__", None) or ""
    sha256 = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    return _Loaded(module=module, file=file, sha256=sha256)


def _forget_changed(code: _Code) -> None:
    """A file that was edited since it was imported is imported again."""
    held = _loaded.get(code.place)
    with suppress(OSError):
        if held and hashlib.sha256(Path(code.place).read_bytes()).hexdigest() != held.sha256:
            del _loaded[code.place]


def _warn_changed(name: str, found: _Loaded) -> None:
    recorded = _recorded.pop(name, "")
    if recorded and recorded != found.sha256 and (found.file, recorded) not in _warned:
        _warned.add((found.file, recorded))
        _LOG.warning("%s has changed since the run began; its results may differ.", found.file)


def _search(folders: Iterable[Path]) -> None:
    """Looks for modules in these folders too, after everywhere else."""
    sys.path += [text for folder in folders if (text := str(folder.resolve())) not in sys.path]
