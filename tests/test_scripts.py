"""Every script of benchmarks/ and experiments/ runs: with --smoke, tiny sizes, on the CPU, away from the repository."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "experiments")
SCRIPTS = {
    "benchmarks/agreement.py": (["--smoke"], "all agree"),
    "benchmarks/auto.py": (["out.json", "--smoke"], "cases"),
    "benchmarks/engines.py": (["out.json", "--smoke"], "one_step_round_ms"),
    "benchmarks/fedrbn.py": (["out.json", "--smoke"], "seconds"),
    "benchmarks/fedrobust.py": (["out.json", "--smoke"], "one_step_round_vectorised"),
    "benchmarks/host.py": (["out.json", "--smoke"], "FBN, fbn_cnn, 10 clients"),
    "benchmarks/kernels.py": (["out.json", "--smoke"], "no GPU: nothing to measure"),
    "benchmarks/leakage.py": (["out.json", "--smoke"], "image"),
    "benchmarks/hostile_replies.py": (["--smoke"], "| all NaN | unchanged |"),
    "benchmarks/robust.py": (["out.json", "--smoke"], "measured"),
    "benchmarks/split_mix.py": (["out.json", "--smoke"], "customising, ms"),
    "benchmarks/tree.py": (["out.json", "--smoke"], "costs"),
    "experiments/fbn/two_dimensions.py": (["out.svg", "--smoke"], "one machine"),
}
"""arguments, and what must be a key of the result file, or stand in the picture or in what is printed"""
SLOW = {
    "benchmarks/gpu.py": (["out.json", "--smoke"], "fbn"),
    "benchmarks/startup.py": (["out.json", "--smoke"], "run"),
    "benchmarks/reliability.py": (["out.json", "--smoke"], "damaged_files"),
    "benchmarks/distributed.py": (["out.json", "--smoke"], "runs"),
    "benchmarks/population.py": (["out.json", "--smoke"], "fedrbn"),
    "benchmarks/flower.py": (["out.json", "--smoke"], "rounds"),
    "benchmarks/flower.py --scale": (["out.json", "--smoke", "--scale"], "scale"),
    "benchmarks/flower.py --compression": (["out.json", "--smoke", "--compression"], "compression"),
    "benchmarks/strangers.py": (["out.json", "--smoke"], "strangers"),
    "benchmarks/flower.py --faults": (["out.json", "--smoke", "--faults", "NaN"], "faults"),
}
PEERS = {f"benchmarks/peers/{name}.py" for name in ("work", "bare_run", "hardy_run", "flower_run", "pfl_run")}
"""run by peers.py, the last two where Ray and pfl are installed"""
PARTS = {
    "experiments/fedrbn/clipping.py",
    "experiments/field/four_convolutions.py",
    "experiments/field/strided_cnn.py",
    "experiments/private/attacks.py",
}
"""modules that a table names"""


def run(script, arguments, folder):
    """What a script prints; it must succeed, and write nothing but into the folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment.pop("HARDY_DATA", None)
    command = [sys.executable, ROOT / script, *arguments]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def check(script, arguments, wanted, folder):
    printed = run(script, arguments, folder)
    if (result := folder / "out.json").exists():
        found = json.loads(result.read_text())
        assert found[wanted]
        assert not any("error" in row for row in found.values() if isinstance(row, dict)), found
    elif (picture := folder / "out.svg").exists():
        assert wanted in picture.read_text()
    else:
        assert wanted in printed


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs(script, tmp_path):
    check(script, *SCRIPTS[script], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("script", SLOW)
def test_a_slow_script_runs(script, tmp_path):
    pytest.importorskip("flwr")
    check(script.split()[0], *SLOW[script], tmp_path)


def test_the_peers_run_or_are_skipped_with_a_reason(tmp_path):
    run("benchmarks/peers.py", ["out.json", "--smoke"], tmp_path)
    found = json.loads((tmp_path / "out.json").read_text())
    measured = {row["framework"] for row in found["rows"]}
    assert {"bare", "hardy"} <= measured and measured | found["skipped"].keys() == {"bare", "hardy", "flower", "pfl"}
    assert all(found["skipped"].values())


def test_no_script_is_forgotten():
    found = {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert found == {*SCRIPTS, *(name.split()[0] for name in SLOW), "benchmarks/peers.py", *PEERS, *PARTS}
