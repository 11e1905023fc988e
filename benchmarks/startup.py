"""What a command takes beside its rounds: python benchmarks/startup.py OUT.json [key=value ...] [--smoke]

`hardy run` of FedRBN's digits experiment (50 clients, five real domains, two attacks at the end) in a new process, with
its seconds by phase, on the clock and of the processor: a phase is a few functions, without other phases inside them.
Rounds are few, local steps too, and the network narrow, since only what is around them is looked at. Further arguments
change the experiment, such as `model.width=1 engine.name=vectorised` on a GPU. Also how long `hardy --help` and
`import hardy` take, and which heavy modules a run loads.
"""

import argparse
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
PHASES = {
    "data": ["runs.prepare:federation", "runs.prepare:DeviceData"],
    "network, method and checks": ["runs.prepare:bind", "core.server:Server.check", "core.server:Server.start"],
    "choice of the engine": ["engines.auto:EngineChoice.make"],
    "rounds": ["core.server:Server.round", "core.server:PipelinedServer.round"],
    "multiply-accumulates": ["runs.costs:image_macs", "runs.prepare:image_macs"],
    "accuracy between rounds": ["runs.loop:_evaluate"],
    "checkpoints": ["runs.loop:save_checkpoint"],
    "metrics.jsonl and headers": ["runs.folder:MetricsLog.append", "runs.folder:write_run_header"],
    "attacks at the end": ["evaluation.measure:ServedClients.attacked"],
    "red flags": ["runs.evaluate:_flags"],
    "pictures of attacks": ["runs.evaluate:_illustrate"],
    "representations": ["runs.evaluate:_represent", "evaluation.projections:norms"],
    "evaluation.json": [f"evaluation.record:EvaluationRecord.{name}" for name in ("__init__", "put", "result")],
    "report.html": ["runs.loop:write_report", "runs.evaluate:write_report"],
    "summary.json": ["runs.loop:_write_summary", "runs.evaluate:_publish"],
}
HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed", "sympy", "triton", "onnx", "flwr")
SETTINGS = ("rounds=2", "training.steps=2", "evaluation.every=1", "model.width=0.25", "data.source.limit=500")
TINY = (
    *("rounds=1", "training.steps=1", "model.width=0.1", "data.source=mini_digits", "data.clients=5"),
    "evaluation.checks=false",
)


class Clock:
    """Seconds by phase; a phase inside another one stops the outer one's clock."""

    def __init__(self) -> None:
        self.seconds, self.processor, self.calls, self.running = {}, {}, {}, ["other"]
        self.last = time.monotonic(), time.process_time()

    def turn(self) -> None:
        now, name = (time.monotonic(), time.process_time()), self.running[-1]
        for spent, at, before in zip((self.seconds, self.processor), now, self.last, strict=True):
            spent[name] = spent.get(name, 0.0) + at - before
        self.last = now

    @contextmanager
    def phase(self, name: str):
        self.turn()
        self.running.append(name)
        self.calls[name] = self.calls.get(name, 0) + 1
        try:
            yield
        finally:
            self.turn()
            self.running.pop()

    def timed(self, name: str, function):
        def run(*arguments, **options):
            with self.phase(name):
                return function(*arguments, **options)

        return run


def clocked(clock: Clock) -> None:
    """Has the functions of each phase timed."""
    for phase, places in PHASES.items():
        for place in places:
            module, _, path = place.partition(":")
            owner, _, name = path.rpartition(".")
            kept = pkgutil.resolve_name(f"hardy.{module}:{owner}" if owner else f"hardy.{module}")
            setattr(kept, name, clock.timed(phase, getattr(kept, name)))


def child(began: float, arguments: list[str]) -> None:
    """`hardy run` in this process, whose start the parent has noted; prints the seconds by phase."""
    from hardy.cli.parser import parse_arguments

    options = parse_arguments(arguments)
    for name in ("api", "arms", "seeds"):
        importlib.import_module(f"hardy.runs.{name}")
    imported, worked = time.monotonic(), time.process_time()
    clock = Clock()
    clocked(clock)
    sys.stdout.flush()
    options.call(options)
    clock.turn()
    found = {
        "seconds": {"imports": imported - began, **clock.seconds},
        "processor": {"imports": worked, **clock.processor},
        "calls": clock.calls,
        "heavy_modules": [name for name in HEAVY if name in sys.modules],
    }
    print(json.dumps(found))


def ran(*command: str) -> tuple[float, str]:
    """Seconds of a command, and what it printed last."""
    began = time.monotonic()
    words = [word.format(began=began) for word in command]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    compiled = {"PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "hardy-startup")}  # as of an installed package
    ended = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, env={**kept, **compiled}
    )
    if ended.returncode:
        sys.exit(ended.stdout + ended.stderr)
    return time.monotonic() - began, (ended.stdout.splitlines() or [""])[-1]


def whole_command(settings: list[str], experiment: str) -> dict:
    """Seconds by phase of one run, and of the process in all."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["run", experiment, *settings, "--out", f"{folder}/run", "--quiet"]
        took, told = ran(__file__, "--child", "{began}", json.dumps(command).replace("{", "{{").replace("}", "}}"))
    found = json.loads(told)
    rounded = {kind: {n: round(s, 3) for n, s in found[kind].items()} for kind in ("seconds", "processor")}
    return {
        **found,
        **rounded,
        "end of the process": round(took - sum(found["seconds"].values()), 3),
        "whole": round(took, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="result file (JSON)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help=f"besides {' '.join(SETTINGS)}")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only shows that it runs")
    options = parser.parse_args()
    from engines import provenance

    given = {setting.partition("=")[0] for setting in options.settings}
    usual = [one for one in (TINY if options.smoke else SETTINGS) if one.partition("=")[0] not in given]
    settings = [*usual, *options.settings]
    repeats = 1 if options.smoke else 5
    result = {**provenance(), "settings": settings}
    for name, command in (
        ("hardy --help", "-m hardy --help"),
        ("import hardy", "-c import_hardy"),
        ("python", "-c pass"),
    ):
        words = [word.replace("_", " ") for word in command.split()]
        result[name] = round(min(ran(*words)[0] for _ in range(repeats)), 3)
    result["run"] = whole_command(settings, str(ROOT / "experiments/fedrbn/digits.toml"))
    for name, seconds in sorted(result["run"]["processor"].items(), key=lambda pair: -pair[1]):
        print(f"{seconds:8.2f} s of the processor, {result['run']['seconds'][name]:8.2f} s on the clock  {name}")
    print({name: value for name, value in result.items() if name != "run"}, result["run"]["heavy_modules"])
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(float(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main()
