"""Several ranks have the figures of one process, and the same bits every time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import rank_cases
import torch

from conftest import assert_close, everything
from hardy.flower.processes import free_port

HERE = Path(__file__).parent


def start(number: int, count: int, port: int, *arguments: str) -> subprocess.Popen:
    """A rank as torchrun starts it."""
    given = {
        "RANK": number,
        "LOCAL_RANK": number,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    path = os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, **{name: str(value) for name, value in given.items()}, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two ranks made of each case."""
    out, port = tmp_path_factory.mktemp("ranks"), free_port()
    ranks = [start(number, 2, port, str(HERE / "rank_cases.py"), str(out)) for number in range(2)]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said[0] + said[1]
    assert said[0].endswith("done\n")
    return {name: torch.load(out / f"{number}.pt") for number, name in enumerate(rank_cases.cases())}


def close(first, second) -> None:
    """Equal, but for the rounding of numbers."""
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key, value in first.items():
            close(value, second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            close(one, other)
    else:
        assert first == (pytest.approx(second, rel=1e-7, abs=1e-7) if isinstance(second, float) else second)


@pytest.mark.parametrize("name", rank_cases.cases())
def test_two_ranks_agree_with_one_process(found, name):
    tensors, figures = found[name]
    one = rank_cases.fit(name)
    assert_close(everything(one), tensors, 1e-9)
    close(rank_cases.figures(one), figures)
