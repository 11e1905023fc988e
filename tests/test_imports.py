"""Imports go one way, and the core needs torch, numpy and safetensors only."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import hardy

ROOT = Path(hardy.__file__).parent
FOLDERS = sorted(path.name for path in ROOT.iterdir() if (path / "__init__.py").exists())


def imported(path: Path) -> set[str]:
    """Modules a file imports, those for the type checker alone counted."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def rooms() -> dict[str, set[str]]:
    """Each folder, and each module at the root, with those it imports."""
    nodes = {*FOLDERS, *(path.stem for path in ROOT.glob("*.py"))} - {"__init__"}
    graph = {}
    for node in nodes:
        files = (ROOT / node).rglob("*.py") if node in FOLDERS else [ROOT / f"{node}.py"]
        names = {name.split(".")[1] for file in files for name in imported(file) if name.startswith("hardy.")}
        graph[node] = (names & nodes) - {node}
    return graph


def test_folders_form_no_cycle():
    graph, done = rooms(), []
    while graph:
        free = sorted(node for node, needs in graph.items() if needs <= set(done))
        assert free, f"a cycle among { ({node: sorted(needs - set(done)) for node, needs in graph.items()}) }"
        done += free
        graph = {node: needs for node, needs in graph.items() if node not in free}


def test_the_core_stands_alone():
    graph = rooms()
    assert graph["core"] <= {"errors", "registry", "version"}
    assert not (graph["parts"] | graph["papers"]) & {"engines", "runs", "evaluation", "deploy", "flower"}
    assert not graph["engines"] & {"papers", "parts", "runs", "evaluation"}


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


def test_every_part_says_what_its_options_are():
    from hardy.config.documentation import argument_docs
    from hardy.registry import PARTS

    for kind, parts in PARTS.items():
        for name, factory in parts.items():
            if not factory.__module__.startswith("hardy."):  # another test's own
                continue
            words = argument_docs(factory)
            for option in inspect.signature(factory).parameters:
                assert len(words.get(option, "")) > 5, f"{kind} {name}: {option}: {words.get(option)!r}"


REPORTING = {
    "ORT_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_ERROR_REPORTING": "false",
}


def test_libraries_that_report_usage_do_not():
    """Before any of them is imported; what the user has set holds."""
    code = f"import os, hardy; print([os.environ.get(name) for name in {[*REPORTING]}])"
    plain = {name: value for name, value in os.environ.items() if name not in REPORTING}
    usual = list(REPORTING.values())
    for given, told in (({}, usual), ({"ORT_DISABLE_TELEMETRY": "0"}, ["0", *usual[1:]])):
        around = plain | given
        done = subprocess.run([sys.executable, "-c", code], env=around, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(told)
