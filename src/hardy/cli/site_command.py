"""`hardy site`: what a site does with the network it has after a deployment. Nothing here talks to the server."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from hardy.cli.command import Command
from hardy.errors import HardyError


def _declare(parser: ArgumentParser) -> None:
    parser.add_argument("--state", type=Path, required=True, metavar="DIR", help="as in `hardy deploy node`")
    parser.add_argument("--run", metavar="NAME", help="which run (default the newest; see `hardy site runs`)")


def _declare_runs(parser: ArgumentParser) -> None:
    parser.add_argument("--state", type=Path, required=True, metavar="DIR", help="as in `hardy deploy node`")


def _runs(options: Any) -> None:
    from hardy.flower.site_model import load_site, site_runs

    for name in site_runs(options.state):
        found = load_site(options.state, name)
        known = ", ".join(f"{question} {value:.3f}" for question, value in found.figures.items())
        print(f"{name}  {found.run.experiment.name}, client {found.client}, round {found.run.state.round}: {known}")


def _declare_export(parser: ArgumentParser) -> None:
    _declare(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="MODEL.onnx or MODEL.safetensors")
    parser.add_argument("--width", type=float, metavar="R", help="of ONNX: the widest the files can serve; default 1")
    parser.add_argument("--robustness", type=float, metavar="λ", help="of ONNX: where its run-time input stands")


def _export(options: Any) -> None:
    from hardy.flower.site_model import load_site

    kinds = (".onnx", ".safetensors")
    if options.out.suffix not in kinds:
        raise HardyError(f"--out is {str(options.out)!r}; it must end in {' or '.join(kinds)}.")
    if options.out.suffix == ".safetensors" and (options.width, options.robustness) != (None, None):
        raise HardyError("--width and --robustness are of ONNX files; a state_dict holds the whole network.")
    found = load_site(options.state, options.run)
    if options.out.suffix == ".safetensors":
        found.save(options.out)
        print(f"written: {options.out}")
        return
    manifest = found.export(options.out, width=options.width or 1.0, robustness=options.robustness)
    print(f"written: {manifest}\nrun it: hardy.deploy.OnnxPredictor({str(manifest)!r})(images)")


def _declare_evaluate(parser: ArgumentParser) -> None:
    _declare(parser)
    parser.add_argument("--threats", default="", metavar="A,B", help="such as pgd-20,autoattack (see hardy parts)")
    parser.add_argument("--metrics", default="", metavar="A,B", help="such as auroc,ece")
    parser.add_argument("--part", choices=("train", "validation", "test"), default="test", help="of its own rows")


def _evaluate(options: Any) -> None:
    from hardy.attacks.threats import parse_threats
    from hardy.flower.site_model import load_site

    found = load_site(options.state, options.run)
    threats = [threat.name for threat in parse_threats(options.threats)] if options.threats else []
    shares = {"/".join(filter(None, (options.part, threat))) for threat in ("", *threats)}
    for question, value in found.evaluate(threats, options.part, options.metrics).items():
        known, digits = found.figures.get(question), "1%" if question in shares else "3f"
        measured = f"   (the node measured {known:.{digits}})" if known is not None else ""
        print(f"{question:<24} {value:6.{digits}}{measured}")


COMMAND = Command(
    name="site",
    words="a site's own network after a deployment",
    commands=(
        Command(name="runs", words="the runs whose network this site has", declare=_declare_runs, call=_runs),
        Command(name="export", words="write it as ONNX or as a state_dict", declare=_declare_export, call=_export),
        Command(
            name="evaluate",
            words="measure it on the site's own rows; the figures stay here",
            declare=_declare_evaluate,
            call=_evaluate,
        ),
    ),
)
