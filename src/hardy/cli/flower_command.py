"""`hardy flower`: the old name of `hardy deploy`."""

from argparse import REMAINDER, ArgumentParser
from typing import Any

from hardy.cli.command import Command
from hardy.errors import HardyError


def _declare(parser: ArgumentParser) -> None:
    parser.add_argument("words", nargs=REMAINDER)


def _moved(options: Any) -> None:
    del options
    raise HardyError(
        "`hardy flower` is now `hardy deploy`: a deployment on Flower alone lets anybody who reaches its port run "
        "code on every site. See `hardy deploy --help` and docs/flower.md."
    )


COMMAND = Command(name="flower", words="now `hardy deploy`", declare=_declare, call=_moved)
