"""Parts that several papers share. Importing the package registers them."""

from hardy.parts import adversarial, budgets, compression, example_privacy, metrics, norms, objectives, optimisers
from hardy.parts.aggregators import (
    base,
    client_privacy,
    memories,
    robust,
    server_updates,
    spectral,
    stages,
    trust,
)

__all__ = [
    "adversarial",
    "base",
    "budgets",
    "client_privacy",
    "compression",
    "example_privacy",
    "memories",
    "metrics",
    "norms",
    "objectives",
    "optimisers",
    "robust",
    "server_updates",
    "spectral",
    "stages",
    "trust",
]
