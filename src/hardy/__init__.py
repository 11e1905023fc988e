"""Federated learning that holds: against adversarial inputs, shifted devices, weak hardware and hostile clients."""

import os

# Waiting threads must sleep, not spin: spinning makes a two-core machine with one busy core twenty times slower.
# Read by OpenMP when torch is loaded, so it stands before everything else.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from hardy import models, papers, parts
from hardy.config import Experiment, read
from hardy.core.method import Method
from hardy.core.training import Training
from hardy.data.array_sources import arrays
from hardy.data.splits import federate
from hardy.errors import HardyError
from hardy.runs.api import evaluate, fit, load, resume
from hardy.runs.run import Run
from hardy.version import VERSION as __version__

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
    "models",
    "papers",
    "parts",
    "read",
    "resume",
]
