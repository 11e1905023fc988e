"""`hardy playground`: a page on which networks can be attacked and their sliders pulled."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardy.cli.command import Command, data_option, import_option
from hardy.errors import HardyError


def _declare(parser: ArgumentParser) -> None:
    told = "runs to show, with their arms (default: Hardy's own)"
    parser.add_argument("folders", type=Path, nargs="*", metavar="DIR", help=told)
    parser.add_argument("--out", type=Path, help="the page to write (default playground.html)")
    parser.add_argument("--live", type=Path, metavar="DIR", help="serve the page on this machine while this run trains")
    parser.add_argument("--no-open", action="store_true", help="do not open the page in a browser")
    data_option(parser)
    import_option(parser)


def _playground(options: Any) -> None:
    from hardy.playground.bundled import bundled_content
    from hardy.playground.playground_page import write_page

    if options.live is not None:
        _serve(options)
        return
    if options.folders:
        from hardy.playground.content import content_of

        print("exporting the networks and attacking some images ...", flush=True)
        content, binary = content_of(_with_arms(options.folders), data_folder=options.data)
    else:
        content, binary = bundled_content()
    out = write_page(content, binary, options.out or Path("playground.html"))
    print(f"written: {out} ({out.stat().st_size / 1e6:.1f} MB, one file, asks for nothing from the network)")
    _open(out.absolute().as_uri(), options)


def _with_arms(folders: Sequence[Path]) -> list[Path]:
    """The runs, each followed by its arms that are finished."""
    from hardy.runs.arms import arm_folders

    every = [(folder, each) for folder in folders for each in arm_folders(folder)]
    return [each for folder, each in every if each == folder or (each / "summary.json").exists()]


def _serve(options: Any) -> None:
    from hardy.playground.live import LiveServer

    if options.folders or options.out is not None:
        raise HardyError("--live takes one run and writes no page. Leave DIR and --out out.")
    server = LiveServer(options.live)
    print(f"serving {options.live} at {server.address}\nOnly this machine can reach it. Ctrl-C ends it.", flush=True)
    _open(server.address, options)
    server.serve()


def _open(address: str, options: Any) -> None:
    if not options.no_open:
        import webbrowser

        webbrowser.open(address)


COMMAND = Command(
    name="playground",
    words="write a page on which to attack networks, choose width and robustness, and try aggregation rules",
    declare=_declare,
    call=_playground,
)
