"""Ctrl-C and SIGTERM in the middle of a run."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_STOPPING = b"\nhardy: stopping after this round; Ctrl-C again stops at once.\n"


class Stopped(KeyboardInterrupt):
    """A run was asked to stop; the text says from where it goes on."""

    def __init__(self, words: str, number: int) -> None:
        super().__init__(words)
        self.signal = number


class StopRequest:
    """What the user has asked for so far."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """the first signal; the run stops at the end of the round"""
        self._busy = False

    def note(self, number: int, frame: object) -> None:
        if self.signal is None:
            self.signal = number
            os.write(2, _STOPPING)
        elif not self._busy:
            raise Stopped("", self.signal)

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """What no signal breaks off: writing a checkpoint."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False


@contextmanager
def deferred_interrupt() -> Iterator[StopRequest]:
    """Ctrl-C and SIGTERM wait for the end of the round: in the middle of one some clients have trained and some have
    not. A second one raises Stopped at once."""
    request, ours = StopRequest(), {}
    if threading.current_thread() is threading.main_thread():
        usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        ours = {number: kept for number, kept in usual.items() if signal.getsignal(number) == kept}
    for number in ours:
        signal.signal(number, request.note)
    try:
        yield request
    finally:
        for number, kept in ours.items():
            signal.signal(number, kept)
