"""The site builds without a warning, its links lead somewhere, and the generated pages leave nothing out."""

import importlib.util
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hardy.config import Experiment
from hardy.registry import PARTS

ROOT = Path(__file__).parents[2]


class Page(HTMLParser):
    """The links of a page, and the places in it that links can lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.places = set(), {""}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.places.add(found.get("id"))
        self.links |= {found[key] for key in ("href", "src") if found.get(key) and tag != "link"}


def build(out: Path) -> dict[Path, Page]:
    """Every page of the site, built as `make docs` builds it."""
    options = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet", "-c", "docs"]
    made = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, ".", out],
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    return {path: Page(path.read_text("utf-8")) for path in out.rglob("*.html")}


def test_the_site_builds_and_its_links_lead_somewhere(tmp_path):
    site, dead = build(tmp_path.resolve()), []
    for path, page in site.items():
        for link in page.links:
            to = urlsplit(link)
            if to.scheme or to.netloc or path.name in ("search.html", "genindex.html"):
                continue
            target = path if not to.path else (path.parent / unquote(to.path)).resolve()
            place = unquote(to.fragment)
            if not target.exists() or (target in site and place not in site[target].places):
                dead.append(f"{path.name}: {link}")
    assert not dead


def test_every_key_and_part_has_its_row():
    found = importlib.util.spec_from_file_location("reference", ROOT / "docs/reference.py")
    reference = importlib.util.module_from_spec(found)
    found.loader.exec_module(reference)
    keys, parts = reference.configuration(), reference.parts()
    for key in Experiment.__dataclass_fields__:
        assert f"| `{key}` |" in keys or f"### `[{key}]`" in keys, key
    for kind, named in PARTS.items():
        for name in named:
            assert f"### {kind} `{name}`\n" in parts, f"{kind} {name}"
    assert "| `rate` | number | `0.01` | learning rate" in keys  # the string under the field
