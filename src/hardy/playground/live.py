"""The page served on this machine while a run trains, with the run's figures as they come.

It listens on 127.0.0.1 alone, on a port of the system's choice. Its address holds a random token, and a request that
names another host is refused, so neither other machines nor pages of other sites in the same browser can read it.
"""

import json
import secrets
import time
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hardy.errors import HardyError
from hardy.playground.bundled import bundled_content
from hardy.playground.playground_page import html
from hardy.report.stored_run import number

_PAUSE = 0.5
"""seconds between two looks at the run's folder"""
_ALIVE = 20
"""looks without news after which the browser is told that the server is there"""


class LiveServer:
    """Serves the page and its events until Ctrl-C."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.content, self.binary = _content(folder)
        self.token = secrets.token_urlsafe(24)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.host = f"127.0.0.1:{self._server.server_port}"
        self.address = f"http://{self.host}/{self.token}/"

    def serve(self) -> None:
        try:
            self._server.serve_forever(poll_interval=0.1)
        finally:
            self._server.server_close()

    def stop(self) -> None:
        self._server.shutdown()

    def page(self) -> bytes:
        return html(self.content, self.binary, connects=True).encode()

    def events(self) -> Iterator[bytes]:
        """A message for each line of metrics.jsonl, now and as they come; the last one when the run is finished."""
        path, read, rest, silent, finished = self.folder / "metrics.jsonl", 0, b"", 0, False
        while True:
            size = path.stat().st_size if path.exists() else 0
            if size < read:  # a run that was resumed takes back rounds
                read, rest = 0, b""
                yield _event({"restart": True})
            if size > read:
                with path.open("rb") as lines:
                    lines.seek(read)
                    new = lines.read(size - read)
                read += len(new)
                *whole, rest = (rest + new).split(b"\n")
                for line in whole:
                    if (told := _told(line)) is not None:
                        yield _event(told)
            done = (self.folder / "summary.json").exists()
            if done != finished:
                finished = done
                yield _event({"finished": done})
            silent = 0 if size > read else silent + 1
            if silent % _ALIVE == 0:
                yield b": alive\n\n"
            time.sleep(_PAUSE)


def _event(told: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def _told(line: bytes) -> dict[str, Any] | None:
    """What the page shows of a round; None for a line that is none."""
    try:
        row = json.loads(line)
        accuracy = row.get("standard_accuracy") or {}
        return {
            "round": int(row["round"]),
            "loss": number(row, "loss"),
            "seconds": number(row, "seconds"),
            "mean": number(accuracy, "mean"),
            "worst": number(accuracy, "worst_client"),
            "validation": number(row, "validation_accuracy", "mean"),
            "domains": {str(name): number(value) for name, value in (accuracy.get("by_domain") or {}).items()},
            "lost": len(row.get("lost") or {}),
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


def _content(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The networks of the run's last checkpoint, or the bundled ones while there is none."""
    try:
        experiment = tomllib.loads((folder / "config.toml").read_text("utf-8"))
    except (OSError, ValueError) as error:
        why = "its config.toml is damaged" if isinstance(error, ValueError) else "it has no config.toml"
        raise HardyError(
            f"{folder} holds no run to follow: {why}. Start one with `hardy run EXPERIMENT --out {folder}`."
        ) from error
    content, binary = bundled_content()
    if (folder / "checkpoint").is_dir():
        from hardy.playground.content import content_of

        content, binary = content_of([folder])
    name = str(experiment.get("name", folder.name))
    live = {"name": name, "rounds": experiment.get("rounds"), "own": (folder / "checkpoint").is_dir()}
    about = "A run at its training, followed on this machine alone."
    return {**content, "title": name, "about": about, "live": live}, binary


def _handler(live: LiveServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "hardy", ""

        def do_GET(self) -> None:
            if self.headers.get("Host") != live.host:
                self._refuse(403, "This server answers only under its own address.")
                return
            _, _, token = self.path.partition("/")
            token, _, rest = token.partition("/")
            if not secrets.compare_digest(token.encode(), live.token.encode()) or rest not in ("", "events"):
                self._refuse(404, "There is nothing here.")
            elif rest == "events":
                self._stream()
            else:
                self._begin(200, "text/html; charset=utf-8", body := live.page())
                self.wfile.write(body)

        def _begin(self, status: int, kind: str, body: bytes | None) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("X-Frame-Options", "DENY")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            if body is not None:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()

        def _refuse(self, status: int, words: str) -> None:
            self._begin(status, "text/plain; charset=utf-8", body := words.encode())
            self.wfile.write(body)

        def _stream(self) -> None:
            self._begin(200, "text/event-stream", None)
            try:
                for event in live.events():
                    self.wfile.write(event)
                    self.wfile.flush()
            except (BrokenPipeError, ConnectionResetError):
                return  # the page was closed

        def log_message(self, *_: Any) -> None:
            """Says nothing: the token is in every line."""

    return Handler
