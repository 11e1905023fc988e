"""What adversarial training buys and costs, on the embedded digits."""

import pytest

import hardy


@pytest.mark.slow
def test_adversarial_training_is_robust_at_a_price():
    found = {}
    for method in ("fedavg", "fatavg", "fatbn"):
        chosen = hardy.read(
            "demo", [f"method={method}", "rounds=20", "evaluation.every=20", "evaluation.threats=['pgd-20']"]
        )
        run = hardy.fit(chosen, quiet=True)
        found[method] = run.figures.latest["mean"], run.robust["pgd-20"]["mean"]
    clean, robust = found["fedavg"]
    for method in ("fatavg", "fatbn"):
        assert found[method][1] > robust + 0.05, found
        assert found[method][0] < clean, found
