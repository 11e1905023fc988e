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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hardy import config
from hardy.config import Experiment
from hardy.core.federation import Federation
from hardy.core.files import disk, write_atomic
from hardy.core.method import Method, Plan
from hardy.errors import HardyError
from hardy.flower import wire
from hardy.flower.audit import AUDIT, Audit
from hardy.flower.deployment import NODES, SITE
from hardy.flower.membership import Membership
from hardy.flower.memory import Memory
from hardy.flower.network_engine import Flower
from hardy.flower.node import Given, Node, allowed_code, node
from hardy.flower.proxy import bell, ring
from hardy.flower.secure_engine import SecureFlower, refuse_without_sums
from hardy.flower.secure_node import train_or_mask
from hardy.runs.api import fit, resume
from hardy.runs.networks import OwnModel
from hardy.runs.prepare import federation
from hardy.runs.profiles import placeholder_federation, remember, remembered
from hardy.runs.run import Run
from hardy.user_code import SERVER

_OUTCOME = ".outcome.json"
_NO_PROXY = (
    "this {what} was not started by `hardy deploy {command}`: its port would answer to anybody who reaches it. See "
    "docs/flower.md."
)
_LOG = logging.getLogger("flwr")


def server_app(
    source: str | Path, *, out: str | Path | None = None, method: Method | None = None, model: OwnModel | None = None
) -> Any:
    """A ServerApp that runs an experiment (a TOML file or a bundled name) to its end, or goes on where it stopped.

    The run's configuration may name the run folder (`out`). A method or a model given as objects take the place of the
    names in the experiment; the client app must be given the same.
    """
    from flwr.serverapp import ServerApp

    app = ServerApp()

    def main(grid: Any, context: Any) -> None:
        _end_with_parent()
        if NODES not in os.environ:
            raise HardyError(_NO_PROXY.format(what="SuperLink", command="server"))
        folder = context.run_config.get("out") or out
        if not folder:
            raise HardyError("the run has no folder; give one: flwr run APP --run-config 'out=\"/data/runs/first\"'.")
        with _logged(Path(folder)):
            try:
                asked = config.read(str(source), check=method is None, allow=SERVER)
                run = run_server(asked, grid, Path(folder), method=method, model=model, quiet=True)
            except Exception as error:
                _LOG.exception("the run ended")
                note(Path(folder), run=str(context.run_id), error=str(error) or type(error).__name__)
                raise
            _LOG.info("%s", _words(run))
            note(Path(folder), run=str(context.run_id), error=None)

    app.main()(main)
    return app


def _words(run: Run) -> str:
    """A finished run for whoever follows the log (`flwr run --stream`); `hardy deploy run` prints its table."""
    said = run.summary()
    figures = {"accuracy": said["standard_accuracy"], **said["robust_accuracy"]}
    lines = [
        f"{name}: mean {found['mean']:.1%}, worst client {found['worst_client']:.1%}"
        for name, found in figures.items()
        if found["mean"] is not None
    ]
    return "\n".join([f"{said['name']}: {said['method']}, {said['rounds']} rounds, in {run.folder}", *lines])


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
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        found = json.loads((folder / _OUTCOME).read_text("utf-8"))
        if found["run"] == run:
            return str(found["error"] or "")
    return None


def client_app(
    source: str | Path | None = None,
    *,
    method: Method | None = None,
    model: OwnModel | None = None,
    data: Federation | None = None,
) -> Any:
    """A ClientApp: a node that introduces itself, trains and evaluates, with what its own configuration says.

    `source` is the experiment that the site agrees to with the app; a server that asks for another is not answered.
    Without it the server chooses, which only a test in one process may do.
    """
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app, given = ClientApp(), Given(method=method, model=model, data=data)

    def who(message: Any, context: Any) -> tuple[Node, Memory]:
        asked = wire.settings(message.content)
        text = str(asked["experiment"])
        if source is None and SITE in os.environ:
            raise HardyError("client_app() names no experiment, so the server could ask for any; pass experiment.toml.")
        if source is not None:
            if SITE not in os.environ:
                raise HardyError(_NO_PROXY.format(what="SuperNode", command="node"))
            allow = allowed_code(context.node_config)
            agreed = for_network(config.read(str(source), check=method is None, allow=allow)).to_toml()
            if differences := config.differing_keys(agreed, text):
                raise HardyError(
                    f"the server asks for another experiment than the app this site agreed to: {differences[0]}. Send "
                    "the site the new app."
                )
            text = agreed
        me = node(text, tuple(sorted(context.node_config.items())), given)
        if "client" in asked and int(asked["client"]) != me.number:
            raise HardyError(f"a message for client {asked['client']} came to client {me.number}; it is not answered.")
        return me, Memory(me.folder, str(asked.get("token", "none")), me.number)

    def answering(answer: Callable[[Node, Any, Memory], Any]) -> Callable[[Any, Any], Any]:
        def handle(message: Any, context: Any) -> Any:
            audit = Audit(Path(folder) / AUDIT if (folder := os.environ.get(SITE)) else None)
            about = {"run": str(context.run_id), "asked": message.metadata.message_type}
            about |= {k: v for k, v in wire.settings(message.content).items() if k in ("round", "client", "threats")}
            try:
                me, memory = who(message, context)
                memory.scratch = context.state
                content = answer(me, message.content, memory)
            except HardyError as error:
                audit.write("not answered", **about, why=str(error))
                raise
            except Exception as error:  # its words would go to the server, and might quote what is private
                _LOG.exception("the message is not answered")
                audit.write("not answered", **about, why=repr(error))
                raise HardyError(f"{type(error).__name__}; the node's own log says more.") from None
            audit.write("sent", **about, sent=wire.contents(content))
            return Message(content, reply_to=message)

        return handle

    app.query()(answering(lambda me, content, memory: wire.message({}, profile=me.profile.words())))
    app.train()(answering(train_or_mask))
    app.evaluate()(answering(Node.evaluate))
    return app


def for_network(asked: Experiment) -> Experiment:
    """The experiment as it is run over a network, and as every message names it."""
    return replace(
        asked,
        engine=replace(asked.engine, name="flower"),
        checkpoint=replace(asked.checkpoint, every=1),  # nodes remember no more than a few rounds to go back to
    )


def _certified() -> Callable[[], dict[int, int]] | None:
    """Which node has shown which client's certificate, as the server's proxy keeps it."""
    path = os.environ.get(NODES)
    if path is None:
        return None  # all clients are in this process

    def read() -> dict[int, int]:
        return {int(client): int(node) for client, node in json.loads(Path(path).read_text("utf-8")).items()}

    return read


def _bells() -> Callable[[int], None]:
    """Rings for a node at the server's end of the network."""
    path = os.environ.get(NODES)
    return (lambda node: None) if path is None else partial(ring, Path(path))


def _heard() -> Callable[[int], int] | None:
    """When a node has last sent something, as the server's end of the network has seen."""
    path = os.environ.get(NODES)
    return None if path is None else lambda node: bell(Path(path), f"from-{node}")


def _refuse_changes(folder: Path, asked: Experiment) -> None:
    """A run goes on with the experiment it began with."""
    before = (folder / "config.toml").read_text("utf-8")
    if differences := config.differing_keys(before, asked.to_toml()):
        more = f" (and {len(differences) - 3} more keys)" if len(differences) > 3 else ""
        raise HardyError(
            f"{folder} holds a run of another experiment: {'; '.join(differences[:3])}{more}. Give the new one a "
            "folder of its own (--out of `hardy deploy app`), or run the app that the folder was begun with."
        )


def run_server(
    asked: Experiment,
    grid: Any,
    folder: Path | None,
    *,
    method: Method | None = None,
    model: OwnModel | None = None,
    quiet: bool = False,
) -> Run:
    """Calls the roll, then runs or resumes the experiment over the grid. A checkpoint is written every round."""
    begun = folder if folder is not None and (folder / "config.toml").is_file() else None
    token, profiles = remembered(begun) if begun else (secrets.token_hex(8), [])
    asked = for_network(asked)
    if begun:
        _refuse_changes(
            begun,
            replace(
                asked,
                method=config.FROM_PYTHON if method else asked.method,
                model=config.FROM_PYTHON if model else asked.model,
            ),
        )
    if asked.evaluation.diagnosis:
        raise HardyError("evaluation.diagnosis needs clients' images in one place; leave it out over a network.")
    clients = asked.network.clients
    if clients is None:
        clients = len(asked.faults.add_hostile_clients(federation(asked), asked.seed).clients)
    most = asked.admission.most_rows
    roll = Membership(
        grid=grid,
        experiment=asked.to_toml(),
        clients=clients,
        certified=_certified(),
        most_rows=most,
        ring=_bells(),
        heard=_heard(),
    )
    roll.profiles = {profile.client: profile for profile in profiles}
    roll.wait(asked.network.patience, grace=min(asked.network.deadline, 60.0))
    profiles = [roll.profiles[client] for client in range(clients)]
    data = placeholder_federation(profiles)

    def connect(plan: Plan, data: Federation) -> Flower:
        if asked.network.secure:
            refuse_without_sums(asked, plan, len(data.clients))
        return (SecureFlower if asked.network.secure else Flower)(
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
