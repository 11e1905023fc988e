"""Threats by name: an attack and its budget as one short text, such as pgd-20@16/255.

NAME[-N][@OPTION,...]: N is the number of steps (of queries for `square`); an option is a radius, a ball, or key=value
with any argument of the attack (`eps` is short for `epsilon`). Radii are in pixels of [0, 1], 8/255 unless given; an L2
radius must be given. An attack with a step takes epsilon / 4 (2/255 at 8/255) unless told, whatever N is; with fewer
than four steps, epsilon / N, so that the edge of the ball stays in reach. NAME may be an attack of your own, such as
my_attacks.py:Noise.
"""

import re
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from typing import Any, get_args, get_type_hints

from hardy.attacks.affine import affine, affine_worst
from hardy.attacks.autoattack import apgd, auto_attack, fab
from hardy.attacks.balls import Ball
from hardy.attacks.base import Attack
from hardy.attacks.devices import unseen_camera, unseen_gaussian_affine
from hardy.attacks.gradient import cw, fgsm, mim, pgd
from hardy.attacks.square import local_search, square
from hardy.errors import HardyError, unknown
from hardy.registry import PARTS, find
from hardy.user_code import named_by_user, reference, short

PRESETS = {
    "fgsm": "one step of 8/255",
    "pgd-7": "what FedRBN and Split-Mix train and test with",
    "pgd-20": "what SFAT tests with",
    "pgd-20@4/255": "SFAT on SVHN",
    "pgd-20@16/255": "FedRBN, Table 3",
    "pgd-100": "FedRBN, Table 3",
    "pgd-10@l2,eps=0.5": "any radius: FedRobust tests with L2 balls",
    "mim-20": "with momentum; mim-20@16/255 and mim-100 are MIA in FedRBN, Table 3",
    "cw-30": "CW-infinity as SFAT tests with",
    "lsa": "local search, 7 rounds and no bound: FedRBN, Table 3",
    "square": "black box, 5000 queries",
    "apgd-ce": "APGD on cross-entropy, 100 steps",
    "apgd-t": "APGD on the targeted DLR loss, 9 targets",
    "fab-t": "FAB, 9 targets",
    "autoattack": "apgd-ce, apgd-t, fab-t and square: the figure to publish",
    "affine": "one affine shift for a client's images, or everybody's: affine@0.4,1.0,common=true, radii of Λ and δ",
    "affine-worst": "the worst of all three affine attacks, image by image: affine-worst@0.4,0.5,centre=0.5",
    "camera-10": "no attack: images as ten cameras unknown to training take them; camera-10@0.5 halves the shifts",
    "gaussian": "no attack: a Gaussian affine shift unknown to training; gaussian-10@0.05 is ten of strength 0.05",
}


@dataclass(frozen=True, kw_only=True)
class Threat:
    """An attack with the name its figures go by."""

    name: str
    attack: Attack


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What a name stands for: N sets `count`, bare numbers set `radii` in turn."""

    attack: type[Attack]
    count: str = "steps"
    radii: tuple[str, ...] = ("epsilon",)
    preset: tuple[tuple[str, object], ...] = ()


_FAMILIES = {
    "fgsm": _Family(attack=fgsm, count=""),
    "pgd": _Family(attack=pgd, preset=(("steps", 20),)),
    "mim": _Family(attack=mim),
    "cw": _Family(attack=cw),
    "lsa": _Family(attack=local_search),
    "square": _Family(attack=square, count="queries"),
    "apgd-ce": _Family(attack=apgd),
    "apgd-t": _Family(attack=apgd, preset=(("loss", "dlr"), ("targeted", 9))),
    "fab-t": _Family(attack=fab),
    "autoattack": _Family(attack=auto_attack),
    "affine": _Family(attack=affine, radii=("rotation_radius", "shift_radius")),
    "affine-worst": _Family(attack=affine_worst, radii=("rotation_radius", "shift_radius")),
    "camera": _Family(attack=unseen_camera, count="devices", radii=("strength",)),
    "gaussian": _Family(attack=unseen_gaussian_affine, count="devices", radii=("strength",)),
}


def parse_threat(text: str) -> Threat:
    """The threat a text names."""
    if own := reference(text):  # a path and a class keep their spaces and capitals
        name, _, written = (short(own) + text[len(own) :]).partition("@")
        text = f"{name}@{written}" if written else name
    else:
        text = re.sub(r"\s", "", text).lower()
        name, _, written = text.partition("@")
    matched = re.fullmatch(r"(.+?)(?:-([1-9][0-9]{0,5}))?", name)
    family = _family(own or matched[1]) if matched else None
    if matched is None or family is None or (matched[2] and not family.count):
        raise unknown("threat", name, {preset.partition("@")[0] for preset in PRESETS})
    attack = family.attack
    hints = get_type_hints(attack)
    given: dict[str, Any] = {family.count: int(matched[2])} if matched[2] else {}
    radii = iter(family.radii)
    for option in written.split(",") if written else ():
        key, equals, value = option.rpartition("=")
        key = "epsilon" if key == "eps" else key
        if not equals:
            key = "ball" if value in get_args(Ball) else next(radii, "")
        if key not in hints:
            raise unknown(f"option of {name} in threat {text!r}:", key or option, hints)
        if key in given:
            raise HardyError(f"{key} is given twice in threat {text!r}; give it once.")
        given[key] = _value(value, hints[key], f"{key} in threat {text!r}")
    given = dict(family.preset) | given
    if given.get("ball") == "l2" and "epsilon" not in given:
        raise HardyError(f"threat {text!r} needs a radius for its L2 ball; write for example {name}@l2,eps=0.5.")
    if "step" in hints and "epsilon" in hints and "step" not in given:
        usual = {field.name: field.default for field in fields(attack) if field.default is not MISSING}
        steps, epsilon = ((usual | given)[key] for key in ("steps", "epsilon"))
        given["step"] = epsilon / max(1, min(steps, 4)) or usual["step"]
    return Threat(name=text, attack=attack(**given))


def _family(name: str) -> _Family | None:
    """What a name stands for: a preset's, or an attack of the registry or from outside, whose N are steps."""
    if name in _FAMILIES:
        return _FAMILIES[name]
    if name not in PARTS["attack"] and not reference(name):
        return None
    attack = find("attack", name)
    if not (isinstance(attack, type) and issubclass(attack, Attack)):
        raise HardyError(f"threat {short(name)} is no attack; it must be a dataclass derived from {Attack.__module__}.")
    known = {field.name for field in fields(attack)}
    return _Family(
        attack=attack,
        count="steps" if "steps" in known else "",
        radii=("epsilon",) if "epsilon" in known else (),
    )


def parse_threats(text: str) -> tuple[Threat, ...]:
    """The threats of a list that a user wrote, such as pgd-20@l2,eps=0.5,autoattack: numbers, balls and key=value
    belong to the last."""
    option = rf"[-+.0-9]|({'|'.join(get_args(Ball))})(,|$)|[^,@]*="
    cuts = [comma.start() for comma in re.finditer(rf",(?!\s*(?:{option}))", text)]
    pieces = [text[first + 1 : last].strip() for first, last in pairwise([-1, *cuts, len(text)])]
    return tuple(map(parse_threat, named_by_user(pieces)))


def _value(text: str, hint: object, what: str) -> object:
    """A number, a fraction, true or false; words are left for the attack to check."""
    try:
        if hint is bool:
            return {"true": True, "false": False}[text]
        if hint is int:
            return int(text)
        if hint is float:
            above, _, below = text.partition("/")
            return float(above) / float(below or 1)
    except (ValueError, KeyError, ZeroDivisionError, OverflowError):
        kinds: dict[object, str] = {
            bool: "true or false",
            int: "a whole number",
            float: "a number or a fraction such as 8/255",
        }
        raise HardyError(f"{what} is {text!r}; it must be {kinds[hint]}.") from None
    return text


__all__ = ["PRESETS", "Threat", "parse_threat", "parse_threats"]
