"""What a site was asked and what it sent, a line of JSON each, in a file that is only ever added to."""

import datetime
import json
import os
from pathlib import Path
from typing import Any

from hardy.core.files import disk

AUDIT = "audit.jsonl"
"""in the folder of a node's state"""


class Audit:
    """Adds lines to a file. Without a path nothing is written."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = Path(path) if path else None

    def write(self, event: str, **facts: Any) -> None:
        """One line, on the disk when this returns; several processes may write."""
        if self.path is None:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": event, **facts}) + "\n"
        with disk(str(self.path)):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(file, line.encode())
                os.fsync(file)
            finally:
                os.close(file)
