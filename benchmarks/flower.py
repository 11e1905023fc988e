"""What Hardy adds to Flower, on loopback, closed as a deployment is (mutual TLS).

python benchmarks/flower.py OUT.json [--nodes 2 10] [--rounds 4] [--smoke]
    Seconds and bytes of a round: the digits CNN (14.2M parameters) goes down, is trained for one step on eight images,
    and comes back. "Bare" is an app as a user of Flower writes it: its send_and_receive, PyTorch on the node, a plain
    mean; with Flower's settings as they come. Rounds after the first.

python benchmarks/flower.py OUT.json --scale [--nodes 2 10 50] [--bare 2 10] [--rounds 4]
    The same round of a small network (225,000 parameters) with more and more nodes: seconds, seconds of a core, bytes
    and the memory of all processes. "Bare" is Flower as it comes: `flower-supernode`, without TLS and Hardy.

python benchmarks/flower.py OUT.json --compression [--rounds 15] [--seeds 1]
    What updates cost and what the model is worth when they are compressed: five nodes, mini_digits.

python benchmarks/flower.py OUT.json --faults [NAME ...]
    Flower's own FedAvg and FedMedian with three nodes, one of which fails or lies in the second round of three. An
    honest node adds about 1 to twelve numbers, so an honest model is near 3 at the end. Hardy against the same faults
    is tests/engines/test_flower_deployed.py.

`--smoke`: two nodes, two rounds, a small network; a fault under Flower's FedAvg alone.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import statistics
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hardy import config
from hardy.flower.local import Site, members, network, site, watch
from hardy.flower.processes import descendants, free_port, start_process

SMOKE = "--smoke" in sys.argv
WIDTH = 0.125 if SMOKE else 1.0
RULES = ("FedAvg",) if SMOKE else ("FedAvg", "FedMedian")
BARE = (
    f"WIDTH = {WIDTH}\n"
    + """
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
    from hardy.parts.norms import batch

    return digits_cnn(norm=batch().layer, shape=(3, 28, 28), classes=10, width=WIDTH)


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
)


class Meter:
    """What all processes of a run cost: seconds of a core by Linux's cpuacct (None without it), and memory (PSS)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.group = folder, Path("/sys/fs/cgroup/cpuacct") / f"hardy-{os.getpid()}"
        self.memory, self.processes, self._ended = 0, 0, threading.Event()
        with contextlib.suppress(OSError):
            self.group.mkdir(exist_ok=True)
            (self.group / "tasks").write_text(str(os.getpid()))  # children are born into it
        threading.Thread(target=self._watch, daemon=True).start()

    def cores(self) -> float | None:
        with contextlib.suppress(OSError):
            return int((self.group / "cpuacct.usage").read_text()) / 1e9
        return None

    def _watch(self) -> None:
        while not self._ended.wait(3):
            found = [pss for pid in members(self.folder) if (pss := _pss(pid))]
            self.memory, self.processes = max(self.memory, sum(found)), max(self.processes, len(found))

    def stop(self) -> dict[str, Any]:
        self._ended.set()
        return {"memory_mib": round(self.memory / 1024), "processes": self.processes}


def _pss(process: int) -> int:
    """KiB of a process, with its share of what it shares."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


SCALE_WIDTH = 0.125
LAST_LINES = """[engine]
device = "cpu"
[evaluation]
every = {rounds}
[network]
deadline = 900.0
patience = 1800.0
"""
SCALE_LINES = """rounds = {rounds}
model = {{ name = "digits_cnn", width = 0.125 }}
method = "fedavg"
[data]
source = {{ name = "mini_digits", domains = {domains} }}
clients = {each}
limit = {limit}
validation = 0.0
[training]
steps = 1
batch = 8
"""
DOMAINS = ["mail", "pen", "print", "blend", "street"]


def scale(nodes: int, rounds: int) -> dict[str, Any]:
    """Hardy's rounds with so many nodes."""
    each = -(-nodes // 5)
    text = (SCALE_LINES + LAST_LINES).format(
        rounds=rounds, domains=json.dumps(DOMAINS[: min(nodes, 5)]), each=each, limit=8 * each
    )
    with tempfile.TemporaryDirectory() as folder:
        out, flower, lines = Path(folder) / "run", Path(folder) / "flower", list[dict[str, Any]]()
        meter, began = Meter(flower), time.monotonic()
        with network(flower, config.parse(text), out, nodes) as place:
            up = time.monotonic() - began
            run = place.submit()
            watcher = threading.Thread(target=_note_costs, args=(out, rounds, meter, lines), daemon=True)
            watcher.start()
            watch(place, run, out, rounds)
            watcher.join(10)
        written = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert not any(line["lost"] for line in written), [line["lost"] for line in written]
    for line, cost in zip(written, lines, strict=True):
        cost |= {"seconds": line["seconds"], "replies": line["slots"]}
        cost["bytes"] = sum(way["down"] + way["up"] for way in line["wire"].values())
    return {**meter.stop(), "start_s": round(up, 1), "rounds": lines}


def _note_costs(out: Path, rounds: int, meter: Meter, lines: list[dict[str, Any]]) -> None:
    """The seconds of a core between the lines of two rounds; the last has an evaluation in it."""
    before = meter.cores()
    while len(lines) < rounds:
        with contextlib.suppress(OSError):
            while len((out / "metrics.jsonl").read_text().splitlines()) > len(lines):
                now = meter.cores()
                lines.append({"core_s": None if now is None or before is None else round(now - before, 2)})
                before = now
        time.sleep(0.2)


def bare_scale(nodes: int, rounds: int) -> dict[str, Any]:
    """The same network over nodes as Flower starts them."""
    with tempfile.TemporaryDirectory() as folder, site(Path(folder) / "flower") as place:
        out = Path(folder) / "run"
        meter, began = Meter(place.folder), time.monotonic()
        place.prepare(config.Experiment(), out, nodes)
        app = BARE.replace(f"WIDTH = {WIDTH}", f"WIDTH = {SCALE_WIDTH}").replace(
            "lines.append({", 'lines.append({"ended": time.time(), '
        )
        bring(place, app, nodes=nodes, rounds=rounds)
        del place.environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"]
        place.superlink()
        for number in range(nodes):
            port = ["--host", "127.0.0.1", "--port", str(free_port())]
            command = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{place.control}", *port]
            with (place.folder / "logs" / f"bare-{number}.log").open("ab") as log:
                around = {
                    **place.environment,
                    "FLWR_HOME": str(place.folder / f"flwr-{number}"),
                    "OMP_NUM_THREADS": "1",
                }
                place.processes[f"bare-{number}"] = start_process(command, around, log)
        up, before = time.monotonic() - began, meter.cores()
        run = place.submit()
        while not (out / "bare.json").exists():
            assert not place.status(run).startswith("finished:failed"), place.log("superlink")[-1000:]
            time.sleep(1)
        lines, now = json.loads((out / "bare.json").read_text()), meter.cores()
    mean = None if now is None or before is None else round((now - before) / rounds, 2)
    return {**meter.stop(), "start_s": round(up, 1), "core_s_mean": mean, "rounds": lines}


RULES_ON_WIRE = {
    "none": "",
    "half_precision": '"half_precision"',
    "eight_bit": '"eight_bit"',
    "top_k 10 %": '{ name = "top_k", share = 0.1 }',
    "top_k 1 %": '{ name = "top_k", share = 0.01 }',
}


COMPRESSION_LINES = """rounds = {rounds}
method = "fedavg"
model = "tiny_cnn"
[data]
clients = 1
limit = {limit}
[training]
rate = 0.05
batch = 32
epochs = 3
"""


def compression(rounds: int, seeds: int) -> dict[str, Any]:
    """Rule -> seed -> bytes that go up in a round, and accuracy after the last."""
    found: dict[str, Any] = {}
    text = (COMPRESSION_LINES + LAST_LINES).format(rounds=rounds, limit=60 if SMOKE else 400)
    for seed in range(seeds):
        for name, rule in list(RULES_ON_WIRE.items())[: 2 if SMOKE else None]:
            chosen = config.parse(text, [f"seed={seed}", *([f"network.compression={rule}"] if rule else [])])
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "run"
                with network(Path(folder) / "flower", chosen, out, 5) as place:
                    watch(place, place.submit(), out, rounds)
                lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            assert not any(line["lost"] for line in lines), [line["lost"] for line in lines]
            accuracy = lines[-1]["standard_accuracy"]
            found.setdefault(name, []).append(
                {
                    "seed": seed,
                    "up": sum(way["up"] for way in lines[0]["wire"].values()),
                    "down": sum(way["down"] for way in lines[0]["wire"].values()),
                    "seconds_median": statistics.median(line["seconds"] for line in lines[1:]),
                    **{key: accuracy[key] for key in ("mean", "worst_client", "images", "standard_error")},
                }
            )
            print(name, found[name][-1], file=sys.stderr)
    return found


def hardy(nodes: int, rounds: int) -> list[dict]:
    """Hardy's rounds, FedAvg; the last one is evaluated after its time is taken."""
    chosen = config.parse(
        f'rounds = {rounds}\nmodel = {{ name = "digits_cnn", width = {WIDTH} }}\nmethod = "fedavg"\n'
        f"[data]\nclients = {-(-nodes // 5)}\n"
        f'limit = {8 * -(-nodes // 5)}\nvalidation = 0.0\nsource = {{ name = "mini_digits", domains = '
        f"{json.dumps(['mail', 'pen', 'print', 'blend', 'street'][: min(nodes, 5)])} }}\n[training]\nsteps = 1\n"
        f'batch = 8\n[engine]\ndevice = "cpu"\nname = "flower"\n[evaluation]\nevery = {rounds}\n'
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with network(Path(folder) / "flower", chosen, out, nodes) as place:
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
        bring(place, BARE, nodes=nodes, rounds=rounds)
        del place.environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"]
        start(place, nodes)
        run = place.submit()
        while not (out / "bare.json").exists():
            assert not place.status(run).startswith("finished:failed"), place.log("superlink")[-1000:]
            time.sleep(1 if SMOKE else 10)
        return json.loads((out / "bare.json").read_text())


def bring(place: Site, app: str, **settings: Any) -> None:
    """Puts an app in place of Hardy's, with settings of its own."""
    project = place.folder / "app" / "pyproject.toml"
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
    project.write_text(project.read_text() + "".join(lines))
    (place.folder / "app" / "hardy_app" / "app.py").write_text(app)


def start(place: Site, nodes: int, **last: Any) -> None:
    """The SuperLink and its nodes, the last with settings of its own."""
    place.superlink()
    for number in range(nodes):
        place.supernode(number, **(last if number == nodes - 1 else {}))


FAULTY = """
import json, time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp, strategy

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid, context):
    asked, lines, began = context.run_config, [], time.perf_counter()

    def note(round, arrays):
        values = np.concatenate([array.numpy().ravel() for array in arrays.values()])
        lines.append({"round": round, "seconds": time.perf_counter() - began, "mean": float(values.mean())})
        Path(asked["out"]).mkdir(exist_ok=True)
        Path(asked["out"], "rounds.json").write_text(json.dumps(lines))
        return MetricRecord({"none": 0})

    while len(list(grid.get_node_ids())) < 3:
        time.sleep(0.2)
    rule = getattr(strategy, asked["rule"])(fraction_evaluate=0.0)
    first = ArrayRecord({"w": Array(np.zeros((4, 3), np.float32))})
    rule.start(grid, first, num_rounds=3, timeout=asked["timeout"], evaluate_fn=note)
    Path(asked["out"], "done").write_text("")


@client.train()
def train(message, context):
    fault = context.run_config["fault"] if "bad" in context.node_config else ""
    round = message.content["config"]["server-round"]
    values = message.content["arrays"]["w"].numpy() + 1 + 0.01 * (context.node_id % 7 - 3)
    name, figures = "w", {"num-examples": 10}
    if fault == "replayed reply":
        if round == 1:
            context.state["reply"] = ArrayRecord({"w": Array(values)})
        values = context.state["reply"]["w"].numpy()
    elif round == 2:
        match fault:
            case "NaN":
                values = values * np.nan
            case "renamed key":
                name = "renamed"
            case "wrong shape":
                values = values[:, :2]
            case "inflated count":
                values, figures = values * 0 - 100, {"num-examples": 10**12}
            case "one more metric":
                figures["more"] = 1.0
            case "never answers" | "SuperNode SIGKILLed in mid-round":
                time.sleep(3600)
    if fault == "ServerApp SIGKILLed in mid-round":
        time.sleep(5)
    arrays = ArrayRecord({name: Array(values.astype(np.float32))})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord(figures)}), reply_to=message)
"""
LIES = ("none", "NaN", "renamed key", "wrong shape", "inflated count", "one more metric", "replayed reply")
DEATHS = ("never answers", "SuperNode SIGKILLed in mid-round", "ServerApp SIGKILLed in mid-round")
TIMEOUT = 90.0
"""seconds that Flower is told to wait for replies"""


def faults(asked: list[str]) -> dict[str, dict[str, Any]]:
    """Fault -> rule -> how the run ended, and its rounds. Nodes that lie serve one run after another; one that dies
    or hangs gets a network of its own."""
    found: dict[str, dict[str, Any]] = {}
    lies = tuple(fault for fault in LIES if fault in asked)
    for group in (*((lies,) if lies else ()), *((fault,) for fault in DEATHS if fault in asked)):
        for rules in [RULES] if group is lies else [(rule,) for rule in RULES]:
            with tempfile.TemporaryDirectory() as folder, site(Path(folder) / "flower") as place:
                place.prepare(config.Experiment(), Path(folder), 3)
                bring(place, FAULTY, rule="", fault="", timeout=TIMEOUT)
                start(place, 3, bad=1)
                for fault in group:
                    for rule in rules:
                        out = Path(folder) / f"{rule} {fault}"
                        found.setdefault(fault, {})[rule] = end = faulty(place, out, rule, fault)
                        print(rule, fault, end, file=sys.stderr)
    return found


def faulty(place: Site, out: Path, rule: str, fault: str) -> dict[str, Any]:
    """One run of a strategy under a fault."""

    def submit() -> str:
        return place.submit(out=str(out), rule=rule, fault=fault)

    def rounds() -> list[dict[str, Any]]:
        try:
            return json.loads((out / "rounds.json").read_text())
        except (OSError, ValueError):
            return []

    run = submit()
    if fault == "SuperNode SIGKILLed in mid-round":
        while place.log("node-2").count("Receiving: train message") < 2:
            time.sleep(0.2)
        place.stop("node-2")
    before = None
    if fault == "ServerApp SIGKILLed in mid-round":
        while len(rounds()) < 2:
            time.sleep(0.2)
        for process in descendants(place.processes["superlink"].pid):
            if b"flwr-serverapp" in Path(f"/proc/{process}/cmdline").read_bytes():
                os.kill(process, signal.SIGKILL)
        before = rounds()[-1]["round"]
        (out / "rounds.json").unlink()
        run = submit()
    while not (out / "done").exists() and not place.status(run).startswith("finished"):
        time.sleep(3)
    time.sleep(1)
    lines = rounds()
    mean = lines[-1]["mean"]
    lines = [{**line, "mean": None if math.isnan(line["mean"]) else line["mean"]} for line in lines]
    last = lines[-1]
    if not (out / "done").exists():
        return {"outcome": f"the run ends in round {last['round'] + 1}", "rounds": lines}
    if math.isnan(mean):
        said = "NaN model"
    elif abs(mean - 3) > 10:
        said = f"model taken over ({mean:.0f} instead of 3)"
    elif abs(mean - 3) > 0.2:
        said = f"taken in unnoticed ({mean:.2f} instead of 3)"
    elif before is not None:
        said = f"after round {before} it starts again at round {lines[0]['round'] + 1}"
    else:
        said = "holds"
    return {"outcome": said, "seconds": round(last["seconds"], 1), "rounds": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="result file (JSON)")
    parser.add_argument("--nodes", type=int, nargs="*", default=[2] if SMOKE else [2, 10])
    parser.add_argument("--rounds", type=int, default=2 if SMOKE else 4)
    parser.add_argument("--faults", nargs="*", choices=[*LIES, *DEATHS], help="these only; all if none is named")
    parser.add_argument("--scale", action="store_true", help="more and more nodes")
    parser.add_argument("--bare", type=int, nargs="*", default=[2] if SMOKE else [2, 10], help="nodes of bare Flower")
    parser.add_argument("--compression", action="store_true", help="updates compressed on the wire")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only shows that it runs")
    options = parser.parse_args()
    result: dict[str, Any] = {"cores": os.cpu_count(), "python": platform.python_version(), "flwr": version("flwr")}
    if options.faults is not None:
        found = faults(options.faults or [*LIES, *DEATHS])
        options.out.write_text(json.dumps({**result, "timeout": TIMEOUT, "faults": found}, indent=1))
        return
    if options.scale or options.compression:
        if options.out.exists():
            result |= json.loads(options.out.read_text())
        if options.compression:
            found = {"compression": compression(options.rounds, options.seeds), "compression_rounds": options.rounds}
            options.out.write_text(json.dumps(result | found, indent=1))
        for name, run, many in (("hardy", scale, options.nodes), ("bare", bare_scale, options.bare)):
            for nodes in many if options.scale else ():
                load = os.getloadavg()[1]
                result.setdefault("scale", {})[f"{name}, {nodes} nodes"] = row = run(nodes, options.rounds)
                row["load_average"] = [load, os.getloadavg()[1]]
                later = [line["seconds"] for line in row["rounds"][1:]]
                row["median_s"] = statistics.median(later)
                print(
                    name, nodes, {key: value for key, value in row.items() if key != "rounds"}, later, file=sys.stderr
                )
                options.out.write_text(json.dumps(result, indent=1))
        return
    result["rounds"] = {}
    for nodes in options.nodes:
        for name, run in (("bare", bare), ("hardy", hardy)):
            lines = run(nodes, options.rounds)
            later = [line["seconds"] for line in lines[1:]]
            result["rounds"][f"{name}, {nodes} nodes"] = {"median": statistics.median(later), "lines": lines}
            print(name, nodes, [round(line["seconds"], 1) for line in lines], lines[-1]["bytes"], file=sys.stderr)
            options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
