"""What the clients of a network say of themselves, as a run folder keeps it (network.json)."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hardy.core.federation import Client, Federation, Rows
from hardy.core.json_files import read_sealed, write_sealed
from hardy.errors import HardyError, printable

KINDS = ("", "AT", "ST")
_LARGEST_INPUT = 2**27
"""numbers in one input; the server makes room for one"""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a node says of itself once: counts and words, no image, no label."""

    client: int
    domain: str
    kind: str
    capacity: float
    train: int
    validation: int
    test: int
    shape: tuple[int, ...]
    """(channel, height, width), or (features,)"""
    classes: tuple[str, ...]

    def words(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: Any, clients: int, most_rows: int = 10**9) -> "Profile":
        """A profile from outside; ValueError with the reason if it cannot be one."""
        try:
            given = json.loads(text)
            shape, classes = tuple(map(int, given["shape"])), tuple(printable(c) for c in given["classes"])
            counts: dict[str, Any] = {name: int(given[name]) for name in ("client", "train", "validation", "test")}
            domain, kind, capacity = printable(given["domain"], 100), given["kind"], float(given["capacity"])
        except Exception as error:  # whatever a hostile node puts there
            raise ValueError(f"no profile in it ({type(error).__name__}: {printable(error)})") from None
        if not 0 <= counts["client"] < clients:
            raise ValueError(f"client {counts['client']}, but they run from 0 to {clients - 1}")
        if counts["train"] < 1 or min(counts.values()) < 0:
            raise ValueError(f"counts {printable(counts, 200)}; a client holds 1 training example or more")
        if (rows := max(counts.values())) > most_rows:
            raise ValueError(f"it says it holds {printable(rows)} rows, limit {most_rows} (admission.most_rows)")
        if len(shape) not in (1, 3) or min(shape) < 1 or math.prod(shape) > _LARGEST_INPUT or not classes:
            raise ValueError(f"inputs {printable(shape)} of {len(classes)} classes")
        if kind not in KINDS or not 0 < capacity <= 1:
            raise ValueError(
                f"kind {printable(kind)!r}, must be AT, ST or empty; capacity {capacity}, must be in (0, 1]"
            )
        return Profile(**counts, domain=domain, kind=kind, capacity=capacity, shape=shape, classes=classes)


def placeholder_federation(profiles: Sequence[Profile]) -> Federation:
    """The federation as the server knows it: who holds how many rows, and no row. All of them are one blank image."""
    first = profiles[0]
    for profile in profiles:
        if (profile.shape, profile.classes) != (first.shape, first.classes):
            raise HardyError(
                f"client {profile.client} holds inputs {profile.shape} of {len(profile.classes)} classes, client 0 "
                f"{first.shape} of {len(first.classes)}. Bring all nodes' data to one shape and list of classes."
            )
    blank, label = np.zeros((1, *first.shape), np.uint8), np.zeros(1, np.int64)
    return Federation(
        name="network",
        classes=first.classes,
        x_train=blank,
        y_train=label,
        x_test=blank,
        y_test=label,
        clients=tuple(
            Client(
                domain=p.domain,
                kind=p.kind,
                capacity=p.capacity,
                train=_rows(p.train),
                validation=_rows(p.validation),
                test=_rows(p.test),
            )
            for p in profiles
        ),
    )


def _rows(count: int) -> Rows:
    """Row 0, so many times: one number in memory, whatever a node says of itself."""
    return np.broadcast_to(np.int64(0), (count,)) if count else np.zeros(0, np.int64)


def remembered(folder: Path) -> tuple[str, list[Profile]]:
    """The token of a run over a network, and its clients in order, as its folder has them."""
    try:
        known = read_sealed(folder / "network.json", "Restore it.")
        found = [Profile.read(json.dumps(profile), len(known["clients"])) for profile in known["clients"]]
        return str(known["token"]), found
    except (HardyError, ValueError, KeyError, TypeError) as error:
        raise HardyError(
            f"{folder} holds a run but no network.json that can be read ({error}): it was not made over a network, or "
            "its nodes would not find their private tensors again. Choose another folder."
        ) from None


def remember(folder: Path, token: str, profiles: Sequence[Profile]) -> None:
    """What `remembered` reads."""
    known = {"token": token, "clients": [asdict(profile) for profile in profiles]}
    write_sealed(folder / "network.json", known, indent=1)


def without_rows(folder: Path) -> Federation:
    """The federation of a run whose rows are its nodes' own: enough to build its networks, nothing to measure on."""
    return placeholder_federation([replace(profile, validation=0, test=0) for profile in remembered(folder)[1]])
