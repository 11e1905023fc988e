"""`hardy evaluate`: what a finished run is worth."""

from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardy.cli.command import Command, best_option, data_option, import_option, quiet_option
from hardy.errors import HardyError

if TYPE_CHECKING:
    from hardy.runs.run import Run

DATA_PARTS = ("train", "validation", "test")
_LEVELS = (0.0, 0.2, 0.5, 0.8, 1.0)
"""robustness in a table of settings, as in Split-Mix's Fig. 7"""
_OF_RUNS: dict[str, Any] = {
    "attack_branch": None,
    "predict_branch": None,
    "part": "test",
    "epsilons": (),
    "best": False,
    "width": 1.0,
    "robustness": None,
    "settings": False,
    "audit": "",
    "references": 0,
    "certify": [],
}
"""options that only a run has, with what they are when nobody gives them"""


def _declare(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="of a run; or MODEL.onnx, with --data FILE")
    parser.add_argument("--threats", default="", metavar="A,B", help="such as pgd-20,autoattack (see hardy parts)")
    parser.add_argument("--metrics", metavar="A,B", help="such as auroc,ece (default: the experiment's)")
    parser.add_argument("--attack-branch", help="statistics the attacks climb on (default: the experiment's)")
    parser.add_argument("--predict-branch", help="statistics images are judged with (default: the experiment's)")
    parser.add_argument("--part", choices=DATA_PARTS, default="test", help="of each client's rows; default test")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N of those rows of each client")
    parser.add_argument("--epsilons", type=_numbers, default=(), metavar="2,4,8", help="radii in 1/255, for a curve")
    parser.add_argument(
        "--certify",
        action="append",
        default=[],
        metavar="sigma=S,...",
        help="accuracy certified by randomised smoothing, such as sigma=0.25,n=1000; may be given several times",
    )
    best_option(parser)
    parser.add_argument("--no-checks", action="store_true", help="skip the red flags")
    parser.add_argument("--width", type=float, default=1.0, metavar="R", help="of the network; default 1")
    parser.add_argument("--robustness", type=float, metavar="λ", help="mix of the branches, in [0, 1]")
    parser.add_argument("--audit", default="", metavar="A,B", help="membership, inversion: writes audit.json")
    parser.add_argument(
        "--references", type=int, default=0, metavar="N", help="networks trained anew to calibrate the membership audit"
    )
    parser.add_argument("--settings", action="store_true", help="also every width, and λ = 0, 0.2, 0.5, 0.8, 1")
    data_option(parser)
    quiet_option(parser)
    import_option(parser)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


def _evaluate(options: Any) -> None:
    from hardy.runs.seeds import finished_seeds

    if options.folder.suffix == ".onnx":
        _evaluate_onnx(options)
    elif folders := finished_seeds(options.folder):
        _evaluate_seeds(folders, options)
    else:
        _evaluate_one(options)


def _evaluate_onnx(options: Any) -> None:
    """Any ONNX classifier on any data."""
    import json

    from hardy.cli.tables import classifier_table
    from hardy.core.files import write_atomic
    from hardy.runs.classifiers import evaluate_classifier

    if options.data is None:
        raise HardyError(f"{options.folder} is measured on data: hardy evaluate {options.folder} --data x.npz.")
    for name, usual in _OF_RUNS.items():
        if getattr(options, name) != usual:
            raise HardyError(
                f"--{name.replace('_', '-')} is for a run, and {options.folder} is an ONNX file. Leave it out."
            )
    found = evaluate_classifier(
        options.folder,
        str(options.data),
        options.threats,
        metrics=options.metrics or (),
        limit=options.limit,
        checks=not options.no_checks,
    )
    print(classifier_table(found))
    for flag in found.get("flags", []):
        print(f"\nRED FLAG {flag['name']}: {flag['message']}\n  {flag['advice']}")
    path = options.folder.with_suffix(".evaluation.json")
    write_atomic(path, json.dumps(found, indent=1).encode())
    print(f"\nwritten: {path}")


def _measure(folder: Path, options: Any) -> tuple["Run", dict[str, Any]]:
    import hardy
    from hardy.runs.evaluate import evaluate_run

    run = hardy.load(folder, data_folder=options.data, best=options.best)
    found = evaluate_run(
        run,
        options.threats,
        metrics=options.metrics,
        attack_branch=options.attack_branch,
        predict_branch=options.predict_branch,
        width=options.width,
        robustness=options.robustness,
        part=options.part,
        limit=options.limit,
        epsilons=options.epsilons,
        certify=options.certify,
        checks=not options.no_checks,
        quiet=options.quiet,
    )
    return run, found


def _print_flags(found: dict[str, Any]) -> None:
    for flag in found.get("flags", []):
        print(f"\nRED FLAG {flag['name']} (client {flag['client']}): {flag['message']}\n  {flag['advice']}")


def _print_written(path: Path, options: Any) -> None:
    which = f"the first {options.limit}" if options.limit else "all"
    print(f"\n{which} {options.part} rows of each client; written: {path}")


def _evaluate_one(options: Any) -> None:
    from hardy.cli.tables import certificate_table, metrics_table, settings_table, summary_table, threat_table
    from hardy.runs.evaluate import evaluate_settings

    run, found = _measure(options.folder, options)
    assert run.folder is not None
    print(summary_table({**run.summary(), "standard_accuracy": found["standard_accuracy"], "best": None}))
    print(threat_table(found["robust_accuracy"]) + metrics_table(found) + certificate_table(found))
    _print_flags(found)
    _print_written(run.folder / "evaluation.json", options)
    _audit(run, options)
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
        print("\n" + settings_table(rows))


def _audit(run: "Run", options: Any) -> None:
    """Attacks on privacy, where they are asked for."""
    from hardy.cli.tables import audit_table
    from hardy.runs.audits import audit_run

    if options.audit:
        print("\n" + audit_table(audit_run(run, options.audit, references=options.references)))
        assert run.folder is not None
        print(f"\nwritten: {run.folder / 'audit.json'}")
    elif options.references:
        raise HardyError("--references has no effect without --audit membership. Leave it out.")


def _evaluate_seeds(folders: list[Path], options: Any) -> None:
    """Every seed, and their mean ± sample standard deviation."""
    from hardy.cli.tables import seed_line, seeds_table
    from hardy.runs.seeds import write_seeds_evaluation

    if options.settings:
        raise HardyError(f"--settings is for one run, and {options.folder} holds seeds. Give {folders[0]}.")
    if options.audit or options.references:
        raise HardyError(f"--audit is for one run, and {options.folder} holds seeds. Give {folders[0]}.")
    every = []
    for folder in folders:
        run, found = _measure(folder, options)
        print(seed_line(run, found))
        _print_flags(found)
        every.append(found)
    path, over = write_seeds_evaluation(options.folder, every, best=options.best)
    print("\n" + seeds_table(over))
    _print_written(path, options)


COMMAND = Command(
    name="evaluate", words="measure a finished run; writes evaluation.json", declare=_declare, call=_evaluate
)
