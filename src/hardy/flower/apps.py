"""Flower's two apps: the server's whole experiment, and the client that answers it."""

import json
import secrets
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hardy import config, experiment
from hardy.config import FROM_PYTHON, Experiment
from hardy.data.splits import Federation
from hardy.engines.base import Engine
from hardy.engines.flower import Flower, Profile, Roll
from hardy.errors import HardyError
from hardy.flower import wire
from hardy.flower.node import Given, Memory, node
from hardy.method import Method, Model, Plan
from hardy.state import write_atomic

_OUTCOME = ".outcome.json"


def server_app(
    source: str | Path, *, out: str | Path | None = None, method: Method | None = None, model: Model | None = None
) -> Any:
    """A ServerApp that runs an experiment (a TOML file or a bundled name) to its end, or goes on where it stopped.

    The run folder is the run's configuration `out`, or the one given here. A method or a model given as objects take
    the place of the names in the experiment; the client app must be given the same.
    """
    from flwr.serverapp import ServerApp

    app = ServerApp()

    def main(grid: Any, context: Any) -> None:
        folder = context.run_config.get("out") or out
        if not folder:
            raise HardyError("the run has no folder; give one: flwr run APP --run-config 'out=\"/data/runs/first\"'.")
        asked = config.read(str(context.run_config.get("experiment") or source))
        try:
            serve(asked, grid, Path(folder), method=method, model=model, quiet=True)
        except HardyError as error:
            note(Path(folder), run=str(context.run_id), error=str(error))
            raise
        note(Path(folder), run=str(context.run_id), error=None)

    app.main()(main)
    return app


def note(folder: Path, **outcome: Any) -> None:
    """Leaves word of how a run ended where who started it looks for it."""
    if folder.is_dir():
        write_atomic(folder / _OUTCOME, json.dumps(outcome).encode())


def outcome(folder: Path, run: str) -> str | None:
    """How a run ended: "" well, else why not; None: it has not."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / _OUTCOME).read_text("utf-8"))
        if found["run"] == run:
            return str(found["error"] or "")
    return None


def client_app(*, method: Method | None = None, model: Model | None = None, data: Federation | None = None) -> Any:
    """A ClientApp: a node that introduces itself, trains and evaluates, with what its own configuration says."""
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app, given = ClientApp(), Given(method=method, model=model, data=data)

    def who(message: Any, context: Any) -> tuple[Any, Memory, dict[str, Any]]:
        asked = wire.settings(message.content)
        me = node(str(asked["experiment"]), tuple(sorted(context.node_config.items())), given)
        if "client" in asked and int(asked["client"]) != me.number:
            raise HardyError(f"a message for client {asked['client']} came to client {me.number}; it is not answered.")
        return me, Memory(context, str(asked.get("token", "none")), me.number, me.folder), asked

    def introduce(message: Any, context: Any) -> Any:
        me, _, _ = who(message, context)
        return Message(wire.message({}, profile=me.profile.words()), reply_to=message)

    def train(message: Any, context: Any) -> Any:
        me, memory, _ = who(message, context)
        return Message(me.train(message.content, memory), reply_to=message)

    def evaluate(message: Any, context: Any) -> Any:
        me, memory, _ = who(message, context)
        return Message(me.evaluate(message.content, memory), reply_to=message)

    app.query()(introduce)
    app.train()(train)
    app.evaluate()(evaluate)
    return app


def serve(
    asked: Experiment,
    grid: Any,
    folder: Path | None,
    *,
    method: Method | None = None,
    model: Model | None = None,
    quiet: bool = False,
) -> experiment.Run:
    """Calls the roll, then runs or resumes the experiment over the grid. A checkpoint is written every round."""
    again = folder is not None and (folder / "config.toml").is_file()
    if again and folder is not None:
        asked = config.read(str(folder / "config.toml"), check=method is None)
    asked = replace(
        asked,
        engine=replace(asked.engine, name="flower"),
        checkpoint=replace(asked.checkpoint, every=asked.checkpoint.every or 1),
    )
    if asked.evaluation.diagnose:
        raise HardyError("evaluation.diagnose needs all clients' images in one place; leave it out over a network.")
    clients = asked.network.clients
    if clients is None:
        clients = len(asked.faults.infiltrate(experiment.federation(asked), asked.seed).clients)
    roll = Roll(grid=grid, experiment=asked.to_toml(), clients=clients)
    token = secrets.token_hex(8)
    record = folder / "network.json" if folder is not None else None
    if again and record is not None and record.exists():
        known = json.loads(record.read_text("utf-8"))
        token, profiles = known["token"], [Profile.read(json.dumps(p), clients) for p in known["clients"]]
        roll.profiles = {profile.client: profile for profile in profiles}
    roll.wait(asked.network.patience, grace=min(asked.network.deadline, 60.0))
    data = roll.ledger()

    def connect(plan: Plan, data: Federation) -> Engine:
        return Flower(
            plan,
            data,
            asked.training,
            seed=asked.seed,
            device=torch.device("cpu") if asked.engine.device == "auto" else asked.engine.find_device(),
            dtype=torch.float64 if asked.engine.precision == "float64" else torch.float32,
            roll=roll,
            network=asked.network,
            token=token,
        )

    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        known = {"token": token, "clients": [json.loads(roll.profiles[c].words()) for c in range(clients)]}
        write_atomic(record, json.dumps(known, indent=1).encode())
    if asked.network.clients is not None:  # the rows are the nodes' own
        asked = replace(asked, data=replace(asked.data, source=FROM_PYTHON))
    if again and folder is not None:
        return experiment.resume(folder, method=method, model=model, data=data, network=connect, quiet=quiet)
    return experiment.fit(asked, method=method, model=model, data=data, network=connect, out=folder, quiet=quiet)
