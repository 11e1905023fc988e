"""What happens around the rounds of a run: stopping early, and telling trackers."""

from hardy.callbacks.base import Callback, Stop
from hardy.callbacks.stopping import early_stopping
from hardy.callbacks.trackers import mlflow, tensorboard, wandb

__all__ = ["Callback", "Stop", "early_stopping", "mlflow", "tensorboard", "wandb"]
