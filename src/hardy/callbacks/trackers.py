"""Trackers: every round's numbers in TensorBoard, MLflow, or Weights & Biases. All stay on this machine by default.

A resumed run is told again from its first round, so that no round is missing or there twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from hardy.callbacks.base import Callback
from hardy.core.flatten import flat_row
from hardy.errors import HardyError
from hardy.registry import part


def _require(module: str, extra: str) -> Any:
    """An optional package, or an error with the remedy."""
    try:
        return import_module(module)
    except ImportError:
        raise HardyError(f"{extra} is not installed. Remedy: pip install 'hardy-fl[{extra}]'.") from None


def require_tensorboard() -> Any:
    """TensorBoard's writer, or an error with the remedy."""
    return _require("torch.utils.tensorboard", "tensorboard").SummaryWriter


def write_tensorboard(folder: Path, rows: Iterable[dict[str, float]]) -> Any:
    """A writer of event files in a run folder, in place of earlier ones, that has these rows already."""
    writer_of, out = require_tensorboard(), folder / "tensorboard"
    for earlier in out.glob("events.out.tfevents.*"):
        earlier.unlink()
    writer = writer_of(str(out))
    for row in rows:
        _add_scalars(writer, row)
    return writer


def _add_scalars(writer: Any, row: dict[str, float]) -> None:
    for name, value in row.items():
        if name != "round":
            writer.add_scalar(name, value, row["round"])


@part("callback", name="tensorboard")
@dataclass(kw_only=True, unsafe_hash=True)
class TensorBoard(Callback):
    """Writes every number of a round as a scalar to DIR/tensorboard: `tensorboard --logdir runs`."""

    def check(self, run: Any) -> None:
        if run.folder is None:
            raise HardyError("tensorboard writes into the run folder, and this run has none. Give one: out=...")
        require_tensorboard()

    def on_start(self, run: Any) -> None:
        self._writer = write_tensorboard(run.folder, run.history)

    def on_round(self, run: Any, line: dict[str, Any]) -> None:
        _add_scalars(self._writer, flat_row(line))
        self._writer.flush()

    def on_end(self, run: Any) -> None:
        self._writer.close()


@part("callback", name="mlflow")
@dataclass(kw_only=True, unsafe_hash=True)
class MLflow(Callback):
    """Logs every number of a round to MLflow: `mlflow ui --backend-store-uri sqlite:///DIR/mlflow.db`."""

    tracking: str | None = None
    """address of a tracking server; absent: the file mlflow.db in the run folder, or here if there is none"""
    experiment: str = "hardy"
    """MLflow's word for a group of runs"""

    def check(self, run: Any) -> None:
        _require("mlflow", "mlflow")

    def on_start(self, run: Any) -> None:
        mlflow = self._mlflow = _require("mlflow", "mlflow")
        mlflow.set_tracking_uri(self.tracking or f"sqlite:///{(run.folder or Path()).absolute() / 'mlflow.db'}")
        mlflow.set_experiment(self.experiment)
        mlflow.start_run(run_name=run.experiment.name)
        mlflow.log_params(_settings(run))
        for row in run.history:
            mlflow.log_metrics(row, step=int(row["round"]))

    def on_round(self, run: Any, line: dict[str, Any]) -> None:
        self._mlflow.log_metrics(flat_row(line), step=line["round"])

    def on_end(self, run: Any) -> None:
        self._mlflow.end_run()


@part("callback", name="wandb")
@dataclass(kw_only=True, unsafe_hash=True)
class WeightsAndBiases(Callback):
    """Logs every number of a round to Weights & Biases; offline, for `wandb sync`, unless asked otherwise."""

    project: str = "hardy"
    """Weights & Biases' word for a group of runs"""
    mode: Literal["offline", "online"] = "offline"
    """offline: files in the run folder, for `wandb sync`"""

    def check(self, run: Any) -> None:
        _require("wandb", "wandb")

    def on_start(self, run: Any) -> None:
        self._run = _require("wandb", "wandb").init(
            project=self.project,
            name=run.experiment.name,
            mode=self.mode,
            dir=str(run.folder or "."),
            config=_settings(run),
        )
        for row in run.history:
            self._run.log(row, step=int(row["round"]))

    def on_round(self, run: Any, line: dict[str, Any]) -> None:
        self._run.log(flat_row(line), step=line["round"])

    def on_end(self, run: Any) -> None:
        self._run.summary.update(flat_row(run.summary()))
        self._run.finish()


def _settings(run: Any) -> dict[str, Any]:
    """What distinguishes a run from others."""
    chosen = run.experiment
    return {
        "method": run.engine.plan.method.name,
        "model": str(chosen.model),
        "data": str(chosen.data.source),
        "clients": len(run.engine.data.clients),
        "rounds": chosen.rounds,
        "seed": chosen.seed,
        "rate": chosen.training.rate,
        "batch": chosen.training.batch,
    }


tensorboard, mlflow, wandb = TensorBoard, MLflow, WeightsAndBiases
