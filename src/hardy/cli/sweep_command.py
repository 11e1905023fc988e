"""`hardy sweep`: which setting is best on validation rows."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from hardy.cli.command import (
    Command,
    data_option,
    device_option,
    experiment_arguments,
    free_folder,
    import_option,
    quiet_option,
    read_experiment,
    seeds_option,
)


def _declare(parser: ArgumentParser) -> None:
    experiment_arguments(parser)
    parser.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="KEY=VALUES",
        help="values such as training.rate=0.01,0.1; with --random also a range: 0.01..1 or 0.001..1:log. Repeatable",
    )
    parser.add_argument("--random", type=int, metavar="N", help="N settings drawn at random instead of all of them")
    seeds_option(parser)
    parser.add_argument("--out", type=Path, help="folder of the sweep (default runs/NAME-sweep)")
    device_option(parser)
    data_option(parser)
    quiet_option(parser)
    import_option(parser)


def _sweep(options: Any) -> None:
    from hardy.cli.tables import finish_sweep
    from hardy.runs.sweep import grid_settings, random_settings, start_sweep

    chosen = read_experiment(options)
    if options.random is None:
        settings = grid_settings(options.vary)
    else:
        settings = random_settings(options.vary, options.random, chosen.seed)
    out = options.out or free_folder(Path("runs") / f"{chosen.name}-sweep")
    start_sweep(chosen, out, settings, options.seeds)
    finish_sweep(out, options)


COMMAND = Command(
    name="sweep", words="run several settings and choose one on validation rows", declare=_declare, call=_sweep
)
