"""The command line: `hardy COMMAND`, or `python -m hardy COMMAND`.

A command is a module of this folder, NAME_command.py, whose COMMAND says what it is called, what it takes and what it
calls, and a line in `hardy.cli.parser.COMMANDS`:

    from argparse import ArgumentParser
    from typing import Any

    from hardy.cli.command import Command


    def _declare(parser: ArgumentParser) -> None:
        parser.add_argument("folder", type=Path)


    def _call(options: Any) -> None:
        import hardy  # whatever is heavy is imported here, not on top

        print(hardy.load(options.folder).summary())


    COMMAND = Command(name="show", words="print the summary of a run", declare=_declare, call=_call)

Every command's module is loaded to write `hardy --help`, so on top it imports nothing but the standard library,
`hardy.errors` and `hardy.cli.command`; a test checks that neither torch nor numpy is loaded. A user's mistake raises
HardyError: one line, exit code 2.
"""

import os
import sys
from collections.abc import Sequence

_LONGEST = 4000
"""characters of a message"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. A user's mistake is one line on stderr and exit code 2."""
    try:
        return _main(arguments)
    except KeyboardInterrupt as stopped:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends us at once, without a traceback
        words = str(stopped) or "stopped. A run kept in a folder goes on with `hardy resume DIR`."
        print(f"hardy: {words}", file=sys.stderr)
        return 128 + getattr(stopped, "signal", signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of our output has left
        return 0


def _main(arguments: Sequence[str] | None) -> int:
    from hardy.cli.parser import parse_arguments
    from hardy.errors import HardyError, printable

    options = parse_arguments(arguments)
    try:
        for place in getattr(options, "imports", ()):
            from hardy.user_code import import_code

            import_code(place)
        options.call(options)
    except HardyError as error:
        words = str(error)
    except BrokenPipeError:
        raise
    except MemoryError:
        words = "out of memory. Take a smaller batch, lane (engine.lane) or model, or free memory."
    except OSError as error:
        from hardy.core.files import disk_words

        words = f"{error.filename or 'the system'}: {disk_words(error)}"
    except RuntimeError as error:  # torch's own words for a lack of memory
        if "memory" not in str(error):
            raise
        words = f"out of memory ({str(error).splitlines()[0]}). Take a smaller batch, lane (engine.lane) or model."
    else:
        return 0
    if len(words) > _LONGEST:  # it quotes what it was given, and that may be anything
        words = f"{words[: _LONGEST - 500]} [...] {words[-500:]}"
    print(f"hardy: {printable(words, len(words))}", file=sys.stderr)
    return 2
