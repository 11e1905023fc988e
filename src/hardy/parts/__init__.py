"""Parts that several papers share. Importing the package registers them."""

from hardy.parts import adversarial, budgets, compression, metrics, norms, objectives, optimisers
from hardy.parts.aggregators import base, memories, robust, server_updates, spectral, stages, trust

__all__ = [
    "adversarial",
    "base",
    "budgets",
    "compression",
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
