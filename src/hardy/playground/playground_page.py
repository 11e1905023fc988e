"""The playground's page: assets and content in one HTML file, which asks for nothing from the network."""

import base64
import gzip
import hashlib
import json
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from hardy.core.files import disk, write_atomic
from hardy.errors import HardyError
from hardy.report.chart import si
from hardy.report.page import table
from hardy.report.stored_run import number

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'wasm-unsafe-eval' blob:; style-src 'unsafe-inline'; img-src data:"
)
_SCRIPTS = (
    "network.js",
    "attacks.js",
    "rules.js",
    "controls.js",
    "room_attack.js",
    "room_width.js",
    "room_clients.js",
    "room_liars.js",
    "room_masked.js",
    "room_live.js",
    "app.js",
)
_RUNTIME = {
    "ort.mjs": "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    "ort.wasm.gz": "bf933930bc90cf4f613f36cdc41616b54cfd2e9930478b574aed6ed4ef9ff8ca",
}
"""ONNX Runtime Web 1.30.0 (MIT) -> SHA-256"""


def write_page(content: dict[str, Any], binary: bytes, out: Path) -> Path:
    """Writes the page of a content (`hardy.playground.content`)."""
    with disk(str(out)):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, html(content, binary).encode())
    return out


def html(content: dict[str, Any], binary: bytes, *, connects: bool = False) -> str:
    """The page. `connects` lets it ask the server that it comes from, for --live; else it can ask nobody."""
    style = (resources.files("hardy") / "report" / "style.css").read_text("utf-8") + _asset("style.css").decode()
    script = "\n".join(_asset(name).decode() for name in _SCRIPTS)
    title = f"Playground: {content['title']}"
    blobs = {
        "content": _packed(json.dumps(content, separators=(",", ":")).encode()),
        "binary": _packed(binary),
        "runtime": _packed(_runtime("ort.mjs")),
        "wasm": base64.b64encode(_runtime("ort.wasm.gz")).decode(),
    }
    carried = "\n".join(f'<script type="text/plain" id="{name}">{text}</script>' for name, text in blobs.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}{"; connect-src 'self'" if connects else ""}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<script>document.documentElement.className = "scripted"</script>
<style>
{style}</style></head>
<body><main>
<h1>{escape(title)}</h1>
<p class="about">{escape(content["about"])}</p>
<nav id="tabs" role="tablist" aria-label="rooms"></nav>
<div id="room"><p class="note">Loading the networks …</p>
</div>
<noscript><p class="note">This page runs networks in the browser and needs JavaScript.</p></noscript>
<div id="measured">{_measured(content)}</div>
</main>
{carried}
<script type="module">
{script}</script>
</body></html>
"""


def _measured(content: dict[str, Any]) -> str:
    """The figures of every network and setting as a table, for readers without script and for print."""

    def shown(figure: dict[str, Any]) -> str:
        mean, error = number(figure, "mean"), number(figure, "standard_error")
        return "–" if mean is None else f"{100 * mean:.1f}" + (f" ± {100 * error:.1f}" if error else "")

    rows = [(network["name"], row) for network in content["networks"] for row in network["settings"]]
    threats = dict.fromkeys(threat for _, row in rows for threat in row["robust"])
    head = ["network", "width", "robustness λ", "MACs", "accuracy, %", *(f"under {threat}, %" for threat in threats)]
    cells = [
        [
            escape(name),
            f"×{row['width']:g}",
            "–" if row["robustness"] is None else f"{row['robustness']:g}",
            si(row["macs"]),
            shown(row["standard"]),
            *(shown(row["robust"].get(threat, {})) for threat in threats),
        ]
        for name, row in rows
    ]
    return f"<h2>Measured</h2>{table(head, cells)}<p class=note>± standard error over test images.</p>"


def _asset(name: str) -> bytes:
    return (resources.files("hardy") / "playground" / "assets" / name).read_bytes()


def _runtime(name: str) -> bytes:
    found = _asset(name)
    if hashlib.sha256(found).hexdigest() != _RUNTIME[name]:
        raise HardyError(f"the playground's {name} is not the one it was made for (checksum differs). Install again.")
    return found


def _packed(plain: bytes) -> str:
    return base64.b64encode(gzip.compress(plain, 9, mtime=0)).decode()
