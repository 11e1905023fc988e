"""The pins with hashes are those of constraints.txt."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pins(name):
    lines = (ROOT / name).read_text().splitlines()
    found = [line.split()[0].split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in found}


def test_every_file_but_torchs_has_its_hash():
    hashed = pins("requirements-dev.txt")
    differ = {p: (v, hashed.get(p)) for p, v in pins("constraints.txt").items() if p != "torch" and hashed.get(p) != v}
    assert not differ, "write requirements-dev.txt anew, as its first lines say"
    lines = [line for line in (ROOT / "requirements-dev.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
