"""`hardy resume`: a run that stopped goes on."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from hardy.cli.command import (
    Command,
    data_option,
    import_option,
    quiet_option,
    tensorboard_option,
    workers_option,
)
from hardy.errors import HardyError


def _declare(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--allow-change", action="store_true", help="go on although config.toml was changed")
    workers_option(parser, "processes that share the clients from here on (default: as many as before)")
    data_option(parser)
    quiet_option(parser)
    tensorboard_option(parser)
    import_option(parser)


def _resume(options: Any) -> None:
    import hardy
    from hardy import config
    from hardy.cli.tables import finish, finish_arms, finish_far, finish_seeds, finish_sweep, remark
    from hardy.report.stored_run import seed_folders
    from hardy.runs.workers import torchrun_ranks

    several = (options.folder / "sweep.json").exists() or bool(seed_folders(options.folder))
    if several and options.workers:
        raise HardyError(f"--workers is for one run; {options.folder} holds several, which go on as before.")
    if (options.folder / "sweep.json").exists():
        if options.tensorboard:
            raise HardyError(f"--tensorboard has no effect on the sweep {options.folder}. Leave it out.")
        finish_sweep(options.folder, options)
        return
    if seed_folders(options.folder):
        finish_seeds(options.folder, options)
        finish_arms(options.folder, options)
        return
    saved = options.folder / "config.toml"
    if saved.is_file() and (chosen := config.read(str(saved), check=False)).engine.name == "flower":
        from hardy.flower.local import trial

        if options.workers:
            raise HardyError("--workers has no effect over Flower, where each client has a node. Leave it out.")
        if options.allow_change:
            raise HardyError("--allow-change has no effect over Flower, where nodes take part in it; start a new run.")
        if not (options.folder / "flower").is_dir():
            raise HardyError(
                f"the clients of {options.folder} are nodes of a deployment; go on with `hardy deploy run APP`."
            )
        finish_far(trial(chosen, options.folder, data_folder=options.data, quiet=options.quiet, again=True), options)
        return
    run = hardy.resume(
        options.folder,
        data_folder=options.data,
        quiet=options.quiet,
        allow_change=options.allow_change,
        remark=remark,
        workers=options.workers,
    )
    if torchrun_ranks()[0]:
        return  # the first rank prints
    finish(run, options)
    finish_arms(options.folder, options)


COMMAND = Command(
    name="resume", words="go on with a run, or with a folder of seeds, that stopped", declare=_declare, call=_resume
)
