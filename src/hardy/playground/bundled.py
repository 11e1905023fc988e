"""The page's own content, for whoever has no run: networks trained on the embedded digits (tools/playground)."""

import gzip
import json
from importlib import resources
from pathlib import Path
from typing import Any

from hardy.core.files import write_atomic

_TOLD, _BINARY = "bundled.json", "bundled.bin.gz"


def bundled_content() -> tuple[dict[str, Any], bytes]:
    """What `content_of` gave when it was stored."""
    folder = resources.files("hardy") / "playground" / "assets"
    return json.loads((folder / _TOLD).read_text("utf-8")), gzip.decompress((folder / _BINARY).read_bytes())


def store_content(content: dict[str, Any], binary: bytes, folder: Path) -> None:
    """Writes a content as the bundled one."""
    write_atomic(folder / _TOLD, (json.dumps(content, separators=(",", ":")) + "\n").encode())
    write_atomic(folder / _BINARY, gzip.compress(binary, 9, mtime=0))
