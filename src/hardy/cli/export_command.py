"""`hardy export`: a finished run as ONNX."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from hardy.cli.command import Command, best_option, data_option, import_option


def _declare(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="MODEL.onnx")
    parser.add_argument(
        "--width", type=float, default=1.0, metavar="R", help="the widest the files can serve; default 1"
    )
    parser.add_argument("--robustness", type=float, metavar="λ", help="where the run-time input stands at first")
    parser.add_argument("--seed", type=int, metavar="N", help="which one, in a folder of seeds")
    parser.add_argument("--client", type=int, metavar="N", help="whose network, where clients have their own")
    parser.add_argument(
        "--gradient", action="store_true", help="also NAME.gradient.onnx: logits and the gradient to the images"
    )
    best_option(parser)
    data_option(parser)
    import_option(parser)


def _export(options: Any) -> None:
    import hardy
    from hardy.runs.seeds import one_seed

    run = hardy.load(one_seed(options.folder, options.seed), data_folder=options.data, best=options.best)
    manifest = run.export(
        options.out,
        width=options.width,
        robustness=options.robustness,
        client=options.client,
        gradient=options.gradient,
    )
    print(f"written: {manifest}\nrun it: hardy.deploy.OnnxPredictor({str(manifest)!r})(images)")


COMMAND = Command(
    name="export",
    words="write a finished run as ONNX, one file for each base, with a manifest",
    declare=_declare,
    call=_export,
)
