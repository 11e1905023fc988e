"""Flower's two apps: the server's whole experiment, and the client that answers it."""

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hardy import config
from hardy.config import Experiment
from hardy.core.federation import Federation
from hardy.core.files import disk, write_atomic
from hardy.core.method import BuildModel, Method, Plan
from hardy.errors import HardyError
from hardy.flower import wire
from hardy.flower.membership import Membership
from hardy.flower.network_engine import Flower
from hardy.flower.node import Given, Memory, Node, node
from hardy.runs.api import fit, resume
from hardy.runs.prepare import federation
from hardy.runs.profiles import placeholder_federation, remember, remembered
from hardy.runs.run import Run

_OUTCOME = ".outcome.json"
_LOG = logging.getLogger("flwr")


def server_app(
    source: str | Path, *, out: str | Path | None = None, method: Method | None = None, model: BuildModel | None = None
) -> Any:
    """A ServerApp that runs an experiment (a TOML file or a bundled name) to its end, or goes on where it stopped.

    The run's configuration may name another experiment (`experiment`) and the run folder (`out`). A method or a model
    given as objects take the place of the names in the experiment; the client app must be given the same.
    """
    from flwr.serverapp import ServerApp

    app = ServerApp()

    def main(grid: Any, context: Any) -> None:
        _end_with_parent()
        folder = context.run_config.get("out") or out
        if not folder:
            raise HardyError("the run has no folder; give one: flwr run APP --run-config 'out=\"/data/runs/first\"'.")
        asked = config.read(str(context.run_config.get("experiment") or source))
        with _logged(Path(folder)):
            try:
                run_server(asked, grid, Path(folder), method=method, model=model, quiet=True)
            except Exception as error:
                _LOG.exception("the run ended")
                note(Path(folder), run=str(context.run_id), error=str(error) or type(error).__name__)
                raise
            note(Path(folder), run=str(context.run_id), error=None)

    app.main()(main)
    return app


def _end_with_parent() -> None:
    """Without its SuperLink the process would try for ever to reach it, and hold on to the run folder."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)  # nothing is lost: what is on disk is whole

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _logged(folder: Path) -> Iterator[None]:
    """Keeps what Flower's log says of the run in its folder: the SuperLink has it only for as long as it lives."""
    with disk(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / "network.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _LOG.addHandler(handler)
    try:
        yield
    finally:
        _LOG.removeHandler(handler)
        handler.close()


def note(folder: Path, **outcome: Any) -> None:
    """Leaves word of how a run ended where who started it looks for it."""
    write_atomic(folder / _OUTCOME, json.dumps(outcome).encode())


def outcome(folder: Path, run: str) -> str | None:
    """How a run ended: "" well, else why not; None: it has not."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / _OUTCOME).read_text("utf-8"))
        if found["run"] == run:
            return str(found["error"] or "")
    return None


def client_app(*, method: Method | None = None, model: BuildModel | None = None, data: Federation | None = None) -> Any:
    """A ClientApp: a node that introduces itself, trains and evaluates, with what its own configuration says."""
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app, given = ClientApp(), Given(method=method, model=model, data=data)

    def who(message: Any, context: Any) -> tuple[Node, Memory]:
        asked = wire.settings(message.content)
        me = node(str(asked["experiment"]), tuple(sorted(context.node_config.items())), given)
        if "client" in asked and int(asked["client"]) != me.number:
            raise HardyError(f"a message for client {asked['client']} came to client {me.number}; it is not answered.")
        return me, Memory(me.folder, str(asked.get("token", "none")), me.number)

    def answering(answer: Callable[[Node, Any, Memory], Any]) -> Callable[[Any, Any], Any]:
        def handle(message: Any, context: Any) -> Any:
            try:
                me, memory = who(message, context)
                return Message(answer(me, message.content, memory), reply_to=message)
            except HardyError:
                raise
            except Exception as error:  # its words would go to the server, and might quote what is private
                _LOG.exception("the message is not answered")
                raise HardyError(f"{type(error).__name__}; the node's own log says more.") from None

        return handle

    app.query()(answering(lambda me, content, memory: wire.message({}, profile=me.profile.words())))
    app.train()(answering(Node.train))
    app.evaluate()(answering(Node.evaluate))
    return app


def run_server(
    asked: Experiment,
    grid: Any,
    folder: Path | None,
    *,
    method: Method | None = None,
    model: BuildModel | None = None,
    quiet: bool = False,
) -> Run:
    """Calls the roll, then runs or resumes the experiment over the grid. A checkpoint is written every round."""
    begun = folder if folder is not None and (folder / "config.toml").is_file() else None
    token, profiles = remembered(begun) if begun else (secrets.token_hex(8), [])
    if begun:
        asked = config.read(str(begun / "config.toml"), check=method is None)
    asked = replace(
        asked,
        engine=replace(asked.engine, name="flower"),
        checkpoint=replace(asked.checkpoint, every=1),  # nodes remember no more than a few rounds to go back to
    )
    if asked.evaluation.metrics:
        raise HardyError("evaluation.metrics need all clients' images in one place; leave it out over a network.")
    clients = asked.network.clients
    if clients is None:
        clients = len(asked.faults.add_hostile_clients(federation(asked), asked.seed).clients)
    roll = Membership(grid=grid, experiment=asked.to_toml(), clients=clients)
    roll.profiles = {profile.client: profile for profile in profiles}
    roll.wait(asked.network.patience, grace=min(asked.network.deadline, 60.0))
    profiles = [roll.profiles[client] for client in range(clients)]
    data = placeholder_federation(profiles)

    def connect(plan: Plan, data: Federation) -> Flower:
        return Flower(
            plan,
            data,
            asked.training,
            device=torch.device("cpu") if asked.engine.device == "auto" else asked.engine.find_device(),
            dtype=torch.float64 if asked.engine.precision == "float64" else torch.float32,
            roll=roll,
            network=asked.network,
            token=token,
        )

    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        remember(folder, token, profiles)
    if begun:
        return resume(begun, method=method, model=model, data=data, network=connect, quiet=quiet)
    return fit(asked, method=method, model=model, data=data, network=connect, out=folder, quiet=quiet)
