"""`hardy completion`: commands and options completed by the shell."""

from argparse import ArgumentParser
from typing import Any

from hardy.cli.command import Command
from hardy.errors import HardyError

_SHELLS = ("bash", "zsh", "tcsh")


def _declare(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS)


def _completion(options: Any) -> None:
    try:
        import shtab
    except ImportError as error:
        raise HardyError("completion needs shtab: pip install 'hardy-fl[completion]'") from error
    from hardy.cli.parser import make_parser

    print(shtab.complete(make_parser(), shell=options.shell))


COMMAND = Command(
    name="completion",
    words='a script that completes commands and options: eval "$(hardy completion bash)"',
    declare=_declare,
    call=_completion,
)
