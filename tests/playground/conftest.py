"""A run with markup in its name and the page made of it; a browser."""

import pytest

import hardy
from browser import browser  # noqa: F401  (a fixture)
from hardy.cli import main

METHOD = {"name": "split_mix_dat", "width": 0.5, "attack": {"name": "pgd", "steps": 1}}


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    """A run, and the path of its page."""
    pytest.importorskip("onnxruntime", reason="the export extra is not installed")
    pytest.importorskip("onnxscript", reason="the export extra is not installed")
    folder = tmp_path_factory.mktemp("playground")
    source = {"name": "mini_digits", "domains": ["pen", "mail"]}
    chosen = {"name": "<script>x", "data.source": source, "data.clients": 1, "data.limit": 30, "method": METHOD}
    run = hardy.fit("demo", chosen, rounds=1, out=folder / "run", quiet=True)
    assert main(["playground", str(folder / "run"), "--out", str(folder / "p.html"), "--no-open"]) == 0
    return run, folder / "p.html"
