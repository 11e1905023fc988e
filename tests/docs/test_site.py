"""The documentation builds without a warning, and every link inside it leads somewhere."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

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


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[Path, Page]:
    """Every page of the site, built as `make docs` builds it."""
    out = tmp_path_factory.mktemp("site").resolve()
    options = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet", "-c", "docs"]
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    made = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, ".", out],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    return {path: Page(path.read_text("utf-8")) for path in out.rglob("*.html")}


def test_links_inside_the_site_lead_somewhere(site):
    dead = []
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


def test_every_key_and_part_has_its_row(site):
    from hardy.config import Experiment
    from hardy.registry import PARTS

    text = {path.stem: path.read_text("utf-8") for path in site if path.parent.name == "docs"}
    for key in Experiment.__dataclass_fields__:
        assert f">{key}<" in text["configuration"] or f">[{key}]<" in text["configuration"], key
    for kind, parts in PARTS.items():
        for name in parts:
            assert f'id="{kind}-{name}"'.replace("_", "-") in text["parts"].replace("_", "-"), f"{kind} {name}"
