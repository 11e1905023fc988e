"""`hardy run`: an experiment from its beginning."""

from argparse import ArgumentParser
from dataclasses import replace
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
    tensorboard_option,
)
from hardy.errors import HardyError

ENGINE_NAMES = ("auto", "sequential", "vectorised", "flower")


def _declare(parser: ArgumentParser) -> None:
    experiment_arguments(parser)
    parser.add_argument("--out", type=Path, help="run folder (default runs/NAME)")
    parser.add_argument("--engine", choices=ENGINE_NAMES, help="flower: one process per client, see docs")
    device_option(parser)
    seeds_option(parser)
    data_option(parser)
    quiet_option(parser)
    tensorboard_option(parser)
    parser.add_argument("--alone", action="store_true", help="without the arms that the experiment is compared with")
    import_option(parser)


def _run(options: Any) -> None:
    import hardy
    from hardy.callbacks import tensorboard
    from hardy.cli.tables import finish, finish_arms, finish_far, finish_seeds, remark
    from hardy.config.arms import read_arms
    from hardy.runs.arms import start_arms
    from hardy.runs.seeds import start_seeds

    chosen = read_experiment(options)
    if options.tensorboard and tensorboard() not in chosen.callbacks:
        chosen = replace(chosen, callbacks=(*chosen.callbacks, tensorboard()))
    options.tensorboard = False  # from here on it is the experiment's
    out = options.out or free_folder(Path("runs") / chosen.name)
    arms = read_arms(options.experiment)
    if options.alone and not arms.overrides:
        raise HardyError(
            f"--alone leaves out the arms of an experiment, and {options.experiment} has none. Leave it out."
        )
    if arms.overrides and not options.alone:
        if chosen.engine.name == "flower":
            remark(f"over Flower the arms {', '.join(arms.overrides)} are left out.")
        else:
            start_arms(chosen, arms, out, options.seeds)
    if chosen.engine.name == "flower":
        if options.seeds > 1:
            raise HardyError(f"--seeds is {options.seeds}; over Flower run one seed at a time (seed=...).")
        from hardy.flower.local import trial

        finish_far(trial(chosen, out, data_folder=options.data, quiet=options.quiet), options)
        return
    if options.seeds == 1:
        finish(hardy.fit(chosen, out=out, data_folder=options.data, quiet=options.quiet), options)
    else:
        start_seeds(chosen, out, options.seeds)
        finish_seeds(out, options)
    finish_arms(out, options)


COMMAND = Command(
    name="run", words="run an experiment: a TOML file, or a bundled name such as demo", declare=_declare, call=_run
)
