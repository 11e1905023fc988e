"""What Hardy adds to Flower: python benchmarks/flower.py OUT.json [--nodes 2 10] [--rounds 4]

1. Seconds and bytes of a round on loopback, with TLS and node authentication: the digits CNN (14.2M parameters) goes
   down, is trained for one step on eight images, and comes back. "Bare" is an app as a user of Flower writes it: its
   send_and_receive, PyTorch on the node, a plain mean; with Flower's settings as they come. Rounds after the first.
2. One bad reply of ten: what Flower's strategies make of it (in this process, with their own aggregate_train).
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np

from hardy import config
from hardy.flower import ENVIRONMENT
from hardy.flower.trial import Site, site, watch

BARE = """
import json, time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()


def net():
    from hardy.models import digits_cnn
    from hardy.parts.norm import batch

    return digits_cnn(norm=batch().layer, shape=(3, 28, 28), classes=10)


@server.main()
def main(grid, context):
    nodes, rounds = context.run_config["nodes"], context.run_config["rounds"]
    while len(list(grid.get_node_ids())) < nodes:
        time.sleep(0.2)
    torch.manual_seed(0)
    state, lines = net().state_dict(), []
    for _ in range(rounds):
        began = time.perf_counter()
        arrays = ArrayRecord(state)
        letters = [Message(RecordDict({"arrays": arrays}), node, "train") for node in grid.get_node_ids()]
        replies = list(grid.send_and_receive(letters))
        found = [reply.content["arrays"].to_torch_state_dict() for reply in replies]
        state = {n: torch.stack([f[n].double() for f in found]).mean(0).to(t.dtype) for n, t in state.items()}
        size = sum(a.count_bytes() for a in ([arrays] * len(letters) + [reply.content["arrays"] for reply in replies]))
        lines.append({"seconds": time.perf_counter() - began, "replies": len(found), "bytes": size})
    Path(context.run_config["out"]).mkdir(exist_ok=True)
    Path(context.run_config["out"], "bare.json").write_text(json.dumps(lines))


@client.train()
def train(message, context):
    torch.set_num_threads(1)
    model = net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), 0.01)
    torch.manual_seed(context.node_id % 1000)
    loss = torch.nn.functional.cross_entropy(model(torch.rand(8, 3, 28, 28)), torch.randint(10, (8,)))
    loss.backward()
    optimiser.step()
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 8})})
    return Message(content, reply_to=message)
"""


def started(place: Site, chosen: config.Experiment, out: Path, nodes: int) -> None:
    place.superlink()
    for number in range(nodes):
        place.register(place.folder / "keys" / f"node-{number}.pub")
        place.supernode(number)


def hardy(nodes: int, rounds: int) -> list[dict]:
    """Hardy's rounds, FedAvg; the last one is evaluated after its time is taken."""
    chosen = config.parse(
        f'rounds = {rounds}\nmodel = "digits_cnn"\nmethod = "fedavg"\n[data]\nclients = {-(-nodes // 5)}\n'
        f'limit = {8 * -(-nodes // 5)}\nvalidation = 0.0\nsource = {{ name = "mini_digits", domains = '
        f"{json.dumps(['mail', 'pen', 'print', 'blend', 'street'][: min(nodes, 5)])} }}\n[training]\nsteps = 1\n"
        f'batch = 8\n[engine]\ndevice = "cpu"\nname = "flower"\n[evaluation]\nevery = {rounds}\n'
    )
    with tempfile.TemporaryDirectory() as folder, site(Path(folder) / "flower") as place:
        out = Path(folder) / "run"
        place.prepare(chosen, out, nodes)
        started(place, chosen, out, nodes)
        watch(place, place.submit(), out, rounds)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert not any(line["lost"] for line in lines), lines
    return [
        {
            "seconds": line["seconds"],
            "replies": line["slots"],
            "bytes": sum(way["down"] + way["up"] for way in line["wire"].values()),
        }
        for line in lines
    ]


def bare(nodes: int, rounds: int) -> list[dict]:
    """The same payload with nothing but Flower."""
    with tempfile.TemporaryDirectory() as folder, site(Path(folder) / "flower") as place:
        out = Path(folder) / "run"
        place.prepare(config.Experiment(), out, nodes)
        project = place.folder / "app" / "pyproject.toml"
        project.write_text(project.read_text() + f"nodes = {nodes}\nrounds = {rounds}\n")
        (place.folder / "app" / "hardy_app" / "app.py").write_text(BARE)
        del place.environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"]
        started(place, config.Experiment(), out, nodes)
        run = place.submit()
        while not (out / "bare.json").exists():
            assert not place.status(run).startswith("finished:failed"), place.tail("superlink")
            time.sleep(10)
        return json.loads((out / "bare.json").read_text())


def strategies() -> dict[str, dict[str, str]]:
    """What becomes of the model when one reply of ten is bad: "ok" if it lies among the honest ones."""
    os.environ.update(ENVIRONMENT)
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp import strategy
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    rng = np.random.default_rng(0)

    def reply(number: int, fault: str) -> Message:
        values = rng.normal(1.0, 0.1, (4, 3)).astype(np.float32)
        if fault == "NaN":
            values[:] = np.nan
        if fault == "wrong shape":
            values = values[:, :2]
        if fault == "inflated count":
            values[:] = -100.0
        named = OrderedDict({"renamed" if fault == "renamed key" else "w": Array(values)})
        count = 10**12 if fault == "inflated count" else 10
        figures = {"num-examples": count, **({"more": 1.0} if fault == "one more metric" else {})}
        asked = Message(RecordDict(), number, "train")
        asked.metadata.__dict__["_message_id"] = str(number)
        return Message(RecordDict({"arrays": ArrayRecord(named), "metrics": MetricRecord(figures)}), reply_to=asked)

    found: dict[str, dict[str, str]] = {}
    for fault in ("NaN", "renamed key", "wrong shape", "inflated count", "one more metric"):
        found[fault] = {}
        for name in ("FedAvg", "FedMedian"):
            replies = [reply(n, fault if n == 4 else "") for n in range(1, 11)]
            try:
                arrays, _ = getattr(strategy, name)().aggregate_train(1, replies)
                values = np.concatenate([a.numpy().ravel() for a in arrays.values()])
                outcome = "NaN model" if np.isnan(values).any() else "ok" if (abs(values - 1) < 1).all() else "hijacked"
            except BaseException as error:  # Flower ends the app with SystemExit of its own
                outcome = f"run ends: {type(error).__name__}"
            found[fault][name] = outcome
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--nodes", type=int, nargs="*", default=[2, 10])
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    result = {"cores": os.cpu_count(), "python": platform.python_version(), "faults": strategies(), "rounds": {}}
    for nodes in options.nodes:
        for name, run in (("bare", bare), ("hardy", hardy)):
            lines = run(nodes, options.rounds)
            later = [line["seconds"] for line in lines[1:]]
            result["rounds"][f"{name}, {nodes} nodes"] = {"median": statistics.median(later), "lines": lines}
            print(name, nodes, [round(line["seconds"], 1) for line in lines], lines[-1]["bytes"], file=sys.stderr)
            options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
