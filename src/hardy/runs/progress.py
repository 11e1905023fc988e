"""A progress bar with the time left, on a terminal only."""

import shutil
import sys
import time
from typing import TextIO


class Progress:
    """`update(done, note)` redraws at most ten times a second; where the stream is no terminal nothing is shown."""

    def __init__(self, total: int, *, done: int = 0, stream: TextIO | None = None, quiet: bool = False) -> None:
        self.total, self.first, self.stream = total, done, stream or sys.stderr
        self.shown = self.stream.isatty() and not quiet
        self.began = self.drawn = time.monotonic()

    def update(self, done: int, note: str = "") -> None:
        now = time.monotonic()
        if not self.shown or (now - self.drawn < 0.1 and done < self.total):
            return
        self.drawn = now
        spent = now - self.began
        left = spent / max(1, done - self.first) * (self.total - done)
        columns = shutil.get_terminal_size().columns
        text = f" {done}/{self.total} {clock(spent)} spent, {clock(left)} left  {note}"
        width = max(4, min(30, columns - len(text) - 3))
        filled = width * done // self.total
        self.stream.write("\r\x1b[K" + ("█" * filled + "░" * (width - filled) + text)[: columns - 1])
        self.stream.flush()

    def close(self) -> None:
        if self.shown:
            self.stream.write("\n")
            self.stream.flush()


def clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
