"""What training against learnt shifts buys on cameras nobody trained on, on the embedded digits."""

from pathlib import Path

import pytest

import hardy

TOML = Path(__file__).parents[2] / "experiments" / "fedrobust" / "mini_digits.toml"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_unseen_cameras_far_from_those_of_training_gain():
    """Eight times as unlike as those of training: a gain. Half as far, and on plain images: at most a small loss."""
    far, near, clean = [], [], []
    for seed in (3, 4, 5):
        found = []
        for method in ([], ["method=fedavg", "method.norm=absent"]):
            usual = [*method, f"seed={seed}", "evaluation.every=40", "evaluation.diagnosis=[]"]
            run = hardy.fit(hardy.read(str(TOML), [*usual, "engine.name=sequential", "engine.device=cpu"]), quiet=True)
            found.append(
                (run.robust["camera-20@2"]["mean"], run.robust["camera-20"]["mean"], run.figures.latest["mean"])
            )
        for gains, robust, plain in zip((far, near, clean), *found, strict=True):
            gains.append(robust - plain)
    assert sum(far) / 3 > 0.02, (far, near, clean)
    assert sum(near) / 3 > -0.03 and sum(clean) / 3 > -0.03, (far, near, clean)
