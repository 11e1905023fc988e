"""What a node keeps between rounds: its client's private tensors, in files of its own that cannot lie."""

import logging
from pathlib import Path
from typing import Any

from hardy.core.files import disk
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.runs.checkpoint import load_tensors, rounds_in, save_tensors

_LOG = logging.getLogger("flwr")
_KEPT = 3
"""rounds whose private tensors are kept: the server has two checkpoints to go back to, and a round it is in"""


class Memory:
    """A client's private tensors after each of its last rounds, a folder each in the node's state folder, written and
    checked like a run's checkpoints.

    What a round starts from is the newest of an earlier round, so a server that goes back repeats the round as it was.
    A damaged one is named in the node's log and the one before it taken; where all are damaged it does not answer.
    """

    def __init__(self, folder: str | None, token: str, client: int) -> None:
        if not (token.isascii() and token.isalnum()):
            raise HardyError(f"run token {token!r} must be letters and digits.")
        self.folder = Path(folder) / token / f"client-{client}" if folder else None
        self.owner = {"token": token, "client": client}
        self.scratch: Any = None
        """Flower's own store of the run, gone with it: keys of a round in progress"""

    def before(self, round_number: int) -> Tensors:
        """As they were before a round; {} if it is the client's first."""
        if self.folder is None:
            return {}
        found, remarks = load_tensors(self.folder, fits=lambda at: at < round_number)
        for line in remarks:
            _LOG.warning("client %s, private tensors: %s", self.owner["client"], line)
        if found is not None:
            record, values = found
            if (whose := {key: record.get(key) for key in self.owner}) != self.owner:
                raise HardyError(
                    f"{self.folder} holds the private tensors of {whose}, not of {self.owner}. Restore it."
                )
            return values
        if remarks:
            raise HardyError(
                f"all private tensors of client {self.owner['client']} in {self.folder} are damaged; it does not start "
                "anew on its own. Restore the folder, or remove it if it is to start anew."
            )
        held = rounds_in(self.folder)
        if len(held) == _KEPT:
            raise HardyError(
                f"the server is back at round {round_number + 1}; this client remembers its private tensors from round "
                f"{min(held) + 2} on. Restore the server's run folder, or start a new run."
            )
        _LOG.info(
            "client %s has no private tensors of run %s: it starts with those of the experiment.",
            self.owner["client"],
            self.owner["token"],
        )
        return {}

    def keep(self, round_number: int, values: Tensors) -> None:
        if not values or self.folder is None:
            return
        with disk(str(self.folder)):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        save_tensors(self.folder, round_number, values, dict(self.owner), keep=_KEPT)
