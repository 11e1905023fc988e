"""`hardy run`: an experiment from its beginning."""

from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    taken_back,
    tensorboard_option,
    workers_option,
)
from hardy.errors import HardyError

if TYPE_CHECKING:
    from hardy.config.arm_table import Arms

ENGINE_NAMES = ("auto", "sequential", "vectorised", "distributed", "flower")


def _declare(parser: ArgumentParser) -> None:
    experiment_arguments(parser)
    parser.add_argument("--out", type=Path, help="run folder (default runs/NAME)")
    parser.add_argument(
        "--engine", choices=ENGINE_NAMES, help="distributed: with --workers; flower: a process per client"
    )
    workers_option(parser, "processes that share the clients, with cores / N threads each (or start it by torchrun)")
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
    from hardy.cli.tables import finish, finish_arms, finish_far, finish_seeds
    from hardy.runs.arms import start_arms
    from hardy.runs.seeds import start_seeds
    from hardy.runs.workers import torchrun_ranks

    arms = _arms(options)
    if arms is not None:
        options.overrides = [*arms.measure, *options.overrides]
    chosen = read_experiment(options)
    if options.tensorboard and tensorboard() not in chosen.callbacks:
        chosen = replace(chosen, callbacks=(*chosen.callbacks, tensorboard()))
    options.tensorboard = False  # from here on it is the experiment's
    number, world = torchrun_ranks()
    if world > 1 and (options.seeds > 1 or arms is not None):
        what = "--seeds" if options.seeds > 1 else "an experiment with arms"
        raise HardyError(f"{what} under torchrun would be several runs; start one at a time (--alone, seed=...).")
    if number:  # the first rank writes and prints
        hardy.fit(chosen, data_folder=options.data, quiet=True)
        return
    out = options.out or free_folder(Path("runs") / chosen.name)
    if arms is not None:
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


def _arms(options: Any) -> "Arms | None":
    """The arms to run beside the experiment, if there are some and nothing speaks against them."""
    from hardy.cli.tables import remark
    from hardy.config.arm_table import read_arms

    arms = read_arms(options.experiment)
    if options.alone and not arms.overrides:
        raise HardyError(
            f"--alone leaves out the arms of an experiment, and {options.experiment} has none. Leave it out."
        )
    if options.alone or not arms.overrides:
        return None
    keys = [override.partition("=")[0] for override in options.overrides]
    flower = options.engine == "flower" or "engine.name=flower" in options.overrides
    if flower or any(key.startswith("data.source") for key in keys):
        why = "over Flower" if flower else "on other data"
        remark(f"{why} the arms of {options.experiment} are left out: {', '.join(arms.overrides)}")
        return None
    for override in options.overrides:
        without = [name for name, own in arms.overrides.items() if any(_replaces_part(one, override) for one in own)]
        if without:
            remark(f"{override} does not hold for {', '.join(without)}, where another part takes its place")
    return arms


def _replaces_part(later: str, override: str) -> bool:
    """Whether a later override takes away the part whose option this one sets."""
    return later.partition("=")[0] != override.partition("=")[0] and bool(taken_back([override], later))


COMMAND = Command(
    name="run", words="run an experiment: a TOML file, or a bundled name such as demo", declare=_declare, call=_run
)
