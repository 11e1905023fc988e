"""The site: `make docs`. Its root is that of the repository, so that links work here and on GitHub alike."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import reference

import hardy

reference.write(HERE / "_generated")

project, author = "Hardy", "The Hardy authors"
project_copyright = author
version = release = hardy.__version__
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/**",
    "experiments/**",
    "benchmarks/**",
    "examples/**",
]
exclude_patterns = ["docs/_build", "docs/_generated", "docs/*.py", "**/results", "**/peers"]
source_suffix = {".md": "markdown"}
nitpicky = True
highlight_language = "text"
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_title = f"Hardy {hardy.__version__}"
html_extra_path = ["front"]
html_static_path = ["style"]
html_css_files = ["hardy.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1b6a72", "color-brand-content": "#1b6a72"},
    "dark_css_variables": {"color-brand-primary": "#6fc3c9", "color-brand-content": "#6fc3c9"},
}
pygments_style, pygments_dark_style = "friendly", "github-dark"


def setup(app):
    """A link to a folder works on GitHub; here it becomes plain text."""

    def unlink(app, page, source):
        source[0] = re.sub(r"\[(\w+)\]\(results\)", r"\1", source[0])

    app.connect("source-read", unlink)
