"""What every page is made of: the document, figures, sections and tables."""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from hardy.report.chart import Format

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{}'"
_HEADING = re.compile(r'<h2 id="([^"]*)">(.*?)</h2>')


def page(title: str, *body: str) -> str:
    """The whole document around these parts, with links to its sections after the first one. Its policy forbids every
    request, and every script but its own, without which it can be read too."""
    style, script = (Path(__file__).with_name(name).read_text("utf-8") for name in ("style.css", "page.js"))
    known = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    first, *rest = [part for part in body if part]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY.format(known)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n<body><main>\n"
        + "\n".join([first, _navigation(rest), *rest])
        + f"\n</main>\n<script>{script}</script></body></html>\n"
    )


def _navigation(parts: Iterable[str]) -> str:
    """A link to each section, where there are several."""
    found = [heading for part in parts for heading in _HEADING.findall(part)]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in found)
    return f'<nav class="sections" aria-label="sections">{links}</nav>' if len(found) > 1 else ""


def figure(title: str, drawing: str, note: str = "", *, client: str = "") -> str:
    """A titled drawing, or nothing without one; `client` is whose it is, if it is one's."""
    told = f"<p>{escape(note)}</p>" if note else ""
    caption = f"<figcaption><h3>{escape(title)}</h3>{told}</figcaption>"
    whose = f' data-client="{escape(client)}"' if client else ""
    return f"<figure{whose}>{caption}{drawing}</figure>" if drawing else ""


def section(title: str, figures: Iterable[str], *more: str) -> str:
    """A heading over figures and other parts, or nothing without any."""
    drawn = "\n".join(filter(None, figures))
    grid = f'<div class="figures">{drawn}</div>' if drawn else ""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return f'<h2 id="{name}">{escape(title)}</h2>{grid}{"".join(more)}' if grid or any(more) else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """Heads over cells that are HTML already, or nothing without rows; `words` columns hold no numbers."""

    def line(kind: str, cells: Iterable[str]) -> str:
        return "<tr>" + "".join(
            f"<{kind}{' class=left' if at < words else ''}>{cell}</{kind}>" for at, cell in enumerate(cells)
        )

    body = "".join(line("td", row) for row in rows)
    whole = f"<table><thead>{line('th', map(escape, head))}<tbody>{body}</table>"
    return f'<div class="scroll">{whole}</div>' if body else ""


def duration(seconds: float) -> str:
    """1 h 04 min"""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def shown(value: float | None, form: Format = "{:.1%}".format) -> str:
    return "–" if value is None else form(value)
