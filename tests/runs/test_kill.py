"""A run killed with SIGKILL at random moments and resumed ends bit-identical to an undisturbed one."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import hardy
from conftest import everything, federation, fit, net, with_momentum
from hardy import papers
from hardy.config import CheckpointChoice
from hardy.core.cohort import Cohort
from hardy.engines.sequential import Sequential
from hardy.parts.aggregators.base import pipeline
from hardy.parts.aggregators.memories import client_momentum, delayed_momentum
from hardy.parts.aggregators.stages import clipping

ROUNDS = 12
OPTIONS = {"rounds": ROUNDS, "cohort": Cohort(fraction=0.5), "checkpoint": CheckpointChoice(every=1)}
# local norms and control variates: private tensors, shared extras, a sampled cohort and a best checkpoint in one run
METHOD = with_momentum(papers.scaffold(norm=papers.fedbn().norm))
# what the server remembers of clients and of its last move
REMEMBERING = pipeline(
    pre=(client_momentum(), clipping(radius=0.5, around="last_move"), delayed_momentum(momentum=0.5))
)
METHODS = {"tensors of clients": METHOD, "memory": with_momentum(papers.fedavg().replace(aggregator=REMEMBERING))}


def start(folder: str, name: str = "tensors of clients") -> None:
    if Path(folder, "config.toml").exists():
        hardy.resume(folder, method=METHODS[name], model=net, data=federation(), quiet=True)
    else:
        fit(METHODS[name], out=folder, **OPTIONS)


def kill_and_resume(folder, kills: int, name: str) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["conftest", "hardy"])
    rng = np.random.default_rng(0)
    killed = 0
    while killed < kills:
        process = context.Process(target=start, args=(str(folder), name))
        process.start()
        time.sleep(rng.uniform(0.0, 0.5))
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        killed += 1
        if (folder / "summary.json").exists():  # it finished: make it run its last rounds again
            (folder / "summary.json").unlink()
            newest = sorted((folder / "checkpoint").glob("round-*"))[-1]
            (newest / "record.json").write_text("torn")
    start(str(folder), name)


def check(tmp_path, kills, name="tensors of clients"):
    whole = fit(METHODS[name], out=tmp_path / "whole", **OPTIONS)
    kill_and_resume(tmp_path / "killed", kills, name)
    killed = hardy.load(tmp_path / "killed", method=METHODS[name], model=net, data=federation())
    assert killed.state.round == ROUNDS
    for tensor_name, tensor in everything(whole).items():
        assert torch.equal(tensor, everything(killed)[tensor_name]), name
    lines = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in ("whole", "killed")]
    first, second = ([{**json.loads(line), "seconds": 0} for line in file] for file in lines)
    assert first == second
    summaries = [json.loads((tmp_path / run / "summary.json").read_text()) for run in ("whole", "killed")]
    timed = {"seconds": 0, "files_sha256": 0, "sha256": 0}  # the checksums are of files with seconds in them
    assert {**summaries[0], **timed} == {**summaries[1], **timed}


def test_interrupted_in_the_middle_of_a_round(tmp_path, monkeypatch):
    whole, train = fit(METHOD, **OPTIONS), Sequential.train

    def interrupted(self, work):
        for number, updates in enumerate(train(self, work)):
            if work.round == 5 and number == 1:
                raise KeyboardInterrupt
            yield updates

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Sequential, "train", interrupted)
        start(str(tmp_path / "run"))
    start(str(tmp_path / "run"))
    again = hardy.load(tmp_path / "run", method=METHOD, model=net, data=federation())
    for name, tensor in everything(whole).items():
        assert torch.equal(tensor, everything(again)[name]), name


@pytest.mark.parametrize("name", METHODS)
def test_killed_a_few_times(tmp_path, name):
    check(tmp_path, 4, name)


@pytest.mark.slow
def test_killed_twenty_times(tmp_path):
    check(tmp_path, 20)
