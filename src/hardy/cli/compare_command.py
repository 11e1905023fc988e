"""`hardy compare`: runs side by side."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from hardy.cli.command import Command


def _declare(parser: ArgumentParser) -> None:
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("comparison.html"), help="where the page goes")


def _compare(options: Any) -> None:
    from hardy.report.compare import compare, write_comparison
    from hardy.report.stored_run import refusing_odd_figures

    with refusing_odd_figures(" or ".join(map(str, options.folders))):
        print(compare(options.folders))
        print(f"\nwritten: {write_comparison(options.folders, options.out)}")


COMMAND = Command(name="compare", words="put runs side by side, in a table and a plot", declare=_declare, call=_compare)
