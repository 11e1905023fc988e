"""The page Which method should I take: comparisons out of records, with their noise."""

import re
from pathlib import Path

import pytest

from hardy.errors import HardyError
from hardy.reproduce.advice import advice_markdown, draw_advice, read_choices
from hardy.reproduce.published_pages import chosen_records, score
from hardy.reproduce.records import read_records

FOLDER = Path(__file__).parents[2] / "experiments"
CHOICES = read_choices(FOLDER)


def test_every_comparison_is_measured_and_says_where():
    assert len(CHOICES) > 10
    for one in CHOICES:
        assert one.found is not None and one.found.noise is not None, one.choice
        records = read_records(one.table, quick=one.choice.quick)
        means = [score(chosen_records(one.table, records, r), one.choice.column).mean for r in _rows(one)]
        assert one.found.value == pytest.approx(means[0] - means[1])
    text = advice_markdown(CHOICES)
    assert len(text.splitlines()) == len(CHOICES) + 2
    assert all(f"[{one.choice.table}]" in text for one in CHOICES)
    assert ("embedded digits" in text) and ("real data" in text)


def _rows(one):
    return one.choice.row, one.choice.against


def test_the_picture_has_a_mark_for_each_comparison_with_its_error():
    drawn = draw_advice(CHOICES)
    assert drawn.count("<circle") == len(CHOICES) and drawn.startswith("<svg")
    at = [float(x) for x in re.findall(r'<circle cx="([0-9.]+)"', drawn)]
    zero = float(re.search(r'M([0-9.]+) 48V[0-9]+" stroke="#888"', drawn)[1])
    shown = [
        one for when in dict.fromkeys(c.choice.when for c in CHOICES) for one in CHOICES if one.choice.when == when
    ]
    for x, one in zip(at, shown, strict=True):
        assert (x > zero) == (one.found.value > 0), one.choice


def test_mistakes_are_named(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "e.toml").write_text("rounds = 2\n")
    (tmp_path / "demo" / "t.toml").write_text('title = "T"\nexperiment = "e.toml"\n[rows]\na = {}\n')
    choice = '[[choices]]\nwhen = "w"\ntake = "t"\nrather_than = "r"\ntable = "demo/t"\nrow = "{}"\nagainst = "a"\n'
    (tmp_path / "which_method.toml").write_text(choice.format("b"))
    with pytest.raises(HardyError, match="unknown row of demo/t"):
        read_choices(tmp_path)
    (tmp_path / "which_method.toml").write_text(choice.format("a"))
    assert "not run yet" in advice_markdown(read_choices(tmp_path))
