"""What the user typed, as the options of a command."""

import argparse
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from hardy.cli.command import Command, taken_back
from hardy.errors import unknown
from hardy.version import VERSION

COMMANDS = (
    "run",
    "resume",
    "sweep",
    "reproduce",
    "evaluate",
    "export",
    "compare",
    "playground",
    "parts",
    "schema",
    "data",
    "bench",
    "deploy",
    "site",
    "flower",
    "completion",
)
"""in the order of `hardy --help`; each is the COMMAND of the module NAME_command"""


class Parser(argparse.ArgumentParser):
    """A mistake is one line with the nearest word."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.rstrip('.')}. See `{self.prog} --help`.\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            kind = action.metavar if isinstance(action.metavar, str) else "value"
            raise argparse.ArgumentError(None, str(unknown(kind.lower(), value, map(str, action.choices))))

    def unrecognised(self, words: Sequence[str]) -> NoReturn:
        """An error for the first word nobody asked for."""
        word = words[0].partition("=")[0]
        if not word.startswith("-"):
            self.error(f"unrecognized arguments: {' '.join(words)}")
        known = [option for action in self._actions for option in action.option_strings]
        self.error(str(unknown("option", word, known)))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command that was typed; `call` is what runs it."""
    options, rest = make_parser().parse_known_args(arguments)
    if rest and not (hasattr(options, "overrides") and all("=" in word and word[0] != "-" for word in rest)):
        options.parser.unrecognised(rest)
    if rest:
        options.overrides += rest  # key=value may stand after an option too
    overrides = getattr(options, "overrides", ())
    for number, later in enumerate(overrides):
        if earlier := taken_back(overrides[:number], later):
            options.parser.error(f"{earlier} has no effect: {later} after it sets the same again. Leave one out")
    return options


def make_parser() -> Parser:
    parser = Parser(prog="hardy", description="Robust federated learning.")
    parser.add_argument("--version", action="version", version=f"hardy {VERSION}")
    _add(parser, [import_module(f"hardy.cli.{name}_command").COMMAND for name in COMMANDS])
    return parser


def _add(parser: argparse.ArgumentParser, commands: Sequence[Command]) -> None:
    below = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in commands:
        sub = below.add_parser(command.name, help=command.words, description=command.words)
        command.declare(sub)
        if command.commands:
            _add(sub, command.commands)
        else:
            sub.set_defaults(call=command.call, parser=sub)
