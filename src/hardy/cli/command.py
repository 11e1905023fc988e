"""What a command is, and the options that several commands share."""

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardy.config import Experiment


_ENGINE_OPTIONS = {"name": "engine", "device": "device", "workers": "workers"}
"""key of [engine] -> option"""


def _nothing(parser: ArgumentParser) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command, or with `commands` a group of them."""

    name: str
    words: str
    declare: Callable[[ArgumentParser], None] = _nothing
    call: Callable[[Any], None] | None = None
    commands: tuple["Command", ...] = ()


def experiment_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("experiment", help="a TOML file, or a bundled name such as demo")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="for example training.rate=0.1 method=fedbn"
    )


def device_option(parser: ArgumentParser) -> None:
    parser.add_argument("--device", help="auto, cpu or cuda")


def workers_option(parser: ArgumentParser, words: str) -> None:
    parser.add_argument("--workers", type=positive_count, metavar="N", help=words)


def data_option(parser: ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="folder of real data sets (default: HARDY_DATA)")


def quiet_option(parser: ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def tensorboard_option(parser: ArgumentParser) -> None:
    parser.add_argument("--tensorboard", action="store_true", help="also write TensorBoard event files")


def import_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module or file.py of your own to import first; may be given several times",
    )


def best_option(parser: ArgumentParser) -> None:
    parser.add_argument("--best", action="store_true", help="as it was at its best round on validation rows")


def seeds_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--seeds", type=positive_count, default=1, metavar="N", help="N runs, seeds one apart; mean ± deviation"
    )


def positive_count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"it is {text!r}; it must be a whole number, 1 or more")
    return int(text)


def positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"it is {text!r}; it must be a number above 0")
    return number


def free_folder(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, ... that is not there yet."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def read_experiment(options: Any) -> "Experiment":
    """The experiment with its overrides, and with --engine, --device and --workers where the command has them."""
    from hardy import config

    given = {key: getattr(options, word, None) for key, word in _ENGINE_OPTIONS.items()}
    chosen = [f"engine.{key}={json.dumps(value)}" for key, value in given.items() if value]
    return config.read(options.experiment, [*options.overrides, *chosen], imports=getattr(options, "imports", ()))


def taken_back(overrides: Sequence[str], later: str) -> str | None:
    """The override that a later one takes back, as method=fedbn does with method.norm=group."""
    key, equals, _ = later.partition("=")
    return next((old for old in overrides if equals and f"{old.partition('=')[0]}.".startswith(f"{key}.")), None)
