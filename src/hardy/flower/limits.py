"""How large a reply may be: its bytes are counted as the SuperLink hands them over, before they are read."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PIECE = 5 * 2**20
"""bytes of the pieces that Flower cuts arrays into"""
_EACH = 16 * 2**10
"""bytes that every response counts for at least, so that a reply in a million pieces does not take hours"""


class ReplyTooLarge(Exception):
    """More than was to be expected of a reply."""


class ReplyMeter:
    """Watches what Flower's grid fetches.

    A reply is fetched piece by piece, each in an HTTP response whose length is known before its body is read; and an
    array names its pieces, one of them a million times if it likes, before they are put together. Both are bounded. A
    grid without such a client, as in tests, is left alone.
    """

    def __init__(self, grid: Any) -> None:
        self._most, self._bytes, self._pieces = 0, float("inf"), float("inf")
        self._lock = threading.Lock()
        runtime: Any = getattr(grid, "_runtime_client", None)
        client: Any = getattr(runtime, "_client", None)
        if hasattr(client, "event_hooks") and hasattr(runtime, "PullObject"):
            hooks = client.event_hooks
            client.event_hooks = {**hooks, "response": [*hooks.get("response", ()), self._see_response]}
            runtime.PullObject = self._seeing_objects(runtime.PullObject)

    @contextmanager
    def limit(self, most: int, arrays: int = 1000) -> Iterator[None]:
        """What is fetched inside is one reply, of so many bytes and arrays at most."""
        self._most, self._bytes, self._pieces = most, most, most // PIECE + arrays
        try:
            yield
        finally:
            self._bytes = self._pieces = float("inf")

    def _see_response(self, response: Any) -> None:
        with self._lock:
            self._bytes -= max(_EACH, int(response.headers.get("content-length", 0)))
            if self._bytes < 0:
                raise ReplyTooLarge(f"more than {self._most} bytes")

    def _seeing_objects(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*given: Any) -> Any:
            found = fetch(*given)
            head, _, body = found.object_content.partition(b"\x00")
            if head.startswith(b"Array "):
                with self._lock:
                    self._pieces -= len(json.loads(body)["arraychunk_ids"])
                    if self._pieces < 0:
                        raise ReplyTooLarge(f"arrays of more than {self._most} bytes")
            return found

        return seen
