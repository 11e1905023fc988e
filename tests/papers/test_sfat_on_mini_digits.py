"""What slack, and what the published weights' shrinking, do on the embedded digits."""

from pathlib import Path

import pytest

import hardy

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "sfat" / "mini_digits.toml"
ARMS = {
    "fat": ["method.slack.alpha=0.0"],
    "sfat": ["method.slack.turns=1.0"],
    "published": ["method.slack.turns=1.0", "method.slack.as_published=true", "method.slack.start=2"],
}


@pytest.mark.slow
def test_the_gain_of_the_published_weights_is_not_the_slack():
    """Measured on two seeds: SFAT 1 point below FAT under PGD-20, as published 2 to 3 points above it."""
    found = {}
    for arm, options in ARMS.items():
        run = hardy.fit(hardy.read(str(EXPERIMENT), options), quiet=True)
        found[arm] = run.robust["pgd-20"]["mean"]
        assert found[arm] > 0.2, found  # chance is 0.1
    assert abs(found["sfat"] - found["fat"]) < 0.03, found
    assert found["published"] > found["sfat"] + 0.01, found
