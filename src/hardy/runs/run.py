"""What a run is: a federation at some round, and its running totals."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from hardy.deploy import personalise as afterwards
from hardy.deploy.personalise import Estimate
from hardy.config import Experiment
from hardy.engines import Engine
from hardy.models.count import parameters
from hardy.core.net import Mixture
from hardy.core.protocols import Objective
from hardy.deploy.predictor import Predictor
from hardy.core.server import Server
from hardy.core.state import ServerState, versions


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
    best: dict[str, Any] | None = None
    """the best round on validation rows, its accuracy there (under the attack of `select`), and on clean test rows"""

    def add(self, line: dict[str, Any]) -> None:
        for name in ("seconds", "bytes_up", "bytes_down", "macs"):
            setattr(self, name, getattr(self, name) + line[name])
        for reason in line["lost"].values():
            kind = reason.partition(":")[0]
            self.lost[kind] = self.lost.get(kind, 0) + 1


@dataclass(kw_only=True)
class Run:
    """A federation at some round: what `fit`, `resume` and `load` return."""

    experiment: Experiment
    server: Server
    engine: Engine
    state: ServerState
    figures: RunTotals
    folder: Path | None = None
    robust: dict[str, Any] = field(default_factory=dict)
    """accuracy by threat, where the experiment asks for it"""
    counted: dict[Objective, int] = field(default_factory=dict, repr=False)
    """multiply-accumulates of one image's way through the networks of an objective"""

    def network_for_new_client(
        self, statistics: Estimate, *, domain: str | None = None, images: Tensor | NDArray[Any] | None = None
    ) -> Mixture:
        """A network for somebody who never took part: net(x, branch=...) gives the logits of images in [0, 1].

        Where clients keep their norms, it gets their average ("average"), over all of them or over one domain's; or
        ("images") that with clean statistics measured on images of its own, uint8 or in [0, 1], [N, C, H, W]. The
        adversarial branch is averaged over clients of kind AT, or is what the norm gives to a client of kind ST.
        """
        return afterwards.network_for_new_client(self, statistics, domain=domain, images=images)

    def customise(self, *, width: float = 1.0, robustness: float | None = None, client: int | None = None) -> Predictor:
        """The trained network at a width and a robustness (λ); both can be changed again in place. Where clients have
        networks of their own, of one client."""
        return Predictor(self, width=width, robustness=robustness, client=client)

    def fine_tune(self, *, steps: int, freeze: int = 0, rate: float | None = None) -> "Run":
        """A run in which every client went on alone for so many steps of its own objective, with the first `freeze`
        layers held; the rate is training.rate unless given. This run stays as it is."""
        return afterwards.fine_tune(self, steps=steps, freeze=freeze, rate=rate)

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
            "best": figures.best,
            "parameters": parameters(plan.model),
            "engine": self.engine.name,
            "device": _device_name(self.engine.device),
            "seed": self.experiment.seed,
            "lost": figures.lost,
            "versions": versions(),
        }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
