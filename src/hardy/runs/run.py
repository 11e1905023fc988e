"""What a run is: a federation at some round, and its running totals."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hardy.config import Experiment
from hardy.core.engine import Branches, Measures, RunEngine
from hardy.core.files import versions
from hardy.core.flatten import flat_row
from hardy.core.messages import Slot
from hardy.core.net import Mixture
from hardy.core.protocols import Objective
from hardy.core.server import Server
from hardy.core.spending import privacy_spent
from hardy.core.state import ServerState
from hardy.core.tensors import Tensors
from hardy.deploy import personalise
from hardy.deploy.export import export, require_onnx
from hardy.deploy.personalise import Estimate
from hardy.deploy.plain_module import plain_module
from hardy.deploy.predictor import Predictor
from hardy.engines import Engine
from hardy.errors import HardyError
from hardy.evaluation.measure import LocalMeasure, order_of_bases, training_images
from hardy.models.count import parameters
from hardy.report.stored_run import metrics_lines


@dataclass(kw_only=True)
class RunTotals:
    """A run's running totals; saved with every checkpoint."""

    seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    macs: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    latest: dict[str, Any] | None = None
    """standard accuracy at the last evaluation"""
    metrics: dict[str, Any] = field(default_factory=dict)
    """and the other metrics, by name"""
    stopped: str | None = None
    """why a callback ended the run before its last round"""
    best: dict[str, Any] | None = None
    """the best round on validation rows, its accuracy there (under the attack of `select`), and on clean test rows"""

    clock_seconds: float = 0.0
    """of the simulation's clock"""
    reached: dict[str, Any] | None = None
    """when the accuracy of clock.target was measured first"""

    def add(self, line: dict[str, Any]) -> None:
        for name in ("seconds", "bytes_up", "bytes_down", "macs"):
            setattr(self, name, getattr(self, name) + line[name])
        self.clock_seconds += line.get("clock_seconds", 0.0)
        for reason in line["lost"].values():
            kind = reason.partition(":")[0]
            self.lost[kind] = self.lost.get(kind, 0) + 1


@dataclass(kw_only=True)
class Run:
    """A federation at some round: what `fit`, `resume` and `load` return."""

    experiment: Experiment
    server: Server
    engine: RunEngine
    measures: Measures
    """who measures the clients' networks: this machine, or the nodes of a network"""
    state: ServerState
    figures: RunTotals
    folder: Path | None = None
    robust: dict[str, Any] = field(default_factory=dict)
    """accuracy of the state's round by threat, where the experiment asks for it"""
    robust_metrics: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    """and the other metrics, by threat and name"""
    last_line: dict[str, Any] = field(default_factory=dict, repr=False)
    """what metrics.jsonl says of the last round"""
    rows: list[dict[str, float]] | None = field(default_factory=list, repr=False)
    """the rounds so far, for `history`; None: not read yet"""
    counted: dict[Objective, int] = field(default_factory=dict, repr=False)
    """multiply-accumulates of one image's way through the networks of an objective"""

    def __repr__(self) -> str:
        plan, latest, engine = self.engine.plan, self.figures.latest or {}, self.engine
        lines = [
            f"Run {self.experiment.name!r}: {plan.method.name} on {type(plan.model).__name__}",
            f"  {self.engine.data!r}",
            f"  round {self.state.round} of {self.experiment.rounds}, {engine.name} engine on {engine.device}",
        ]
        if latest.get("mean") is not None:
            scores = {"accuracy": latest, **self.robust}
            shown = [f"{name} {s['mean']:.1%}" for name, s in scores.items() if s.get("mean") is not None]
            worst = f"worst client {latest['worst_client']:.1%}"
            lines.append(f"  {', '.join([*shown[:5], worst])} (round {latest['round']})")
        if self.folder is not None:
            lines.append(f"  {self.folder}")
        return "\n".join(lines)

    @property
    def history(self) -> list[dict[str, float]]:
        """A flat row of numbers for each round so far, such as row["standard_accuracy/mean"]; `pandas.DataFrame` takes
        it as it is."""
        if self.rows is None:
            assert self.folder is not None
            path = self.folder / "metrics.jsonl"
            lines = metrics_lines(path.read_bytes() if path.exists() else b"", path)
            self.rows = [flat_row(line) for line in lines if line["round"] <= self.state.round]
        return self.rows

    @property
    def local(self) -> Engine | None:
        """The engine where it runs on this machine; None: images, labels and private tensors are elsewhere."""
        return self.engine if isinstance(self.engine, Engine) else None

    def needs_local(self, what: str) -> Engine:
        """The engine on this machine; an error if the clients are elsewhere."""
        if self.local is None:
            raise HardyError(f"{what} needs the clients' images, which are not on this machine; let the nodes measure.")
        return self.local

    def needs_everyone(self, what: str) -> None:
        """An error if only some of the clients are measured."""
        if (data := self.engine.data).sample is not None:
            raise HardyError(
                f"{what} looks at all clients, and of the {len(data.clients):,} of this run {len(data.sample):,} are "
                "measured. Take a run of at most 10,000, or one client's network (customise with client)."
            )

    @property
    def local_measures(self) -> LocalMeasure:
        """Who measures the clients of this machine: this process, or its workers too."""
        if isinstance(self.measures, LocalMeasure):
            return self.measures
        return LocalMeasure(self.needs_local("an evaluation"))

    @property
    def own(self) -> Tensors:
        """The clients' own tensors as far as they are on this machine, [C, B, ...]."""
        return {**self.state.reported, **self.engine.store}

    @property
    def served(self) -> Tensors:
        """The shared tensors that serve, [B, ...]: the server's, or an average of them that the aggregator keeps."""
        return self.engine.plan.aggregator.served(self.state.shared, self.state.memory)

    @property
    def branches(self) -> Branches:
        """The experiment's choice."""
        choice = self.experiment.evaluation
        return Branches(attack=choice.attack_branch, predict=choice.predict_branch)

    def network_for_new_client(
        self, statistics: Estimate, *, domain: str | None = None, images: Tensor | NDArray[Any] | None = None
    ) -> Mixture:
        """A network for somebody who never took part: net(x, branch=...) gives the logits of images in [0, 1].

        Where clients keep their norms, it gets their average ("average"), over all of them or over one domain's; or
        ("images") that with clean statistics measured on images of its own, uint8 or in [0, 1], [N, C, H, W]. The
        adversarial branch is averaged over clients of kind AT, or is what the norm gives to a client of kind ST.
        """
        self.needs_everyone("a network for a new client")
        return personalise.network_for_new_client(
            self.engine.plan,
            self.engine.data,
            self.served,
            self.own,
            statistics,
            reported=dict(self.state.reported),
            rounds=self.state.round,
            domain=domain,
            images=images,
            branch=self.branches.predict,
        )

    def customise(self, *, width: float = 1.0, robustness: float | None = None, client: int | None = None) -> Predictor:
        """The trained network at a width and a robustness (λ) as a torch module; both can be changed again in place.
        Where clients have networks of their own, of one client. Without a robustness it answers with the branch that
        evaluation predicts with."""
        engine = self.local
        return Predictor(
            self.engine.plan,
            self.engine.data,
            self.served,
            self._own_of(client),
            rounds=self.state.round,
            client=client,
            width=width,
            robustness=robustness,
            branch=self.branches.predict,
            order=order_of_bases(engine, self.state, self.branches.predict) if engine else None,
            device=self.engine.device,
            images=(lambda client: training_images(engine, client)) if engine else None,
        )

    def _own_of(self, client: int | None) -> Tensors:
        """All clients' own tensors, or of very many the one's, [1, B, ...]."""
        if self.engine.data.sample is None or client is None or not 0 <= client < len(self.engine.data.clients):
            return self.own if self.engine.data.sample is None else dict.fromkeys(self._own_names, torch.empty(0))
        slots = [Slot(client, base) for base in range(self.engine.plan.method.budget.bases)]
        rows = {**self.state.reported.read(slots), **self.engine.store.read(slots)}
        return {name: value[None] for name, value in rows.items()}

    @property
    def _own_names(self) -> list[str]:
        return [*self.state.reported, *self.engine.store]

    def module(self, *, client: int | None = None, width: float = 1.0) -> nn.Module:
        """The trained network as a plain torch module: your own class where it was adopted, with a state_dict that
        loads into that class; a network of Hardy's with torch's own layers. It takes images in [0, 1]."""
        return plain_module(self.customise(width=width, client=client))

    def fine_tune(self, *, steps: int, freeze: int = 0, rate: float | None = None) -> "Run":
        """A run in which every client went on alone for so many steps of its own objective, with the first `freeze`
        layers held; the rate is training.rate unless given. This run stays as it is."""
        engine = self.needs_local("fine-tuning")
        self.needs_everyone("fine-tuning")
        tuned, state = personalise.fine_tune(engine, self.state, steps=steps, freeze=freeze, rate=rate)
        server = replace(self.server, plan=tuned.plan)
        return replace(
            self,
            server=server,
            engine=tuned,
            measures=LocalMeasure(tuned),
            state=state,
            folder=None,
            robust={},
            robust_metrics={},
        )

    def export(
        self,
        out: Path | str,
        *,
        width: float = 1.0,
        robustness: float | None = None,
        client: int | None = None,
        gradient: bool = False,
    ) -> Path:
        """Writes the network that `customise` gives as ONNX files with a manifest, whose path is returned; with
        `gradient`, also its gradient to the images."""
        from hardy.runs.evaluate import known_settings

        require_onnx()
        return export(
            self.customise(width=width, robustness=robustness, client=client),
            out,
            name=self.experiment.name,
            round_number=self.state.round,
            classes=self.engine.data.classes,
            settings=known_settings(self),
            gradient=gradient,
        )

    @property
    def _clock(self) -> dict[str, Any]:
        """Time by the simulation's clock, and when the target was reached."""
        assert self.server.clock is not None
        return {
            "seconds": self.figures.clock_seconds,
            "target": self.server.clock.choice.target,
            "reached": self.figures.reached,
        }

    def summary(self) -> dict[str, Any]:
        """What summary.json holds."""
        figures, plan = self.figures, self.engine.plan
        return {
            "name": self.experiment.name,
            "method": plan.method.name,
            "rounds": self.state.round,
            "seconds": figures.seconds,
            "bytes_up": figures.bytes_up,
            "bytes_down": figures.bytes_down,
            "macs": figures.macs,
            "standard_accuracy": figures.latest,
            "robust_accuracy": self.robust,
            "metrics": figures.metrics,
            "robust_metrics": self.robust_metrics,
            "privacy": privacy_spent(self.server, self.state.round),
            "best": figures.best,
            "stopped": figures.stopped,
            "classes": list(self.engine.data.classes),
            "parameters": parameters(plan.model),
            "engine": self.engine.name,
            "workers": self.experiment.engine.workers,
            "device": _device_name(self.engine.device),
            "seed": self.experiment.seed,
            "lost": figures.lost,
            **({"clock": self._clock} if self.server.clock else {}),
            **({"cohort_odds": asdict(odds)} if (odds := self.server.odds) else {}),
            "versions": versions(),
        }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
