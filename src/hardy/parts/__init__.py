"""Parts that several papers share. Importing the package registers them."""

from hardy.parts import adversarial, budgets, compression, norms, objectives
from hardy.parts.aggregators import base, robust, stages

__all__ = ["adversarial", "base", "budgets", "compression", "norms", "objectives", "robust", "stages"]
