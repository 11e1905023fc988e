"""Words can be read in both colour schemes: contrast of WCAG 2.1 AA."""

import re
from importlib import resources

import pytest

CSS = (resources.files("hardy") / "report" / "style.css").read_text("utf-8")


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_formula() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_words_stand_out_from_the_page(scheme: int) -> None:
    colours = dict(re.findall(r"--(\w+): (#\w{6})", re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)[scheme]))
    for name in ("ink", "muted", *(f"c{at}" for at in range(8))):
        assert contrast(colours[name], colours["page"]) >= 4.5, name
    assert contrast(colours["ink"], colours["track"]) >= 4.5
