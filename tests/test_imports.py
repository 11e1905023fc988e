"""Imports go one way, and the core needs torch, numpy and safetensors only."""

import ast
import subprocess
import sys
from pathlib import Path

import hardy

ROOT = Path(hardy.__file__).parent
RUNNING = ("hardy.experiment", "hardy.run", "hardy.rounds")
FORBIDDEN = {  # module or package -> what it must not import
    "tensors.py": ("hardy.partition", "hardy.parts", "hardy.papers", "hardy.engines"),
    "partition.py": ("hardy.parts", "hardy.papers", "hardy.engines"),
    "parts": ("hardy.papers", "hardy.engines", *RUNNING, "hardy.server"),
    "papers": ("hardy.engines", *RUNNING, "hardy.server"),
    "engines": ("hardy.papers", *RUNNING),
    "models": ("hardy.parts", "hardy.papers", "hardy.engines"),
    "data": ("hardy.parts", "hardy.papers", "hardy.engines"),
}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_go_one_way():
    for place, forbidden in FORBIDDEN.items():
        files = [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))
        assert files
        for file in files:
            wrong = {name for name in imported(file) if name.startswith(forbidden)}
            assert not wrong, f"{file.relative_to(ROOT)} imports {wrong}"


def test_the_core_needs_little():
    code = """
import sys
for name in ("PIL", "scipy", "sklearn", "tensorboard", "matplotlib", "flwr", "onnx", "onnxruntime"):
    sys.modules[name] = None
import hardy, hardy.cli
hardy.fit(hardy.Experiment(rounds=1, training=hardy.Training(steps=1)), quiet=True)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_every_part_says_what_it_is():
    from hardy.registry import PARTS

    for kind, parts in PARTS.items():
        assert parts, kind
        for name, factory in parts.items():
            assert factory.__doc__ and not factory.__doc__.startswith(f"{factory.__name__}("), f"{kind} {name}"
