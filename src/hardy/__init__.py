"""Federated learning that holds: against adversarial inputs, shifted devices, weak hardware and hostile clients."""

import os

from hardy.version import VERSION as __version__

# Waiting threads must sleep, not spin: spinning makes a two-core machine with one busy core twenty times slower.
# Read by OpenMP when torch is loaded, so it is set before anything of Hardy can load it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Libraries that report usage or errors to their makers do not, unless the user says so: onnxruntime, MLflow, Hugging
# Face, Weights & Biases. Each reads its variable when it is imported. Flower's are in hardy.flower.
for _name, _value in (
    ("ORT_DISABLE_TELEMETRY", "1"),
    ("MLFLOW_DISABLE_TELEMETRY", "true"),
    ("HF_HUB_DISABLE_TELEMETRY", "1"),
    ("WANDB_ERROR_REPORTING", "false"),
):
    os.environ.setdefault(_name, _value)

TYPE_CHECKING = False  # without importing typing: whatever loads before the command line can be cut off by Ctrl-C
if TYPE_CHECKING:
    from hardy import models, papers, parts
    from hardy.config import Experiment, read
    from hardy.core.method import Method
    from hardy.core.training import Training
    from hardy.data.given import arrays
    from hardy.data.splits import federate
    from hardy.errors import HardyError
    from hardy.parts.metrics import metric
    from hardy.runs.api import evaluate, fit, load, resume
    from hardy.runs.run import Run
else:
    _MODULES = {
        "hardy.config": ("Experiment", "read"),
        "hardy.core.method": ("Method",),
        "hardy.core.training": ("Training",),
        "hardy.data.given": ("arrays",),
        "hardy.data.splits": ("federate",),
        "hardy.errors": ("HardyError",),
        "hardy.parts.metrics": ("metric",),
        "hardy.runs.api": ("evaluate", "fit", "load", "resume"),
        "hardy.runs.run": ("Run",),
    }
    _WHERE = {name: module for module, names in _MODULES.items() for name in names}

    def __getattr__(name: str) -> object:
        """Loads what is asked for, when it is asked for: torch takes seconds, and `hardy --help` needs none of it."""
        from importlib import import_module

        if name in _WHERE:
            value = getattr(import_module(_WHERE[name]), name)
        else:
            try:
                value = import_module(f"hardy.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"hardy.{name}":
                    raise
                raise AttributeError(f"module 'hardy' has no attribute {name!r}") from None
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "Experiment",
    "HardyError",
    "Method",
    "Run",
    "Training",
    "__version__",
    "arrays",
    "evaluate",
    "federate",
    "fit",
    "load",
    "metric",
    "models",
    "papers",
    "parts",
    "read",
    "resume",
]
