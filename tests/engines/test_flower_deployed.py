"""Real processes on loopback: a SuperLink with TLS and node authentication, and SuperNodes."""

import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path

import pytest

import hardy
from conftest import assert_close
from hardy import config
from hardy.robustness.faults import Faults
from hardy.state import load_checkpoint

pytest.importorskip("flwr", reason="the flower extra is not installed")

from hardy.cli import main
from hardy.flower.deploy import certificates
from hardy.flower.trial import descendants, site, watch

pytestmark = pytest.mark.timeout(600)

EXPERIMENT = """
name = "deployed"
rounds = 2
method = "fedrbn"
model = "tiny_cnn"
[data]
source = { name = "mini_digits", domains = ["mail", "pen", "print"] }
clients = 1
limit = 60
adversarial = ["mail"]
[training]
steps = 2
batch = 8
[engine]
device = "cpu"
precision = "float64"
[network]
deadline = 120.0
"""


def nearby(chosen):
    """The same experiment on the sequential engine."""
    return hardy.fit(
        dataclasses.replace(chosen, engine=dataclasses.replace(chosen.engine, name="sequential")), quiet=True
    )


def assert_same(folder, near):
    far, _ = load_checkpoint(folder / "checkpoint")
    assert far.server.round == near.state.round
    assert_close(near.state.shared, far.server.shared, 1e-9)
    assert_close(near.state.reported, far.server.reported, 1e-9)
    assert far.figures["latest"] == near.figures.latest


SPLIT_MIX = ["method=split_mix", "model.width=0.125", "data.capacity=exponential"]


@pytest.mark.parametrize("changes", [[], pytest.param(SPLIT_MIX, marks=pytest.mark.slow)], ids=["fedrbn", "split_mix"])
def test_a_trial_is_the_same_experiment_and_leaves_no_process(changes, tmp_path, capsys):
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    before = set(descendants(os.getpid()))
    out = tmp_path / "run"
    words = ["run", str(tmp_path / "experiment.toml"), *changes]
    assert main([*words, "--engine", "flower", "--out", str(out), "--quiet"]) == 0
    assert "2 rounds in" in capsys.readouterr().out
    assert_same(out, nearby(config.parse(EXPERIMENT, changes)))
    assert set(descendants(os.getpid())) <= before
    assert not [p for p in _processes() if str(out) in p], "a process was left behind"


def _processes():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_text(errors="replace")


LIARS = """
import os, time
import numpy as np
from pathlib import Path
from flwr.app import Array
from flwr.clientapp import ClientApp
from hardy.flower.apps import client_app, server_app

server = server_app(Path(__file__).with_name("experiment.toml"))
honest = client_app()
client = ClientApp()


def spoilt(message, context):
    reply = honest(message, context)
    if os.environ.get("TEST_LIES"):
        shared, figures = reply.content.array_records["shared/0"], reply.content.metric_records["figures/0"]
        name, values = next((name, array.numpy()) for name, array in shared.items())
        match figures["round"]:
            case 0:
                shared[name] = Array(values * np.nan)
            case 1:
                shared["renamed"] = shared.pop(name)
            case 2:
                shared[name] = Array(values[None])
            case 3:
                figures["examples"] = 10**12
            case 4:
                figures["round"] = 3  # the reply of the round before
            case _:
                time.sleep(3600)
    return reply


client.train()(spoilt)
client.evaluate()(honest)
client.query()(honest)
"""


@dataclasses.dataclass(frozen=True)
class _Without(Faults):
    """Client c is not there in the rounds (from 1) of missing[c]."""

    missing: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def strike(self, seed, round, cohort):
        return {client: "dropped" for client, rounds in self.missing if round + 1 in rounds}


def rounds_of(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(condition, seconds=240.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)


@pytest.mark.slow
def test_liars_strangers_and_the_silent_change_nothing_for_the_others(tmp_path):
    chosen = config.parse(EXPERIMENT, ["rounds=6", "evaluation.every=6", "network.deadline=60.0"])
    out = tmp_path / "run"
    with site(tmp_path / "flower") as place:
        place.prepare(chosen, out, 3)
        (place.folder / "app" / "hardy_app" / "app.py").write_text(LIARS)
        place.superlink()
        for number in range(3):
            place.register(place.folder / "keys" / f"node-{number}.pub")
            place.environment |= {"TEST_LIES": "yes" if number == 2 else ""}
            place.supernode(number)
        other = tmp_path / "other"
        certificates(other, hosts=["127.0.0.1"], nodes=1)
        place.supernode(3, key=other / "node-0.key")  # an unregistered key
        place.supernode(4, key=other / "node-0.key", authority=other / "ca.pem")  # somebody else's certificate
        watch(place, place.submit(), out, 6)
        stranger, deceived = (place.log(f"node-{number}") for number in (3, 4))
    lost = [line["lost"] for line in rounds_of(out)]
    assert all(set(found) == {"2"} for found in lost)
    said = ("not finite", "lacks", "has shape", "claims 1e+12", "belongs to round 3, now is 4", "silent")
    for found, reason in zip(lost, said, strict=True):
        assert reason in found["2"]
    assert "SuperNode ID" not in stranger and "SuperNode ID" not in deceived
    assert "CERTIFICATE_VERIFY_FAILED" in deceived or "certificate" in deceived.lower()
    near = nearby(dataclasses.replace(chosen, faults=_Without(missing=((2, (1, 2, 3, 4, 5, 6)),))))
    far, _ = load_checkpoint(out / "checkpoint")
    assert_close(near.state.shared, far.server.shared, 1e-9)


@pytest.mark.slow
def test_a_killed_node_comes_back_and_a_killed_superlink_goes_on(tmp_path):
    rounds = 9
    chosen = config.parse(EXPERIMENT, [f"rounds={rounds}", f"evaluation.every={rounds}"])
    out = tmp_path / "run"
    with site(tmp_path / "flower") as place:
        place.prepare(chosen, out, 3)
        database = ("--database", str(place.folder / "superlink.db"))
        place.superlink(*database)
        for number in range(3):
            place.register(place.folder / "keys" / f"node-{number}.pub")
            place.supernode(number)
        place.submit()

        def asked(number):
            return place.log(f"node-{number}").count("Receiving: train message")

        until(lambda: asked(1) == 2)  # in the middle of the second round
        place.stop("node-1")
        while place.log("node-1").count("SuperNode ID") < 2:  # its key is in use until Flower misses its heartbeat
            if "node-1" in place.processes:
                place.stop("node-1")
                time.sleep(5)
            place.supernode(1)
            until(lambda: place.processes["node-1"].poll() is not None or place.log("node-1").count("SuperNode ID") > 1)
        until(lambda: asked(1) == 3)  # it is back
        done = len(rounds_of(out))
        until(lambda: len(rounds_of(out)) > done and asked(0) > len(rounds_of(out)))  # in the middle of a later one
        done = len(rounds_of(out))
        place.stop("superlink")
        assert done < rounds - 1, "the network was faster than the test"
        place.superlink(*database)
        watch(place, place.submit(), out, rounds)
    lines = rounds_of(out)
    assert [line["round"] for line in lines] == list(range(1, rounds + 1))
    missing = tuple(line["round"] for line in lines if line["lost"])
    assert 2 in missing and {client for line in lines for client in line["lost"]} == {"1"}
    assert max(missing) <= done
    assert_same(out, nearby(dataclasses.replace(chosen, faults=_Without(missing=((1, missing),)))))
