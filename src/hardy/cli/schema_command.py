"""`hardy schema`: what an editor needs to complete and check an experiment."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from hardy.cli.command import Command, import_option


def _declare(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it there (default: print it)")
    import_option(parser)


def _schema(options: Any) -> None:
    import json

    from hardy.config.schema import experiment_schema
    from hardy.core.files import write_atomic

    text = json.dumps(experiment_schema(), indent=1, ensure_ascii=False) + "\n"
    if options.out is None:
        print(text, end="")
        return
    write_atomic(options.out, text.encode())
    print(f"written: {options.out}")


COMMAND = Command(
    name="schema",
    words="write a JSON schema of experiments, with which an editor completes and checks them",
    declare=_declare,
    call=_schema,
)
