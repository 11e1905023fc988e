"""`hardy playground`: a page on which networks can be attacked and their sliders pulled."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from hardy.cli.command import Command, data_option


def _declare(parser: ArgumentParser) -> None:
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="runs to show")
    parser.add_argument("--out", type=Path, default=Path("playground.html"), help="default playground.html")
    parser.add_argument("--no-open", action="store_true", help="write the page and do not open it")
    data_option(parser)


def _playground(options: Any) -> None:
    from hardy.playground.content import content_of
    from hardy.playground.playground_page import write_page

    out = write_page(content_of(options.folders, data_folder=options.data), options.out)
    print(f"written: {out} ({out.stat().st_size / 1e6:.1f} MB, one file, asks for nothing from the network)")
    if not options.no_open:
        import webbrowser

        webbrowser.open(out.absolute().as_uri())


COMMAND = Command(
    name="playground",
    words="write a page on which to attack networks, choose width and robustness, and try aggregation rules",
    declare=_declare,
    call=_playground,
)
