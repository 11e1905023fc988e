"""A site's own network: the shared tensors of the last evaluation joined with what the site kept to itself.

A node keeps them whenever it is asked to evaluate, the last round included, so that the site has its network when a run
is over, with the figures it has measured.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from hardy import config
from hardy.core.engine import DataPart, Question
from hardy.core.files import disk, write_atomic
from hardy.core.method import BuildModel, Method
from hardy.core.server import Server
from hardy.core.state import ServerState
from hardy.core.store import MemoryStore
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.evaluation import serving
from hardy.evaluation.measure import LocalMeasure
from hardy.flower.node import Given, Node
from hardy.parts.metrics import to_metrics
from hardy.runs.checkpoint import load_tensors, save_tensors
from hardy.runs.run import Run, RunTotals

NETWORK = "network"
"""folder beside a client's private tensors"""


def keep_network(
    folder: Path, node: Node, state: ServerState, figures: dict[str, float], settings: dict[str, Any]
) -> None:
    """Writes what a client was asked to evaluate, and what it found. Figures of one round are added up."""
    values = {
        **{f"shared/{name}": value for name, value in state.shared.items()},
        **{f"reported/{name}": value for name, value in state.reported.items()},
        **{f"private/{name}": value for name, value in node.engine.store.items()},
    }
    found, _ = load_tensors(folder / NETWORK)
    before = found[0]["figures"] if found and found[0]["round"] == state.round else {}
    record = {
        "experiment": node.text.splitlines(),  # lines: a sealed file holds printable words only
        "settings": settings,
        "figures": {**before, **figures},
    }
    save_tensors(folder / NETWORK, state.round, values, record, keep=1)


@dataclass(frozen=True)
class SiteModel:
    """A site's network after a run over a network, and what its node measured."""

    run: Run
    """of this one client, whose index in it is 0"""
    client: int
    figures: dict[str, float]
    """accuracy by question, as the node measured it: test, validation, test/pgd-20, ..."""

    def evaluate(
        self, threats: Sequence[str] = (), part: DataPart = "test", metrics: str | Sequence[Any] = ()
    ) -> dict[str, float]:
        """The share of its own rows that the network classifies rightly, and metrics, clean and under each threat."""
        figures = (None, *to_metrics(metrics))
        asked = [Question(part, threat, metric) for threat in ("", *threats) for metric in figures]
        engine = self.run.needs_local("hardy site evaluate")
        found = LocalMeasure(engine).measure(self.run.state, asked, self.run.branches)
        return {str(question): value for question, (value,) in zip(asked, found, strict=True) if value is not None}

    def export(self, out: Path, *, width: float = 1.0, robustness: float | None = None) -> Path:
        """Writes ONNX files with a manifest, whose path is returned."""
        manifest = self.run.export(out, width=width, robustness=robustness, client=0)
        found = json.loads(manifest.read_text("utf-8"))
        found |= {"client": self.client, "figures": self.figures}
        write_atomic(manifest, json.dumps(found, indent=1).encode())
        return manifest

    def state_dict(self) -> Tensors:
        """The tensors of the whole network by name; of several bases, those of base B are under baseB."""
        served = serving.serve(self.run.engine.plan, self.run.served, self.run.own, rounds=self.run.state.round)
        bases = served.bases(0)
        if len(bases) == 1:
            return bases[0]
        return {f"base{n}.{name}": value for n, base in enumerate(bases, 1) for name, value in base.items()}

    def save(self, out: Path) -> None:
        """Writes the state_dict as safetensors."""
        with disk(str(out)):
            out.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: value.contiguous().cpu() for name, value in self.state_dict().items()}, str(out))


def site_runs(state: Path) -> dict[str, Path]:
    """Runs of which a node's state folder holds a network, as TOKEN/client-N, the newest last."""
    found = [path.parent for path in state.glob(f"*/client-*/{NETWORK}") if any(path.glob("round-*"))]
    found.sort(key=lambda path: path.stat().st_mtime)
    if not found:
        raise HardyError(
            f"{state} holds no network: it is not the --state of a node, or the node was never asked to evaluate. The "
            "last round of a run always is."
        )
    return {f"{path.parent.name}/{path.name}": path for path in found}


def load_site(
    state: Path, run: str | None = None, *, method: Method | None = None, model: BuildModel | None = None
) -> SiteModel:
    """A site's network of a run, by default of the newest; a method or a model of the app's own are given again."""
    runs = site_runs(state)
    if run is not None and run not in runs:
        raise HardyError(f"--run is {run!r}; {state} holds {', '.join(runs)}.")
    folder = runs[run] if run else list(runs.values())[-1]
    found, remarks = load_tensors(folder / NETWORK)
    if found is None:
        raise HardyError(f"the network in {folder} cannot be read: {' '.join(remarks)}")
    record, flat = found
    settings = tuple(sorted(record["settings"].items()))
    node = Node("\n".join(record["experiment"]), settings, Given(method=method, model=model))
    groups: dict[str, Tensors] = {"shared": {}, "reported": {}, "private": {}}
    for key, value in flat.items():
        group, _, name = key.partition("/")
        groups[group][name] = value
    engine, chosen = node.engine, node.chosen
    engine.store = engine.cast(groups["private"])
    held = ServerState(
        round=record["round"],
        shared=engine.cast(groups["shared"]),
        reported=MemoryStore(engine.cast(groups["reported"])),
        memory={},
    )
    here = replace(chosen, engine=replace(chosen.engine, name="sequential"), network=config.NetworkChoice())
    server = Server(plan=engine.plan, clients=engine.data.clients, seed=chosen.seed, training=chosen.training)
    made = Run(
        experiment=here, server=server, engine=engine, measures=LocalMeasure(engine), state=held, figures=RunTotals()
    )
    return SiteModel(made, node.number, record["figures"])
