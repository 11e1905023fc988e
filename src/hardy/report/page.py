"""What every page is made of: the document, figures, sections and tables."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from hardy.report.plots import Format

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, *body: str) -> str:
    """The whole document around these parts; its policy forbids every request."""
    style = Path(__file__).with_name("style.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def figure(title: str, drawing: str, note: str = "") -> str:
    """A titled drawing, or nothing without one."""
    told = f"<p>{escape(note)}</p>" if note else ""
    caption = f"<figcaption><h3>{escape(title)}</h3>{told}</figcaption>"
    return f"<figure>{caption}{drawing}</figure>" if drawing else ""


def section(title: str, figures: Iterable[str], *more: str) -> str:
    """A heading over figures and other parts, or nothing without any."""
    drawn = "\n".join(filter(None, figures))
    grid = f'<div class="figures">{drawn}</div>' if drawn else ""
    return f"<h2>{escape(title)}</h2>{grid}{''.join(more)}" if grid or any(more) else ""


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
