"""An experiment of several arms: itself, and others that differ from it in a few keys.

    look = "pgd-7: FedBN falls, FATBN stands."
    measure = ["evaluation.threats=['pgd-7']"]

    [arms]
    FATBN = ["method=fatbn"]

`hardy run` runs them all, with the overrides of `measure`, and compares them. Everything else reads the experiment
alone.
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from hardy.config.reading import experiment_text
from hardy.errors import HardyError

MOST_ARMS = 100


@dataclass(frozen=True, kw_only=True)
class Arms:
    """The other arms of an experiment."""

    look: str = ""
    """what to look at in the figures, one line"""
    measure: tuple[str, ...] = ()
    """key=value overrides of the experiment and all arms, where they run side by side"""
    overrides: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """arm -> its key=value overrides; it names a folder"""


def read_arms(source: str | Path) -> Arms:
    """The arms of a TOML file or a bundled experiment; most have none."""
    text, _ = experiment_text(source)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise HardyError(f"{source} is not valid TOML: {error}.") from error
    look, arms = table.get("look", ""), table.get("arms", {})
    if not isinstance(look, str) or not look.isprintable():
        raise HardyError(f"look of {source} is {look!r}; it must be one line of text.")
    if not isinstance(arms, dict) or len(arms) > MOST_ARMS:
        raise HardyError(f'[arms] of {source} must be a table of at most {MOST_ARMS} lines: NAME = ["key=value", ...].')
    if not _are_words(measure := table.get("measure", [])):
        raise HardyError(f'measure of {source} is {measure!r}; it must be a list such as ["rounds=5"].')
    for name, overrides in arms.items():
        if not is_arm_name(name):
            raise HardyError(
                f"arm {name!r} of {source} names a folder: at most 50 letters, digits, spaces and . , + - ( ), and a "
                "letter or digit first."
            )
        if not _are_words(overrides) or not overrides:
            raise HardyError(f'arm {name} of {source} is {overrides!r}; it must be a list such as ["method=fedavg"].')
    if (look or measure) and not arms:
        raise HardyError(f"look and measure of {source} are for its [arms], and there are none. Leave them out.")
    return Arms(
        look=look, measure=tuple(measure), overrides={name: tuple(overrides) for name, overrides in arms.items()}
    )


def _are_words(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(one, str) for one in found)


def is_arm_name(name: object) -> bool:
    """Whether it may name an arm, and its folder."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 50
        and name[0].isalnum()
        and name == name.strip()
        and all(letter.isalnum() or letter in " .,+-()" for letter in name)
    )
