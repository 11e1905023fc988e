"""The command line: run | resume | evaluate | compare | parts | data | bench."""

import argparse
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hardy
from hardy import config, evaluation, experiment
from hardy.data.sources import data_root, describe
from hardy.engines import ENGINES, Resident, seconds_per_slot
from hardy.errors import HardyError
from hardy.progress import clock
from hardy.registry import PARTS
from hardy.report.compare import compare, seeds_summary, write_comparison
from hardy.report.tensorboard import require_tensorboard, write_tensorboard
from hardy.robustness.threats import PRESETS
from hardy.state import write_atomic


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. A user's mistake is one line on stderr and exit code 2."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and not (hasattr(options, "overrides") and all("=" in word and word[0] != "-" for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest  # key=value may stand after an option too
    try:
        options.command(options)
    except HardyError as error:
        print(f"hardy: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hardy: stopped. A run kept in a folder goes on with `hardy resume DIR`.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of our output has left
        return 0
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hardy", description="Federated learning that holds.")
    parser.add_argument("--version", action="version", version=f"hardy {hardy.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: Callable[[Any], None], words: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=words, description=words)
        sub.set_defaults(command=function)
        return sub

    run = command("run", _run, "run an experiment: a TOML file, or a bundled name such as demo")
    run.add_argument("experiment")
    run.add_argument("overrides", nargs="*", metavar="key=value", help="for example training.rate=0.1 method=fedbn")
    run.add_argument("--out", type=Path, help="run folder (default runs/NAME)")
    run.add_argument("--engine", choices=["auto", *ENGINES])
    run.add_argument("--device", help="auto, cpu or cuda")
    run.add_argument("--seeds", type=int, default=1, metavar="N", help="N runs with seeds one apart; mean ± deviation")

    resume = command("resume", _resume, "go on with a run that stopped")
    resume.add_argument("folder", type=Path)

    evaluate = command("evaluate", _evaluate, "measure a finished run; writes evaluation.json")
    evaluate.add_argument("folder", type=Path)
    evaluate.add_argument("--threats", default="", metavar="A,B", help="such as pgd-20,autoattack (see hardy parts)")
    evaluate.add_argument("--attack-branch", help="statistics the attacks climb on (default: the experiment's)")
    evaluate.add_argument("--predict-branch", help="statistics images are judged with (default: the experiment's)")
    evaluate.add_argument("--limit", type=int, metavar="N", help="only the first N test rows of each client")
    evaluate.add_argument("--epsilons", type=_numbers, default=(), metavar="2,4,8", help="radii in 1/255, for a curve")
    evaluate.add_argument("--no-checks", action="store_true", help="skip the red flags")

    side = command("compare", _compare, "put runs side by side, in a table and a plot")
    side.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    side.add_argument("--out", type=Path, default=Path("comparison.html"), help="where the page goes")

    command("parts", _parts, "list the parts a method can be made of")
    command("data", _data, "list the data sets and which of them are here").add_argument(
        "--data", type=Path, help="folder of real data sets (default: HARDY_DATA)"
    )
    bench = command("bench", _bench, "time a local step of an experiment on each engine")
    bench.add_argument("experiment")
    bench.add_argument("overrides", nargs="*", metavar="key=value")
    bench.add_argument("--device", help="auto, cpu or cuda")
    for sub in (run, resume, evaluate, bench):
        sub.add_argument("--data", type=Path, help="folder of real data sets (default: HARDY_DATA)")
    for sub in (run, resume, evaluate):
        sub.add_argument("--quiet", action="store_true", help="no progress bar")
    for sub in (run, resume):
        sub.add_argument("--tensorboard", action="store_true", help="also write TensorBoard event files")
    return parser


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


def _read(options: Any) -> config.Experiment:
    chosen = [f"engine.{key}={json.dumps(v)}" for key in ("name", "device") if (v := _engine_option(options, key))]
    return config.read(options.experiment, [*options.overrides, *chosen])


def _engine_option(options: Any, key: str) -> str | None:
    found: str | None = getattr(options, {"name": "engine"}.get(key, key), None)
    return found


def _run(options: Any) -> None:
    if options.seeds < 1:
        raise HardyError(f"--seeds is {options.seeds}; it must be 1 or more.")
    chosen = _read(options)
    if options.tensorboard:
        require_tensorboard()
    out = options.out or _free(Path("runs") / chosen.name)
    if options.seeds == 1:
        run = experiment.fit(chosen, out=out, data_folder=options.data, quiet=options.quiet)
        _finish(run, options)
        return
    folders = []
    for seed in range(chosen.seed, chosen.seed + options.seeds):
        folders.append(out / f"seed-{seed}")
        run = experiment.fit(replace(chosen, seed=seed), out=folders[-1], data_folder=options.data, quiet=options.quiet)
        _finish(run, options)
    write_atomic(out / "summary.json", json.dumps(seeds_summary(folders), indent=2).encode())
    print(compare([out]))


def _free(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, ... that holds no run."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def _resume(options: Any) -> None:
    run = experiment.resume(
        options.folder,
        data_folder=options.data,
        quiet=options.quiet,
        remark=lambda line: print(f"hardy: {line}", file=sys.stderr),
    )
    _finish(run, options)


def _finish(run: experiment.Run, options: Any) -> None:
    assert run.folder is not None
    if options.tensorboard:
        write_tensorboard(run.folder)
    print(_table(run.summary()) + _threat_table(run.robust))
    print(f"\nreport: {run.folder / 'report.html'}")


def _table(summary: dict[str, Any]) -> str:
    """A finished run in a few lines."""
    accuracy = summary["standard_accuracy"]
    rows = [
        *accuracy["by_domain"].items(),
        ("mean of clients", accuracy["mean"]),
        ("worst client", accuracy["worst_client"]),
    ]
    best = summary["best"]
    if best and best["round"] != summary["rounds"]:
        rows.append((f"mean at best validation (round {best['round']})", best["standard_accuracy"]["mean"]))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value:6.1%}" for name, value in rows if value is not None]
    where = f"{summary['engine']}, {summary['device']}"
    head = (
        f"{summary['name']}: {summary['method']}, {summary['rounds']} rounds in {clock(summary['seconds'])} ({where})"
    )
    up, down, work = summary["bytes_up"] / 1e6, summary["bytes_down"] / 1e6, summary["macs"] / 1e9
    traffic = f"{up:,.1f} MB up, {down:,.1f} MB down, {work:,.1f} GMACs"
    lost = ", ".join(f"{count} {kind}" for kind, count in summary["lost"].items())
    return "\n".join([head, "", *lines, "", traffic + (f"; replies lost: {lost}" if lost else "")])


def _evaluate(options: Any) -> None:
    run = experiment.load(options.folder, data_folder=options.data)
    found = evaluation.evaluate(
        run,
        options.threats,
        attack_branch=options.attack_branch,
        predict_branch=options.predict_branch,
        limit=options.limit,
        epsilons=options.epsilons,
        checks=not options.no_checks,
        quiet=options.quiet,
    )
    print(_table({**run.summary(), "standard_accuracy": found["standard_accuracy"], "best": None}))
    print(_threat_table(found["robust_accuracy"]))
    for flag in found.get("flags", []):
        print(f"\nRED FLAG {flag['name']} (client {flag['client']}): {flag['message']}\n  {flag['advice']}")
    print(f"\nwritten: {options.folder / 'evaluation.json'}")


def _threat_table(threats: dict[str, Any]) -> str:
    """Robust accuracy, a line a threat."""
    width = max((len(name) for name in threats), default=0)
    lines = [
        f"{name:<{width}}  {found['mean']:6.1%} mean  {found['worst_client']:6.1%} worst client"
        for name, found in threats.items()
        if found["mean"] is not None
    ]
    return "\n".join(["", "", *lines]) if lines else ""


def _compare(options: Any) -> None:
    print(compare(options.folders))
    print(f"\nwritten: {write_comparison(options.folders, options.out)}")


def _parts(options: Any) -> None:
    for kind, parts in PARTS.items():
        print(f"{kind}")
        for name, factory in sorted(parts.items()):
            words = " ".join((inspect.getdoc(factory) or "").partition("\n\n")[0].split())
            print(f"  {name:<20} {words}")
    print("threat")
    for name, words in PRESETS.items():
        print(f"  {name:<20} {words}")


def _data(options: Any) -> None:
    print(describe(data_root(options.data)))


def _bench(options: Any) -> None:
    chosen = _read(options)
    run = experiment.prepare(
        replace(chosen, engine=replace(chosen.engine, name="sequential")), data_folder=options.data
    )
    resident: Resident = run.engine.resident
    for name, kind in ENGINES.items():
        engine = kind(run.engine.plan, resident, chosen.training, seed=chosen.seed, lane=chosen.engine.lane)
        best = min(seconds_per_slot(engine, steps=2) for _ in range(4)) / 2
        print(f"{name:<12} {best * 1e3:8.2f} ms a client and local step")


if __name__ == "__main__":
    sys.exit(main())
