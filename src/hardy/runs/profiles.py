"""What the clients of a network say of themselves, as a run folder keeps it (network.json)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hardy.core.federation import Client, Federation
from hardy.core.files import write_atomic
from hardy.errors import HardyError

KINDS = ("", "AT", "ST")


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
    shape: tuple[int, int, int]
    classes: tuple[str, ...]

    def words(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: Any, clients: int) -> "Profile":
        """A profile from outside; ValueError with the reason if it cannot be one."""
        try:
            given = json.loads(text)
            shape, classes = tuple(map(int, given["shape"])), tuple(map(str, given["classes"]))
            counts: dict[str, Any] = {name: int(given[name]) for name in ("client", "train", "validation", "test")}
            domain, kind, capacity = printable(given["domain"], 100), given["kind"], float(given["capacity"])
        except Exception as error:  # whatever a hostile node puts there
            raise ValueError(f"no profile in it ({type(error).__name__}: {printable(error)})") from None
        if not 0 <= counts["client"] < clients:
            raise ValueError(f"client {counts['client']}, but they run from 0 to {clients - 1}")
        if counts["train"] < 1 or min(counts.values()) < 0 or max(counts.values()) > 10**9:
            raise ValueError(f"counts {counts}; a client holds 1 training example or more")
        if len(shape) != 3 or not 1 <= min(shape) <= max(shape) <= 10**6 or not classes:
            raise ValueError(f"images {printable(shape)} of {len(classes)} classes")
        if kind not in KINDS or not 0 < capacity <= 1:
            raise ValueError(
                f"kind {printable(kind)!r}, must be AT, ST or empty; capacity {capacity}, must be in (0, 1]"
            )
        return Profile(
            **counts, domain=domain, kind=kind, capacity=capacity, shape=(shape[0], shape[1], shape[2]), classes=classes
        )


def placeholder_federation(profiles: Sequence[Profile]) -> Federation:
    """The federation as the server knows it: who holds how many rows, and no row. All of them are one blank image."""
    first = profiles[0]
    for profile in profiles:
        if (profile.shape, profile.classes) != (first.shape, first.classes):
            raise HardyError(
                f"client {profile.client} holds images {profile.shape} of {len(profile.classes)} classes, client 0 "
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
                train=np.zeros(p.train, np.int64),
                validation=np.zeros(p.validation, np.int64),
                test=np.zeros(p.test, np.int64),
            )
            for p in profiles
        ),
    )


def remembered(folder: Path) -> tuple[str, list[Profile]]:
    """The token of a run over a network, and its clients in order, as its folder has them."""
    try:
        known = json.loads((folder / "network.json").read_text("utf-8"))
        found = [Profile.read(json.dumps(profile), len(known["clients"])) for profile in known["clients"]]
        return str(known["token"]), found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HardyError(
            f"{folder} holds a run but no network.json that can be read ({error}): it was not made over a network, or "
            "its nodes would not find their private tensors again. Choose another folder."
        ) from None


def remember(folder: Path, token: str, profiles: Sequence[Profile]) -> None:
    """What `remembered` reads."""
    known = {"token": token, "clients": [asdict(profile) for profile in profiles]}
    write_atomic(folder / "network.json", json.dumps(known, indent=1).encode())


def without_rows(folder: Path) -> Federation:
    """The federation of a run whose rows are its nodes' own: enough to build its networks, nothing to measure on."""
    return placeholder_federation([replace(profile, validation=0, test=0) for profile in remembered(folder)[1]])


def printable(text: object, most: int = 100) -> str:
    """Words from outside as a piece of one line of a log."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:most])
