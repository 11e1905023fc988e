"""Parts that several papers share. Importing the package registers them."""

from hardy.parts import admission, adversarial, aggregation, budget, compression, mixing, norm, objective, robust

__all__ = ["admission", "adversarial", "aggregation", "budget", "compression", "mixing", "norm", "objective", "robust"]
