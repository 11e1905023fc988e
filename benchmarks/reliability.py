"""Every fault of tests/reliability at full length, counted: kills, power cuts, damaged files.

    python benchmarks/reliability.py benchmarks/results/reliability_cpu-2-cores_DATE.json [--smoke]

The power cuts of a real ext4 image need root and loop devices; without them they are left out, and the file says so.
"""

# ruff: noqa: E402
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "reliability")]

from damage import damage_everything, node_state, totals
from disk_faults import Disk
from small_run import GIVEN, start
from test_kills import kill_everywhere
from test_power_cuts import cut_everywhere, lost_lines

import hardy
from hardy.core.files import versions

LOOP = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from small_run import METHOD, OPTIONS
from conftest import fit
from hardy.config import CheckpointChoice
fit(METHOD, out=Path({folder!r}), **{{**OPTIONS, "rounds": {rounds}, "checkpoint": CheckpointChoice(every=1)}})
"""


def kills(work: Path, step: int) -> dict[str, Any]:
    disk = Disk(work)
    with disk.watching():
        start(work / "whole")
    counted = kill_everywhere(work, range(0, len(disk.trace), step))
    return {"operations_of_a_run": len(disk.trace), "kills": sum(counted.values()), "by_operation": counted, "lost": 0}


def damaged(work: Path, each: int) -> dict[str, Any]:
    start(work / "run")
    hardy.evaluate(hardy.load(work / "run", **GIVEN), "fgsm@0.1", checks=False, quiet=True)
    found = damage_everything(work / "run", work / "copy", each)
    found |= {
        f"node/{name}": value
        for name, value in damage_everything(node_state(work / "state"), work / "copy", each).items()
    }
    return {"files_damaged": sum(sum(one.values()) for one in found.values()), **totals(found), "by_file": found}


@contextmanager
def mounted(image: Path, where: Path) -> Iterator[None]:
    where.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", image, where], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", where], check=True)


def image_cuts(work: Path, cuts: int) -> dict[str, Any]:
    """Copies the image of a mounted ext4 while a run writes to it: what a power cut leaves. Each copy is mounted, which
    replays its journal, and the run in it resumed."""
    image, rounds = work / "disk.img", 20 + 40 * cuts
    with image.open("wb") as file:
        file.truncate(48 * 2**20)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, capture_output=True)
        with mounted(image, work / "m"):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        return {"left_out": f"no loop device or ext4 here ({type(error).__name__})"}
    copies = []
    with mounted(image, work / "m"):
        code = LOOP.format(paths=sys.path[:2], folder=str(work / "m" / "run"), rounds=rounds)
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
        while process.poll() is None and len(copies) < cuts:
            time.sleep(0.05 + 0.13 * (len(copies) % 7))
            if not (work / "m" / "run" / "metrics.jsonl").exists():
                continue
            copies.append(work / f"cut-{len(copies)}.img")
            while True:  # until two copies agree: then no block changed meanwhile
                shutil.copyfile(image, copies[-1])
                if copies[-1].read_bytes() == image.read_bytes():
                    break
        process.kill()
        process.wait()
    counted = {"cuts": len(copies), "rounds": rounds, "lost_lines": 0, "damaged_checkpoints": 0, "not_resumed": 0}
    seen = []
    for copy in copies:
        folder = work / "after"
        with mounted(copy, work / "m"):
            shutil.copytree(work / "m" / "run", folder)
        counted["lost_lines"] += lost_lines(folder)
        newest = [int(path.name[6:]) for path in (folder / "checkpoint").glob("round-*")]
        seen.append(max(newest, default=0))
        if (folder / "config.toml").exists():
            said: list[str] = []
            run = _two_more_rounds(folder, f"rounds = {rounds}", f"rounds = {seen[-1] + 2}", said)
            counted["damaged_checkpoints"] += sum("torn or corrupted" in line for line in said)
            counted["lost_lines"] += sum(line.startswith("metrics.jsonl") for line in said)
            counted["not_resumed"] += run.state.round != seen[-1] + 2
        shutil.rmtree(folder)
        copy.unlink()
    return {**counted, "newest_checkpoints": seen}


def _two_more_rounds(folder: Path, old: str, new: str, said: list[str]) -> hardy.Run:
    """Enough to see that it goes on."""
    text = (folder / "config.toml").read_text()
    assert old in text
    (folder / "config.toml").write_text(text.replace(old, new))
    return hardy.resume(folder, **GIVEN, quiet=True, remark=said.append, allow_change=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a few faults of each kind")
    parser.add_argument("--only", help="one kind of fault; the others stay in the file as they are")
    options = parser.parse_args()
    known = json.loads(options.out.read_text()) if options.only and options.out.exists() else {}
    found: dict[str, Any] = {**known, "versions": versions()}
    few = options.smoke
    parts = {
        "kills": lambda work: kills(work, 40 if few else 1),
        "power_cuts": lambda work: cut_everywhere(work, lambda n: range(0, n + 1, 70 if few else 2)),
        "power_cuts_ext4": lambda work: image_cuts(work, 2 if few else 50),
        "damaged_files": lambda work: damaged(work, 5 if few else 800),
    }
    for name, count in parts.items():
        if options.only not in (None, name):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as work:
            found[name] = {**count(Path(work)), "seconds": round(time.monotonic() - began, 1)}
        print(name, {key: value for key, value in found[name].items() if key != "by_file"}, flush=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
