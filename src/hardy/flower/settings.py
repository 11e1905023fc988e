"""A node's own settings: its data, its profile, what it may say. They never leave the site as such."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardy.errors import HardyError, unknown
from hardy.user_code import located

NODE_SETTINGS = {
    "data",
    "source",
    "domain",
    "kind",
    "capacity",
    "device",
    "threads",
    "classes",
    "allow_import",
    "figures",
}
"""what a site may set; client and state are added by `hardy deploy node`"""


def read_settings(words: Sequence[str]) -> dict[str, Any]:
    """key=value as settings; a bare word is a string."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise HardyError(f"{word!r} is no setting; write key=value, such as data=/data/ward.npz.")
        if key not in NODE_SETTINGS:
            raise unknown("setting of a node", key, NODE_SETTINGS)
        try:
            found[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = text
        if not isinstance(found[key], str | int | float | bool):
            raise HardyError(f"{key} is {text!r}; it must be one word or one number.")
    if "allow_import" in found:
        found["allow_import"] = ",".join(map(_code, str(found["allow_import"]).split(",")))
    return found


def _code(word: str) -> str:
    """A module, or the whole path of a file: the node's process works in a folder of its own."""
    place = located(word.strip(), [Path.cwd()])
    if place.endswith(".py") and not Path(place).is_file():
        raise HardyError(f"allow_import names {place}, which is not there. Give the path of this site's copy.")
    return place
