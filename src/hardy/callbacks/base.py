"""Callbacks: called when a run starts, after each of its rounds, and when it ends."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from hardy.errors import HardyError
from hardy.registry import OF_FUNCTION, PARTS, kind

_CALLS = ("on_start", "on_round", "on_end")


class Stop(Exception):
    """Raised in `on_round` to end a run after this round, with the reason."""


@kind("callback")
@dataclass(kw_only=True, unsafe_hash=True)
class Callback:
    """Overrides what it needs. Unlike other parts it may hold something open, such as a file, while a run goes on."""

    def check(self, run: Any) -> None:
        """Refuses a run it cannot work with, before anything is written."""

    def on_start(self, run: Any) -> None:
        """Before the first round, and before the first after a resume: `run.history` holds the rounds so far."""

    def on_round(self, run: Any, line: dict[str, Any]) -> bool | None:
        """After a round; `line` is that of metrics.jsonl. True, or raising Stop, ends the run after this round."""
        return None

    def on_end(self, run: Any) -> None:
        """When the run ends, however it ends; of a finished run `run.summary()` has all figures."""


@cache
def _of_function(function: Callable[[Any, dict[str, Any]], bool | None]) -> type[Callback]:
    """A callback of a function of a run and a round's line, so that an experiment can name it."""

    def on_round(self: Callback, run: Any, line: dict[str, Any]) -> bool | None:
        return function(run, line)

    content = {"on_round": on_round, "__doc__": function.__doc__ or "", "__module__": function.__module__}
    return dataclass(kw_only=True, unsafe_hash=True)(type(function.__name__, (Callback,), content))


OF_FUNCTION["callback"] = _of_function

Notify = Callable[[dict[str, Any]], HardyError | None]
"""Tells all callbacks of a round; gives the error of one that failed."""


def check_callbacks(run: Any, callbacks: Sequence[Any]) -> None:
    """Refuses what is no callback, and what a callback refuses."""
    for callback in callbacks:
        if isinstance(callback, type) or not (callable(callback) or any(hasattr(callback, c) for c in _CALLS)):
            raise HardyError(
                f"{callback!r} is no callback; give a function of (run, line), or an object with {', '.join(_CALLS)}."
            )
        if isinstance(callback, Callback):
            callback.check(run)


def is_stored(callback: Any) -> bool:
    """Whether config.toml can name it: it comes with Hardy."""
    return type(callback) in PARTS["callback"].values() and type(callback).__module__.startswith("hardy.")


@contextmanager
def attached(run: Any, callbacks: Sequence[Any]) -> Iterator[Notify]:
    """Callbacks from a run's start to its end."""
    started: list[Any] = []
    try:
        for callback in callbacks:
            started.append(callback)
            _call(callback, "on_start", run)
        yield lambda line: _notify(run, callbacks, line)
    except BaseException:
        for callback in started:
            with suppress(Exception):  # what went wrong first is what the user must see
                _call(callback, "on_end", run)
        raise
    for callback in started:
        _call(callback, "on_end", run)


def _notify(run: Any, callbacks: Sequence[Any], line: dict[str, Any]) -> HardyError | None:
    for callback in callbacks:
        try:
            said = _call(callback, "on_round", run, line)
        except Stop as stop:
            run.figures.stopped = str(stop) or f"callback {_name(callback)} asked for it"
        except HardyError as error:
            return error
        else:
            if isinstance(said, bool | np.bool_):
                run.figures.stopped = f"callback {_name(callback)} asked for it" if said else run.figures.stopped
            elif said is not None:
                return HardyError(
                    f"callback {_name(callback)} returned {said!r} in round {line['round']}; return True to end the "
                    "run, else nothing."
                )
    return None


def _call(callback: Any, name: str, run: Any, *more: Any) -> Any:
    function = getattr(callback, name, callback if name == "on_round" and not hasattr(callback, "on_start") else None)
    if not callable(function):
        return None
    try:
        return function(run, *more)
    except (Stop, HardyError):
        raise
    except Exception as error:
        saved = f" Its rounds are saved; `hardy resume {run.folder}` goes on." if run.folder and run.state.round else ""
        raise HardyError(
            f"callback {_name(callback)} failed in {name}, round {run.state.round}: {type(error).__name__}: {error}. "
            f"Mend it or leave it out.{saved}"
        ) from error


def _name(callback: Any) -> str:
    return repr(getattr(callback, "__name__", type(callback).__name__))
