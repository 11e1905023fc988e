"""Pictures, and the settings of the run."""

import re
from base64 import b64encode
from html import escape
from pathlib import Path

from hardy.report.page import figure, section
from hardy.report.pictures import picture_rows, row_labels, whole_png
from hardy.report.stored_run import StoredRun

_CLIENT = re.compile(r"(attack .*), client (\d+)")
"""the name of a picture of one client"""


def pictures_section(run: StoredRun) -> str:
    figures: list[str] = []
    clients: list[str] = []
    for path in sorted((run.folder / "pictures").glob("*.png"), key=_order):
        found = _CLIENT.fullmatch(path.stem)
        drawn = figure(path.stem, _sheet(path.read_bytes(), path.stem), client=found[2] if found else "")
        (clients if found else figures).append(drawn)
    more = f'<div class="figures">{"".join(clients)}</div>'
    folded = f"<details><summary>Attacked images of every client</summary>{more}</details>" if clients else ""
    return section("Pictures", figures, folded)


def _order(path: Path) -> tuple[str, int]:
    found = _CLIENT.fullmatch(path.stem)
    return (found[1], int(found[2])) if found else (path.stem, -1)


def _sheet(png: bytes, name: str) -> str:
    """A contact sheet, row by row, with what is said of each image under it; any other picture as it is."""
    if not whole_png(png):
        return "<p>This picture is damaged, or no PNG.</p>"
    rows = picture_rows(png)
    if not rows:
        return _image(png, name)
    parts, most = [], 1
    for label, (row, column) in zip(row_labels(png), rows, strict=True):
        title, colon, listed = label.partition(": ")
        if not colon:  # "attacked, seen as 3, 4"
            title, colon, listed = label.partition(" seen as ")
            title += " seen as" if colon else ""
        words = listed.split(", ") if colon else []
        most = max(most, len(words))
        cells = "".join(f'<span title="{escape(word)}">{escape(word)}</span>' for word in words)
        under = f'<div class="under" style="max-width:{column * len(words)}px">{cells}</div>' if cells else ""
        parts.append(f"<p>{escape(title)}</p>{_image(row, f'{name}: {label}')}{under}")
    return f'<div class="sheet" style="--columns:{most}">{"".join(parts)}</div>'


def _image(png: bytes, words: str) -> str:
    return f'<img alt="{escape(words)}" src="data:image/png;base64,{b64encode(png).decode()}">'


def settings_section(run: StoredRun) -> str:
    versions = " · ".join(f"{name} {version}" for name, version in (run.summary.get("versions") or {}).items())
    config = f"<details><summary>config.toml</summary><pre>{escape(run.config)}</pre></details>" if run.config else ""
    return section("Settings", [], config, f'<p class="note">{escape(versions)}</p>' if versions else "")
