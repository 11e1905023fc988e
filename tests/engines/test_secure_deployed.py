"""Secure aggregation between real processes: a node is killed while it trains, and the sum is that of the others."""

import dataclasses
import json

import pytest

pytest.importorskip("flwr", reason="the flower extra is not installed")

from test_flower_deployed import EXPERIMENT, _Without, nearby, rounds_of, until

from conftest import assert_close
from hardy import config
from hardy.flower.local import site, watch
from hardy.runs.checkpoint import load_checkpoint

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.slow,  # minutes of processes; the same in one process is in test_secure.py
    # CPython leaves a socket to the garbage collector when the other end goes between connecting and the handshake
    pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning"),
]

CHANGES = [
    "method=fedbn",
    "data.source.domains=['mail','pen','print','blend']",
    "network.secure=true",
    "network.deadline=90.0",
    "network.patience=900.0",
]
STAGES = 4
"""messages of a round to each node"""


def test_a_node_killed_in_mid_round_is_not_in_the_sum(tmp_path):
    chosen = config.parse(EXPERIMENT.replace('adversarial = ["mail"]\n', ""), CHANGES)
    out = tmp_path / "run"
    with site(tmp_path / "flower") as place:
        place.prepare(chosen, out, 4)
        place.superlink()
        for number in range(4):
            place.supernode(number)
        run = place.submit()
        # the second round's third message has come: keys and shares are out, the masked vector is not
        until(lambda: place.log("node-3").count("Receiving: train message") == STAGES + 3, 600)
        place.stop("node-3")
        watch(place, run, out, 2)
    lines = rounds_of(out)
    assert [set(line["lost"]) for line in lines] == [set(), {"3"}]
    stages = [line for line in (out / "network.log").read_text().splitlines() if ", secure, " in line]
    assert [line.rpartition("secure, ")[2] for line in stages[STAGES:]] == [
        "keys: 4 of 4 clients",
        "shares: 4 of 4 clients",
        "masked: 3 of 4 clients",
        "unmask: 3 of 3 clients",
    ]
    far, _ = load_checkpoint(out / "checkpoint")
    near = nearby(dataclasses.replace(chosen, faults=_Without(missing=((3, (2,)),))))
    assert_close(near.state.shared, far.server.shared, 1e-8)
    audit = [
        json.loads(line)
        for path in (tmp_path / "flower").rglob("audit.jsonl")
        for line in path.read_text().splitlines()
    ]
    trained = [line for line in audit if line.get("asked") == "train" and line["event"] == "sent"]
    assert len(trained) >= 2 * STAGES * 4 - 2
    assert {name for line in trained for name in line["sent"]} == {"settings", "masked"}
