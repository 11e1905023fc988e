"""Real processes on loopback: a SuperLink with TLS and node authentication, and SuperNodes."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import hardy
from conftest import assert_close
from hardy import config
from hardy.faults.injection import Faults
from hardy.runs.checkpoint import load_checkpoint

pytest.importorskip("flwr", reason="the flower extra is not installed")

from hardy.cli import main
from hardy.flower import ENVIRONMENT
from hardy.flower.local import members, network, site, watch
from hardy.flower.processes import descendants

pytestmark = [
    pytest.mark.timeout(1800),
    # CPython leaves a socket to the garbage collector when the other end goes between connecting and the handshake
    pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning"),
]

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
[evaluation]
every = 2
[network]
deadline = 600.0
"""


def nearby(chosen):
    """The same experiment on the sequential engine."""
    here = dataclasses.replace(chosen.engine, name="sequential")
    return hardy.fit(dataclasses.replace(chosen, engine=here, network=config.NetworkChoice()), quiet=True)


def assert_same(folder, near):
    far, _ = load_checkpoint(folder / "checkpoint")
    assert far.server.round == near.state.round
    assert_close(near.state.shared, far.server.shared, 1e-9)
    assert_close(near.state.reported, far.server.reported, 1e-9)
    assert far.figures["latest"] == near.figures.latest


SPLIT_MIX = ["method=split_mix", "model.width=0.125", "data.capacity=exponential"]


@pytest.mark.slow  # a minute and a half of processes; the same in one process is in test_flower.py
def test_fedrbn_and_split_mix_over_one_superlink_are_those_of_the_sequential_engine(tmp_path):
    before = set(descendants(os.getpid()))
    of_no_kind = EXPERIMENT.replace('adversarial = ["mail"]\n', "")
    chosen = {"fedrbn": config.parse(EXPERIMENT), "split_mix": config.parse(of_no_kind, SPLIT_MIX)}
    with network(tmp_path / "flower", chosen["fedrbn"], tmp_path / "fedrbn", 3) as place:
        watch(place, place.submit(), tmp_path / "fedrbn", 2)
        for number in range(3):
            place.stop(f"node-{number}")
        place.bring(chosen["split_mix"], tmp_path / "split_mix")
        for number in range(3):
            place.supernode(number)  # agrees to the new app
        watch(place, place.submit(), tmp_path / "split_mix", 2)
    assert not members(tmp_path / "flower") and set(descendants(os.getpid())) <= before, "a process was left behind"
    for name, asked in chosen.items():
        assert not any(line["lost"] for line in rounds_of(tmp_path / name))
        assert_same(tmp_path / name, nearby(asked))


LIARS = """
import os, time
import numpy as np
from pathlib import Path
from flwr.clientapp import ClientApp
from hardy.flower import wire
from hardy.flower.apps import client_app, server_app

server = server_app(Path(__file__).with_name("experiment.toml"))
honest = client_app(Path(__file__).with_name("experiment.toml"))
client = ClientApp()


def spoilt(message, context):
    reply = honest(message, context)
    if os.environ.get("TEST_LIES"):
        shared, figures = wire.unpack_arrays(reply.content, "shared/0"), reply.content.metric_records["figures/0"]
        name, values = next(iter(shared.items()))
        match figures["round"]:
            case 0:
                shared[name] = values * np.nan
            case 1:
                shared["renamed"] = shared.pop(name)
            case 2:
                shared[name] = values[None]
            case 3:
                figures["examples"] = 10**12
            case 4:
                figures["round"] = 3  # the reply of the round before
            case 5:
                shared[name] = np.zeros(2**23)  # 64 MiB
            case _:
                time.sleep(3600)
        reply.content["shared/0"] = wire.pack(shared)
    return reply


client.train()(spoilt)
client.evaluate()(honest)
client.query()(honest)
"""


LATE = """
import os, random, time
from pathlib import Path
from flwr.clientapp import ClientApp
from hardy.flower.apps import client_app, server_app

server = server_app(Path(__file__).with_name("experiment.toml"))
on_time = client_app(Path(__file__).with_name("experiment.toml"))
client = ClientApp()


def late(message, context):
    reply = on_time(message, context)
    delay = random.SystemRandom().uniform(0, 4)
    time.sleep(delay)
    with open(os.environ["TEST_DELAYS"], "a") as log:
        print(context.node_config["client"], file=log)
    return reply


client.train()(late)
client.evaluate()(on_time)
client.query()(on_time)
"""


@pytest.mark.slow
def test_ten_runs_with_random_delays_have_the_same_bits(tmp_path):
    chosen = config.parse(EXPERIMENT, ["rounds=1", "evaluation.every=1", "network.deadline=900.0"])
    clients, found, orders = 3, [], set()
    with site(tmp_path / "flower") as place:
        place.prepare(chosen, tmp_path / "run", clients)
        (place.folder / "app" / "hardy_app" / "app.py").write_text(LATE)
        place.environment |= {"TEST_DELAYS": str(tmp_path / "delays")}
        place.superlink()
        for number in range(clients):
            place.supernode(number)
        for attempt in range(10):
            (tmp_path / "delays").write_text("")
            out = tmp_path / f"run-{attempt}"
            watch(place, place.submit(out=str(out)), out, 1)
            assert not any(line["lost"] for line in rounds_of(out))
            orders.add(tuple((tmp_path / "delays").read_text().split()))
            found.append(load_checkpoint(out / "checkpoint")[0].server)
    assert len(orders) > 1, "the replies came in the same order every time"
    for other in found[1:]:
        for first, second in ((found[0].shared, other.shared), (found[0].reported, other.reported)):
            assert list(first) and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@dataclasses.dataclass(frozen=True)
class _Without(Faults):
    """Client c is not there in the rounds (from 1) of missing[c]."""

    missing: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def sample_faults(self, seed, round, cohort):
        return {client: "dropped" for client, rounds in self.missing if round + 1 in rounds}


def rounds_of(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def server_apps(folder):
    return [pid for pid in members(folder) if b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes()]


PROCESSES = {b"superlink", b"supernode", b"flower-superexec", b"flwr-serverapp", b"hardy.flower.fork_server"}


def quiet_processes(folder):
    """What kinds of processes run; each has Flower's telemetry and look-ups off."""
    found = set()
    for pid in members(folder):
        with suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if words != [b""]:  # it is ending
                for name in ("FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK"):
                    assert f"{name}={ENVIRONMENT[name]}".encode() in words, command
            found |= {kind for kind in PROCESSES if kind in command}
    return found


def until(condition, seconds=240.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)


@pytest.mark.slow
def test_liars_and_the_silent_change_nothing_for_the_others(tmp_path):
    chosen = config.parse(EXPERIMENT, ["rounds=7", "evaluation.every=7", "network.deadline=150.0"])
    out = tmp_path / "run"
    with site(tmp_path / "flower") as place:
        place.prepare(chosen, out, 3)
        (place.folder / "app" / "hardy_app" / "app.py").write_text(LIARS)
        place.superlink()
        for number in range(3):
            place.environment |= {"TEST_LIES": "yes" if number == 2 else ""}
            place.supernode(number)
        run, seen = place.submit(), set()
        until(lambda: seen.update(quiet_processes(place.folder)) or seen == PROCESSES)
        watch(place, run, out, 7)
    lost = [line["lost"] for line in rounds_of(out)]
    assert all(set(found) == {"2"} for found in lost)
    said = (
        "not finite",
        "lacks",
        "has shape",
        "claims 1e+12",
        "belongs to round 3, now is 4",
        "refused: a reply of more than",
        "silent",
    )
    log = (out / "network.log").read_text()
    for found, reason in zip(lost, said, strict=True):
        assert reason in found["2"] and f"client 2 {found['2']}" in log
    near = nearby(dataclasses.replace(chosen, faults=_Without(missing=((2, (1, 2, 3, 4, 5, 6, 7)),))))
    far, _ = load_checkpoint(out / "checkpoint")
    assert_close(near.state.shared, far.server.shared, 1e-9)


@pytest.mark.slow
def test_a_killed_node_comes_back_and_a_killed_server_goes_on(tmp_path):
    rounds = 11
    chosen = config.parse(EXPERIMENT, [f"rounds={rounds}", f"evaluation.every={rounds}"])
    out = tmp_path / "run"
    with site(tmp_path / "flower") as place:
        place.prepare(chosen, out, 3)
        database = ("--database", str(place.folder / "superlink.db"))
        place.superlink(*database)
        for number in range(3):
            place.supernode(number)
        place.submit()

        def asked(number):
            return place.log(f"node-{number}").count("Receiving: train message")

        def in_the_middle_of_the_next_round():
            done, heard = len(rounds_of(out)), asked(0)
            until(lambda: len(rounds_of(out)) > done and asked(0) > heard)
            return len(rounds_of(out))

        until(lambda: asked(1) == 2)  # in the middle of the second round
        place.stop("node-1")
        place.supernode(1)
        until(lambda: asked(1) == 3)  # it is back

        in_the_middle_of_the_next_round()
        (app,) = server_apps(place.folder)
        os.kill(app, signal.SIGKILL)
        place.submit()
        done = in_the_middle_of_the_next_round()
        assert len(server_apps(place.folder)) == 1 and done < rounds - 1, "the network was faster than the test"
        place.stop("superlink")
        until(lambda: not server_apps(place.folder), 30)
        place.superlink(*database)
        watch(place, place.submit(), out, rounds)
    lines = rounds_of(out)
    assert [line["round"] for line in lines] == list(range(1, rounds + 1))
    missing = tuple((n, tuple(line["round"] for line in lines if str(n) in line["lost"])) for n in range(3))
    assert 2 in missing[1][1] and max(missing[1][1]) <= done  # on a busy machine others may be too slow for a round
    assert_same(out, nearby(dataclasses.replace(chosen, faults=_Without(missing=missing))))


@pytest.mark.slow
def test_a_trial_that_was_killed_leaves_no_process_and_is_resumed(tmp_path, capsys):
    chosen = config.parse(EXPERIMENT, ["rounds=4", "evaluation.every=4"])
    (tmp_path / "experiment.toml").write_text(chosen.to_toml())
    out = tmp_path / "run"
    words = ["run", str(tmp_path / "experiment.toml"), "--engine", "flower", "--out", str(out), "--quiet"]
    trial = subprocess.Popen([sys.executable, "-m", "hardy.cli", *words])
    try:
        until(lambda: len(rounds_of(out)) == 2)
        assert main(["resume", str(out)]) == 2
        assert "another process is running" in capsys.readouterr().err
    finally:
        trial.kill()
        trial.wait()
    until(lambda: not members(out / "flower"), 30)
    assert main(["resume", str(out), "--quiet"]) == 0
    assert "4 rounds in" in capsys.readouterr().out
    assert [line["round"] for line in rounds_of(out)] == [1, 2, 3, 4]
    assert not members(out / "flower")
    assert_same(out, nearby(chosen))
