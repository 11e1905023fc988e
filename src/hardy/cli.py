"""The command line: run | resume | evaluate | export | compare | parts | data | bench."""

import argparse
import ast
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any, get_args

import hardy
from hardy import config
from hardy.attacks.threats import PRESETS
from hardy.core.engine import DataPart
from hardy.core.files import write_atomic
from hardy.data.sources import data_root, describe
from hardy.engines import ENGINES, seconds_per_slot
from hardy.errors import HardyError, unknown
from hardy.registry import KINDS, PARTS, name_of
from hardy.report.compare import compare, seeds_summary, write_comparison
from hardy.report.tensorboard import require_tensorboard, write_tensorboard
from hardy.runs.evaluate import evaluate_run, evaluate_settings
from hardy.runs.prepare import prepare
from hardy.runs.progress import clock

_LEVELS = (0.0, 0.2, 0.5, 0.8, 1.0)
"""robustness in a table of settings, as in Split-Mix's Fig. 7"""


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
    run.add_argument("--engine", choices=["auto", *ENGINES, "flower"], help="flower: one process per client, see docs")
    run.add_argument("--device", help="auto, cpu or cuda")
    run.add_argument("--seeds", type=int, default=1, metavar="N", help="N runs with seeds one apart; mean ± deviation")

    resume = command("resume", _resume, "go on with a run that stopped")
    resume.add_argument("folder", type=Path)

    evaluate = command("evaluate", _evaluate, "measure a finished run; writes evaluation.json")
    evaluate.add_argument("folder", type=Path)
    evaluate.add_argument("--threats", default="", metavar="A,B", help="such as pgd-20,autoattack (see hardy parts)")
    evaluate.add_argument("--attack-branch", help="statistics the attacks climb on (default: the experiment's)")
    evaluate.add_argument("--predict-branch", help="statistics images are judged with (default: the experiment's)")
    evaluate.add_argument(
        "--part", choices=get_args(DataPart), default="test", help="of each client's rows; default test"
    )
    evaluate.add_argument("--limit", type=int, metavar="N", help="only the first N of those rows of each client")
    evaluate.add_argument("--epsilons", type=_numbers, default=(), metavar="2,4,8", help="radii in 1/255, for a curve")
    evaluate.add_argument("--best", action="store_true", help="as it was at its best round on validation rows")
    evaluate.add_argument("--no-checks", action="store_true", help="skip the red flags")

    evaluate.add_argument("--width", type=float, default=1.0, metavar="R", help="of the network; default 1")
    evaluate.add_argument("--robustness", type=float, metavar="λ", help="mix of the branches, in [0, 1]")
    evaluate.add_argument("--settings", action="store_true", help="also every width, and λ = 0, 0.2, 0.5, 0.8, 1")

    onnx = command("export", _export, "write a finished run as ONNX, one file for each base, with a manifest")
    onnx.add_argument("folder", type=Path)
    onnx.add_argument("--out", type=Path, required=True, metavar="MODEL.onnx")
    onnx.add_argument("--width", type=float, default=1.0, metavar="R", help="the widest the files can serve; default 1")
    onnx.add_argument("--robustness", type=float, metavar="λ", help="where the run-time input stands at first")
    onnx.add_argument("--client", type=int, metavar="N", help="whose network, where clients have their own")
    onnx.add_argument("--best", action="store_true", help="as it was at its best round on validation rows")

    side = command("compare", _compare, "put runs side by side, in a table and a plot")
    side.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    side.add_argument("--out", type=Path, default=Path("comparison.html"), help="where the page goes")

    parts = command("parts", _parts, "list the parts a method can be made of, or say what one of them takes")
    parts.add_argument("name", nargs="?", help="such as fedrbn or trimmed_mean")
    command("data", _data, "list the data sets and which of them are here").add_argument(
        "--data", type=Path, help="folder of real data sets (default: HARDY_DATA)"
    )
    bench = command("bench", _bench, "time a local step of an experiment on each engine")
    bench.add_argument("experiment")
    bench.add_argument("overrides", nargs="*", metavar="key=value")
    bench.add_argument("--device", help="auto, cpu or cuda")
    _flower_parser(commands)
    for sub in (run, resume, evaluate, onnx, bench):
        sub.add_argument("--data", type=Path, help="folder of real data sets (default: HARDY_DATA)")
    for sub in (run, resume, evaluate):
        sub.add_argument("--quiet", action="store_true", help="no progress bar")
    for sub in (run, resume):
        sub.add_argument("--tensorboard", action="store_true", help="also write TensorBoard event files")
    return parser


def _flower_parser(commands: Any) -> None:
    flower = commands.add_parser("flower", help="keys and the app folder for a deployment on Flower")
    parts = flower.add_subparsers(required=True, metavar="WHAT")
    keys = parts.add_parser("certificates", help="a certificate for the SuperLink, a key for each node")
    keys.set_defaults(command=_flower_certificates)
    keys.add_argument("folder", type=Path)
    keys.add_argument("--hosts", default="localhost,127.0.0.1", help="names and addresses of the SuperLink")
    keys.add_argument("--nodes", type=int, required=True, metavar="N")
    keys.add_argument("--days", type=int, default=365, help="how long they are valid (default 365)")
    deploy = parts.add_parser("app", help="the small folder that `flwr run` sends to the SuperLink")
    deploy.set_defaults(command=_flower_app)
    deploy.add_argument("experiment")
    deploy.add_argument("folder", type=Path)
    deploy.add_argument("overrides", nargs="*", metavar="key=value")
    deploy.add_argument("--superlink", required=True, metavar="HOST:PORT")
    deploy.add_argument("--ca", type=Path, required=True, help="the ca.pem of `hardy flower certificates`")
    deploy.add_argument("--out", type=Path, required=True, help="run folder, on the SuperLink's machine")


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
    if chosen.engine.name == "flower":
        if options.seeds > 1:
            raise HardyError(f"--seeds is {options.seeds}; over Flower run one seed at a time (seed=...).")
        from hardy.flower.local import trial

        _far(trial(chosen, out, data_folder=options.data, quiet=options.quiet), options)
        return
    if options.seeds == 1:
        run = hardy.fit(chosen, out=out, data_folder=options.data, quiet=options.quiet)
        _finish(run, options)
        return
    folders = []
    for seed in range(chosen.seed, chosen.seed + options.seeds):
        folders.append(out / f"seed-{seed}")
        run = hardy.fit(replace(chosen, seed=seed), out=folders[-1], data_folder=options.data, quiet=options.quiet)
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
    saved = options.folder / "config.toml"
    if saved.is_file() and (chosen := config.read(str(saved), check=False)).engine.name == "flower":
        from hardy.flower.local import trial

        if not (options.folder / "flower").is_dir():
            raise HardyError(
                f"the clients of {options.folder} are nodes of a deployment; go on with `flwr run APP` on its folder."
            )
        _far(trial(chosen, options.folder, data_folder=options.data, quiet=options.quiet, again=True), options)
        return
    run = hardy.resume(
        options.folder,
        data_folder=options.data,
        quiet=options.quiet,
        remark=lambda line: print(f"hardy: {line}", file=sys.stderr),
    )
    _finish(run, options)


def _far(folder: Path, options: Any) -> None:
    """What a run over Flower left."""
    if options.tensorboard:
        write_tensorboard(folder)
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    print(_table(summary) + _threat_table(summary["robust_accuracy"]))
    print(f"\nreport: {folder / 'report.html'}")


def _flower_certificates(options: Any) -> None:
    from hardy.flower.certificates import certificates

    certificates(options.folder, hosts=options.hosts.split(","), nodes=options.nodes, days=options.days)
    print(f"written: {options.folder}/ca.pem for everybody, server.pem and server.key for the SuperLink, ")
    print("node-N.key for the N-th node and no other, node-N.pub to register it")


def _flower_app(options: Any) -> None:
    from hardy.flower.certificates import app

    app(options.folder, _read(options), superlink=options.superlink, authority=options.ca, out=options.out)
    print(f"written: {options.folder}. Then:\n  . {options.folder}/environment\n  flwr run {options.folder} --stream")


def _finish(run: hardy.Run, options: Any) -> None:
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
        chosen = f", chosen under {best['select']}" if best.get("select") else ""
        rows.append((f"mean at best validation (round {best['round']}{chosen})", best["standard_accuracy"]["mean"]))
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
    run = hardy.load(options.folder, data_folder=options.data, best=options.best)
    assert run.folder is not None
    found = evaluate_run(
        run,
        options.threats,
        attack_branch=options.attack_branch,
        predict_branch=options.predict_branch,
        width=options.width,
        robustness=options.robustness,
        part=options.part,
        limit=options.limit,
        epsilons=options.epsilons,
        checks=not options.no_checks,
        quiet=options.quiet,
    )
    print(_table({**run.summary(), "standard_accuracy": found["standard_accuracy"], "best": None}))
    print(_threat_table(found["robust_accuracy"]))
    for flag in found.get("flags", []):
        print(f"\nRED FLAG {flag['name']} (client {flag['client']}): {flag['message']}\n  {flag['advice']}")
    which = f"the first {options.limit}" if options.limit else "all"
    print(f"\n{which} {options.part} rows of each client; written: {run.folder / 'evaluation.json'}")
    if options.settings:
        mixes = "adversarial" in (run.engine.plan.method.norm.branches or ())
        rows = evaluate_settings(
            run,
            robustness=_LEVELS if mixes else (),
            threats=options.threats,
            part=options.part,
            limit=options.limit,
            quiet=options.quiet,
        )
        print("\n" + _settings_table(rows))


def _settings_table(rows: Sequence[dict[str, Any]]) -> str:
    """Widths and robustness, with what they cost and score."""
    threats = list(rows[0]["robust_accuracy"])
    lines = ["width  robustness       MACs  parameters  accuracy  " + "  ".join(threats)]
    for row in rows:
        level = "" if row["robustness"] is None else f"{row['robustness']:g}"
        scores = [row["standard_accuracy"], *(row["robust_accuracy"][threat] for threat in threats)]
        shown = "  ".join(f"{score['mean']:8.1%}" for score in scores)
        lines.append(f"{row['width']:<5g}  {level:>10}  {row['macs']:>9,}  {row['parameters']:>10,}  {shown}")
    return "\n".join(lines)


def _export(options: Any) -> None:
    run = hardy.load(options.folder, data_folder=options.data, best=options.best)
    manifest = run.export(options.out, width=options.width, robustness=options.robustness, client=options.client)
    print(f"written: {manifest}\nrun it: hardy.deploy.OnnxPredictor({str(manifest)!r})(images)")


def _threat_table(threats: dict[str, Any]) -> str:
    """Robust accuracy, one line per threat."""
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
    if options.name is not None:
        print("\n\n".join(_part(options.name)))
        return
    for kind, parts in PARTS.items():
        print(f"{kind}")
        for name, factory in sorted(parts.items()):
            print(f"  {name:<20} {_first_words(factory)}")
    print("threat")
    for name, words in PRESETS.items():
        print(f"  {name:<20} {words}")


def _first_words(factory: Callable[..., Any]) -> str:
    return " ".join((inspect.getdoc(factory) or "").partition("\n\n")[0].split())


def _part(name: str) -> list[str]:
    """A part's docstring and arguments; of each, where several kinds have one of this name."""
    found = [(kind, parts[name]) for kind, parts in PARTS.items() if name in parts]
    texts = [f"{kind} {name}\n\n{inspect.getdoc(factory)}{_arguments(factory)}" for kind, factory in found]
    texts += [f"threat {name}\n\n{PRESETS[name]}"] if name in PRESETS else []
    if not texts:
        raise unknown("part", name, {*PRESETS, *(known for parts in PARTS.values() for known in parts)})
    return texts


def _arguments(factory: Callable[..., Any]) -> str:
    """A line for each argument: its default, and what its class says of it."""
    words, lines = _field_words(factory), []
    for name, parameter in inspect.signature(factory).parameters.items():
        default = parameter.default
        if isinstance(default, tuple(KINDS)):
            default = name_of(type(default))
        shown = name if default is parameter.empty else f"{name} = {default}"
        lines.append(f"  {shown:<28} {words.get(name, '')}".rstrip())
    return "\n\narguments\n" + "\n".join(lines) if lines else ""


def _field_words(factory: Callable[..., Any]) -> dict[str, str]:
    """The text under each field of a dataclass."""
    found = {}
    for owner in reversed(factory.__mro__) if is_dataclass(factory) and isinstance(factory, type) else ():
        body = ast.parse(dedent(inspect.getsource(owner))).body[0] if is_dataclass(owner) else None
        for field, text in pairwise(body.body) if isinstance(body, ast.ClassDef) else ():
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def _data(options: Any) -> None:
    print(describe(data_root(options.data)))


def _bench(options: Any) -> None:
    chosen = _read(options)
    plain = replace(chosen.engine, name="sequential", lane=None)
    run = prepare(replace(chosen, engine=plain), data_folder=options.data)
    device_data = run.needs_local("hardy bench").device_data
    for name, kind in ENGINES.items():
        engine = kind(run.engine.plan, device_data, chosen.training, seed=chosen.seed, lane=chosen.engine.lane)
        best = min(seconds_per_slot(engine, steps=2) for _ in range(4)) / 2
        print(f"{name:<12} {best * 1e3:8.2f} ms a client and local step")


if __name__ == "__main__":
    sys.exit(main())
