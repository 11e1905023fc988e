"""What propagation brings to clients that never saw an attacked image, on the embedded digits."""

from pathlib import Path

import numpy as np
import pytest

import hardy

MINI = str(Path(__file__).parents[2] / "experiments" / "fedrbn" / "mini.toml")
ONE = ["evaluation.attack_branch=clean", "evaluation.predict_branch=clean"]


@pytest.mark.slow
def test_robustness_reaches_clients_that_cannot_afford_it():
    found = {}
    for method, branches in (("fedrbn", []), ("fatbn", ONE)):
        chosen = hardy.read(MINI, [f"method={method}", *branches, "rounds=20", "evaluation.every=20"])
        run = hardy.fit(chosen, quiet=True)
        poor = [client.kind == "ST" for client in run.engine.data.clients]
        found[method] = np.array(run.robust["pgd-20"]["by_client"])[poor].mean()
    assert found["fedrbn"] > found["fatbn"] + 0.05, found
