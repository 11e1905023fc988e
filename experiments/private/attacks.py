"""Membership and inversion attacks on runs with and without noise: python experiments/private/attacks.py OUT.json

Five sites with 54 embedded digits each and a dense network, trained until they are learnt by heart. Membership is
measured by the loss against the test rows of the sites; four images are inverted, each from the update of one step.
"""

import argparse
import json
from pathlib import Path

import hardy
from hardy.runs.audits import audit_run

BASE = [
    "rounds=10",
    "data.limit=60",
    "data.clients=1",
    "model={name='mlp',hidden=[32]}",
    "training.rate=0.1",
    "training.batch=9",
    "training.epochs=5",
    "engine.device=cpu",
    "evaluation.every=10",
]
DP = "admission.largest_ratio=inf"


def stage(noise: float) -> str:
    return (
        "method={name='fedavg',norm='layer',aggregator={name='pipeline',rule='mean',"
        f"pre=[{{name='client_level_dp',clip=1.0,noise={noise},delta=0.01}}]}}}}"
    )


def gradients(noise: float) -> str:
    return f"method={{name='fedavg',norm='layer',objective={{name='dp_sgd',clip=1.0,noise={noise},delta=1e-3}}}}"


ROWS = {
    "nothing": ["method={name='fedavg',norm='layer'}"],
    "dp_sgd, clip alone": [gradients(0.0)],
    "dp_sgd, noise 0.3": [gradients(0.3)],
    "dp_sgd, noise 2": [gradients(2.0)],
    "client_level_dp, noise 0.01": [stage(0.01), DP],
    "client_level_dp, noise 0.3": [stage(0.3), DP],
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    for seed in range(1 if options.smoke else 3):
        for name, own in list(ROWS.items())[: 1 if options.smoke else None]:
            if f"{name}, seed {seed}" in found:
                continue
            less = ["rounds=1", "training.epochs=1"] if options.smoke else []
            run = hardy.fit(hardy.read("demo", [*BASE, *own, f"seed={seed}", *less]), quiet=True)
            audited = audit_run(run, "membership,inversion", images=4, iterations=5 if options.smoke else 100)
            summary = run.summary()
            found[f"{name}, seed {seed}"] = {
                "accuracy": summary["standard_accuracy"]["mean"],
                "privacy": summary["privacy"],
                **audited,
            }
            options.out.write_text(json.dumps(found, indent=1))
            print(name, seed, found[f"{name}, seed {seed}"]["accuracy"], audited, flush=True)
