"""Starts Flower's SuperLink or SuperNode so that its loopback port answers to this account alone.

    python -m hardy.flower.loopback superlink|supernode OPTION ...

Flower authenticates nobody who starts runs or fetches work on its port. On loopback that would be every account of the
machine, so each request is checked for the account it comes from (Linux; elsewhere all of the machine is let in).
Nothing here loads torch: these processes live as long as a deployment.
"""

import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_WAIT = 0.1
"""seconds between two looks of a SuperNode"""
_OPEN = "01"
"""the state ESTABLISHED in /proc/net/tcp"""


def same_account(client: tuple[str, int], server: tuple[str, int]) -> bool:
    """Whether the client of an IPv4 loopback connection is a process of this account; True where nothing tells.

    The connection must be open at both ends: one that its owner has closed has no owner any more.
    """
    try:
        lines = Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]
    except OSError:
        return True  # no Linux
    ends = [
        f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}" for host, port in (client, server)
    ]
    found = [words for words in map(str.split, lines) if words[1:3] == ends]
    return any(words[3] == _OPEN and int(words[7]) == os.getuid() for words in found)


class SameAccount:
    """Middleware: requests of other accounts are answered with 403."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not same_account(tuple(scope["client"]), tuple(scope["server"])):
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"another account of this machine started this server"})
            return
        await self.app(scope, receive, send)


def superlink() -> None:
    from flwr.superlink import extensions
    from flwr.superlink.cli import flower_superlink
    from starlette.middleware import Middleware

    before = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(SameAccount), *before())
    flower_superlink()


def supernode() -> None:
    from flwr.supernode import main, start_client_internal
    from flwr.supernode.cli import flower_supernode

    create = main.create_app

    def closed(*words: Any, **options: Any) -> Any:
        made = create(*words, **options)
        made.add_middleware(SameAccount)
        return made

    main.create_app = closed
    # its two waits have no setting: 3 s when there is no message (the server's end holds the question instead), and
    # 0.5 s until it looks again whether its app has answered
    start_client_internal.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, _WAIT)))
    flower_supernode()


if __name__ == "__main__":
    {"superlink": superlink, "supernode": supernode}[sys.argv.pop(1)]()
