"""`hardy bench`: how fast each engine is."""

from argparse import ArgumentParser
from dataclasses import replace
from typing import Any

from hardy.cli.command import Command, data_option, device_option, experiment_arguments, import_option, read_experiment


def _declare(parser: ArgumentParser) -> None:
    experiment_arguments(parser)
    device_option(parser)
    data_option(parser)
    import_option(parser)


def _bench(options: Any) -> None:
    from hardy.engines import ENGINES, seconds_per_slot
    from hardy.runs.prepare import prepare

    chosen = read_experiment(options)
    plain = replace(chosen.engine, name="sequential", lane=None)
    run = prepare(replace(chosen, engine=plain), data_folder=options.data)
    device_data = run.needs_local("hardy bench").device_data
    for name, kind in ENGINES.items():
        engine = kind(run.engine.plan, device_data, chosen.training, seed=chosen.seed, lane=chosen.engine.lane)
        best = min(seconds_per_slot(engine, steps=2) for _ in range(4)) / 2
        print(f"{name:<12} {best * 1e3:8.2f} ms a client and local step")


COMMAND = Command(
    name="bench", words="time a local step of an experiment on each engine", declare=_declare, call=_bench
)
