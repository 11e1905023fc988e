"""What the authors' clipping does to the figures: python experiments/fedrbn/clipping.py OUT.json [--smoke]

The release maps pixels to [-1, 1] outside the network and then clips attacked images to [0, 1] of that scale, in
training and in test: their ε is half as large in pixels, and every attacked pixel is at least mid-grey. Here networks
are trained with that attack and with the true one, and each is tested with both, and with the true one at half the ε.
`--smoke`: a round on the embedded digits.
"""

import argparse
import json
import multiprocessing
from functools import partial
from pathlib import Path

import hardy
from hardy.attacks.gradient import PGD, pgd
from hardy.attacks.threats import Threat
from hardy.attacks.threats import parse_threat as parse
from hardy.papers import fatbn, fedrbn


class MidGrey(PGD):
    """PGD on a network that sees no pixel darker than mid-grey, since attacked images are clipped there."""

    def perturb(self, forward, x, y, key):
        return super().perturb(lambda z: forward(z.clamp(min=0.5)), x, y, key).clamp(min=0.5)


AUTHORS = MidGrey(epsilon=4 / 255, step=5 / 7 / 255, steps=7)
THREATS = parse("pgd-7"), parse("pgd-7@4/255"), Threat(name="authors", attack=AUTHORS)
ROWS = {
    "20%: FATBN": (fatbn(), 0.2),
    "20%: FedRBN 0.5": (fedrbn(), 0.2),
    "20%: FATBN, authors' attack": (fatbn(attack=AUTHORS), 0.2),
    "20%: FedRBN 0.5, authors' attack": (fedrbn(attack=AUTHORS), 0.2),
    "All: FATBN, authors' attack": (fatbn(attack=AUTHORS), 1.0),
    "All: FATBN": (fatbn(attack=pgd()), 1.0),
}


TINY = ["rounds=1", "data.limit=8", "model.width=0.25", "training.batch=4", "engine.device=cpu"]


def measure(file: str, overrides: list[str], name: str) -> tuple[str, dict]:
    method, share = ROWS[name]
    branch = "adversarial" if method.name == "fedrbn" else "clean"
    experiment = hardy.read(
        str(Path(__file__).with_name(file)),
        [
            f"data.adversarial={share}",
            f"evaluation={{every=300, attack_branch='{branch}', predict_branch='{branch}'}}",
            *overrides,
        ],
    )
    run = hardy.fit(experiment, method=method, quiet=True)
    return name, run.summary() | hardy.evaluate(run, THREATS, checks=False, quiet=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only shows that it runs")
    parser.add_argument("overrides", nargs="*", help="for all rows, such as rounds=10")
    options = parser.parse_intermixed_args()
    done = json.loads(options.out.read_text()) if options.out.exists() else {}
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        waiting = [name for name in ROWS if name not in done]
        file, tiny = ("mini.toml", TINY) if options.smoke else ("digits.toml", [])
        for name, figures in pool.imap_unordered(partial(measure, file, [*tiny, *options.overrides]), waiting):
            done[name] = figures
            options.out.write_text(json.dumps(done, indent=1))
            print(name, figures["standard_accuracy"]["mean"], flush=True)


if __name__ == "__main__":
    main()
