"""--workers: who owns whom, what is refused, a rank that dies, another number of workers."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import hardy
from conftest import assert_close, everything, federation, net
from hardy import papers
from hardy.cli import main
from hardy.core import disk_store
from hardy.core.messages import Slot, Work
from hardy.engines.distributed import Distributed, deal
from hardy.engines.process_group import ProcessGroup
from hardy.flower.processes import descendants
from hardy.runs import costs, workers
from hardy.runs.prepare import prepare

KEPT = ["data.limit=30", "method=scaffold", "method.norm=local", "engine.name=sequential", "engine.precision=float64"]
EXPERIMENT = [*KEPT, "checkpoint.every=1", "evaluation.every=5", "cohort.fraction=0.5"]
"""clients keep tensors of their own, and there is a checkpoint of every round"""
WAIT = 120.0
"""seconds, on a busy machine"""


def fit(out, rounds: int, keys=EXPERIMENT, **engine) -> hardy.Run:
    keys = [*keys, f"rounds={rounds}", *(f"engine.{key}={value}" for key, value in engine.items())]
    return hardy.fit("demo", keys, out=out, quiet=True)


def prolong(folder, rounds: int) -> None:
    text = (folder / "config.toml").read_text()
    before = next(line for line in text.splitlines() if line.startswith("rounds = "))
    (folder / "config.toml").write_text(text.replace(before, f"rounds = {rounds}"))


# Who trains what


def test_ranks_share_the_cost():
    costs = [8.0, 8.0, *[1.0] * 8, 3.0]
    dealt = deal(costs, 3)
    loads = [sum(c for c, at in zip(costs, dealt, strict=True) if at == rank) for rank in range(3)]
    assert loads == [9.0, 9.0, 9.0]
    assert sorted(deal([1.0] * 5, 5)) == [0, 1, 2, 3, 4]  # nobody is without a client


def test_a_client_that_attacks_costs_what_its_passes_do():
    run = prepare(hardy.read("demo", ["method=fedrbn", "data.limit=30", "data.adversarial=['pen']"]))
    found = {"AT": [], "ST": []}
    for number, client in enumerate(run.engine.data.clients):
        found[client.kind].append(costs.slot_macs(run, 0, Slot(number)) / len(client.train))
    assert min(found["AT"]) > 3 * max(found["ST"])  # PGD-7 on one pass, beside two passes of FedRBN's others


@pytest.mark.parametrize(("method", "shares"), [("fedavg", [2, 2]), ("fedbn", [0, 4])])
def test_clients_that_keep_nothing_are_dealt_anew(method, shares):
    """A cohort of four that one rank owns."""
    run = prepare(hardy.read("demo", [f"method={method}", "data.limit=30"]))
    owner = workers.client_owners(run, 2)
    asked = [Slot(client) for client, rank in enumerate(owner) if rank][:4]
    work = Work(round=0, rate=0.1, slots=asked, shared={}, reported={})
    dealt = [
        Distributed(run.engine, ProcessGroup(number, 2), owner, partial(costs.slot_macs, run)).share(work)
        for number in range(2)
    ]
    assert list(map(len, dealt)) == shares and sorted(slot.client for own in dealt for slot in own) == [
        slot.client for slot in asked
    ]


# What is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "flower", "--workers", "2"], "engine flower has a process for each client"),
        (["--workers", "11"], "there are 10 clients to share"),
        (["--engine", "distributed"], "engine.workers is 1. Take --workers 2 or more"),
        (["--workers", "2", "method=centralised"], "trains on all rows as one client"),
        (
            ["--workers", "2", "method.norm=synchronised", "training.steps=2", "training.batch=8"],
            "needs all clients of a step in one call",
        ),
        (["--workers", "0"], "it must be a whole number, 1 or more"),
        (["engine.workers=0"], "engine.workers is 0"),
        (["engine.timeout=0", "--workers", "2"], "engine.timeout is 0"),
    ],
)
def test_what_workers_cannot_do_is_refused(options, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(workers, "_start", lambda *_: subprocess.Popen(["sleep", "60"]))  # they would not be met
    monkeypatch.setattr(workers.os, "cpu_count", lambda: 16)
    try:
        code = main(["run", "demo", "--alone", "data.limit=30", "rounds=1", *options, "--out", str(tmp_path / "run")])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert words in capsys.readouterr().err


def test_a_crowd_of_workers_is_refused_before_any_starts(monkeypatch):
    monkeypatch.setattr(workers, "_start", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setattr(workers.os, "cpu_count", lambda: 3)
    with pytest.raises(hardy.HardyError, match=r"workers is 7, but this machine has 3 cores.*limit is 6.*torchrun"):
        hardy.fit("demo", engine={"workers": 7})


def test_objects_need_torchrun():
    with pytest.raises(hardy.HardyError, match=r"method is given as an object.*torchrun"):
        hardy.fit(method=papers.fedavg(), model=net, data=federation(), engine={"workers": 2})


def test_torchrun_says_how_many(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert workers.with_workers(hardy.Experiment()).engine.workers == 4
    with pytest.raises(hardy.HardyError, match="torchrun has started 4 processes"):
        workers.with_workers(hardy.read("demo", ["engine.workers=2"]))


# Runs


def figures(run) -> list:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in run.history]


FEW = ["data.limit=30", "engine.name=sequential", "engine.precision=float64", "cohort.fraction=0.5"]
PEOPLE = ["population.clients=40", "population.smallest=4", "population.largest=12", "training.batch=4", *FEW]
CASES = {
    "rows on disk": [*EXPERIMENT, "engine.store=disk"],
    "reported rows on disk": [
        "method=fedrbn",
        "method.attack={ name = 'pgd', steps = 1 }",
        "data.adversarial=['pen']",
        "engine.store=disk",
        *FEW,
    ],
    "population": ["method=fedavg", *PEOPLE],
    "population on disk": ["method=fedbn", "engine.store=disk", *PEOPLE],
    "population, some measured": ["method=fedbn", "evaluation.clients=7", *PEOPLE],
    "one measured": ["method=fedbn", "evaluation.clients=1", *FEW],
    "held out": ["method=fedbn", "data.held_out=['mail']", *FEW],
    "held out, rows on disk": ["method=fedbn", "data.held_out=['mail']", "engine.store=disk", *FEW],
}


@pytest.mark.parametrize("name", CASES)
def test_two_workers_have_the_figures_of_one(name, tmp_path):
    one, two = fit(tmp_path / "one", 2, CASES[name]), fit(tmp_path / "two", 2, CASES[name], workers=2)
    assert_close(everything(one), everything(two), 1e-9)
    for first, second in zip(figures(one), figures(two), strict=True):
        assert first == pytest.approx(second, rel=1e-7, abs=1e-7)
    assert_close(everything(hardy.load(tmp_path / "two")), everything(two), 0)


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_run_goes_on_with_other_workers(tmp_path, store, monkeypatch):
    """Of one run with two workers and one that stops half-way: with two again it has the same bits, with three the same
    numbers, and those are the numbers of a run that never had two."""
    monkeypatch.setattr(disk_store, "_SPARE", -4)  # compact on the way, where this process has rows
    keys = [*EXPERIMENT, f"engine.store={store}"]
    whole = fit(tmp_path / "whole", 4, keys, workers=2)
    assert whole.summary()["workers"] == 2
    record = json.loads((tmp_path / "whole/checkpoint/round-000004/record.json").read_text())
    shards = record["clients"]["private"]["shards"]
    assert len(shards) == 2
    if store == "memory":
        assert sorted(client for shard in shards for client in shard["clients"]) == list(range(10))
    again, other = tmp_path / "again", tmp_path / "other"
    fit(again, 2, keys, workers=2)
    prolong(again, 4)
    shutil.copytree(again, other)
    assert_close(everything(hardy.resume(again, quiet=True)), everything(whole), 0)
    one = hardy.resume(other, workers=3, quiet=True)
    assert one.summary()["workers"] == 3
    assert_close(everything(one), everything(whole), 1e-9)
    assert_close(everything(hardy.load(tmp_path / "whole")), everything(whole), 0)
    assert_close(everything(fit(tmp_path / "alone", 4)), everything(whole), 1e-9)
    prolong(other, 5)
    assert_close(everything(hardy.resume(other, workers=1, quiet=True)), everything(fit(None, 5)), 1e-9)


def test_a_damaged_shard_is_named_and_the_checkpoint_before_it_used(tmp_path, recwarn):
    run = fit(tmp_path / "run", 2, workers=2)
    record = json.loads((tmp_path / "run/checkpoint/round-000002/record.json").read_text())
    shard = tmp_path / "run/clients/private" / record["clients"]["private"]["shards"][1]["file"]
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    remarks = []
    resumed = hardy.resume(tmp_path / "run", workers=1, quiet=True, remark=remarks.append)
    assert any("checksum of shard" in remark and "using the one before it" in remark for remark in remarks)
    assert_close(everything(resumed), everything(run), 1e-9)


def killed_run(out, victim: int, after: int, wait: float, store: str) -> tuple[int, str]:
    """A run of 60 rounds with two workers, one of which is killed some time after so many: exit code and words."""
    options = [*EXPERIMENT, f"engine.store={store}", "rounds=60", "--workers", "2", "--quiet", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "hardy", "run", "demo", "--alone", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        log, until = out / "metrics.jsonl" if after else out / "config.toml", time.monotonic() + WAIT
        while not log.exists() or len(log.read_bytes().splitlines()) < after:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.005)
        family = [process.pid, *descendants(process.pid)]
        time.sleep(wait)
        os.kill(family[victim], signal.SIGKILL)
        _, said = process.communicate(timeout=WAIT)
        until = time.monotonic() + WAIT
        while any(alive(number) for number in family):
            assert time.monotonic() < until, "a rank outlives the run"
            time.sleep(0.05)
        return process.returncode, said
    finally:
        process.kill()


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def check_kill(out, victim: int, rng: random.Random, after: int, store: str = "memory") -> None:
    code, said = killed_run(out, victim, after, 0.2 * rng.random(), store)
    if victim:
        assert code == 2, said
        assert len(said.splitlines()) == 1
        assert "rank 1 of 2 was killed by signal 9" in said
        assert not after or f"`hardy resume {out}` goes on after round" in said
    ends = 20
    text = (out / "config.toml").read_text().replace("rounds = 60", f"rounds = {ends}")
    (out / "config.toml").write_text(text)
    resumed = hardy.resume(out, workers=1, allow_change=True, quiet=True)  # a shorter run is a change
    assert resumed.state.round == ends
    assert_close(everything(resumed), everything(fit(out.with_name("whole"), ends)), 1e-9)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("victim", [1, 0], ids=["a worker", "the first rank"])
def test_a_killed_rank_ends_the_run_and_loses_nothing(tmp_path, victim):
    check_kill(tmp_path / "run", victim, random.Random(victim), after=2 + victim)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("number", range(10))
def test_ten_kills_at_random_moments(tmp_path, number):
    """Before the first round too, and with rows on disk."""
    rng = random.Random(100 + number)
    check_kill(tmp_path / "run", rng.randint(0, 1), rng, after=rng.randint(0, 5), store=("memory", "disk")[number % 2])


SILENT = """
import os, sys, time, torch
from hardy.engines.process_group import ProcessGroup, RankLost
ranks = ProcessGroup(int(sys.argv[1]), 2, timeout=20.0, meeting=f"file://{sys.argv[2]}")
ranks.join(torch.device("cpu"))
if ranks.number:
    time.sleep(600)
try:
    ranks.tell("state", torch.zeros(2**24))
except RankLost as lost:
    print(lost, flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_a_rank_that_does_not_listen_is_given_up(tmp_path):
    """More is told than the connection holds, so that the first rank has to wait."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", SILENT, str(number), str(tmp_path / "meeting")], stdout=subprocess.PIPE)
        for number in range(2)
    ]
    try:
        said, _ = ranks[0].communicate(timeout=WAIT)
        assert b"silent for 20 s (engine.timeout)" in said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
