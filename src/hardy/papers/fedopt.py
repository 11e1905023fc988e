"""FedOpt: the server treats the round's change as a gradient, and takes a step of its own optimiser along it.

Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2 (FedAdagrad, FedAdam, FedYogi).
Hsu et al., Measuring the Effects of Non-Identical Data Distribution, arXiv 2019 (FedAvgM).

x server weights · x_i client weights · η server rate · β₁, β₂ decay of the moments · τ adaptivity
1. Clients train as in FedAvg and send x_i.
2. Δ = mean of x_i − x.                                                   (lines 9, 10)
3. m ← β₁ m + (1 − β₁) Δ; v by Adagrad, Adam or Yogi.                      (lines 11–14)
4. x ← x + η m / (√v + τ).                                                (line 15)
BatchNorm's statistics are averaged plainly: a step of Adam could make a variance negative.
"""

from hardy.core.method import Method
from hardy.core.protocols import Norm, Objective, Optimiser
from hardy.papers.fedavg import fedavg
from hardy.parts.aggregators.base import ServerUpdate, pipeline
from hardy.parts.aggregators.server_updates import server_adagrad, server_adam, server_momentum, server_yogi
from hardy.parts.norms import batch
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd
from hardy.registry import part


def _fedopt(name: str, update: ServerUpdate, norm: Norm, objective: Objective, optimiser: Optimiser) -> Method:
    made = fedavg(norm=norm, objective=objective, optimiser=optimiser)
    return made.replace(name=name, aggregator=pipeline(post=(update,)))


@part("method")
def fedavgm(
    *,
    rate: float = 1.0,
    momentum: float = 0.9,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg with momentum on the server; rate is η, momentum β."""
    return _fedopt("fedavgm", server_momentum(rate=rate, momentum=momentum), norm, objective, optimiser)


@part("method")
def fedadam(
    *,
    rate: float = 0.01,
    adaptivity: float = 1e-3,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg with Adam on the server; rate is η, adaptivity τ."""
    return _fedopt("fedadam", server_adam(rate=rate, adaptivity=adaptivity), norm, objective, optimiser)


@part("method")
def fedyogi(
    *,
    rate: float = 0.01,
    adaptivity: float = 1e-3,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg with Yogi on the server; rate is η, adaptivity τ."""
    return _fedopt("fedyogi", server_yogi(rate=rate, adaptivity=adaptivity), norm, objective, optimiser)


@part("method")
def fedadagrad(
    *,
    rate: float = 0.01,
    adaptivity: float = 1e-3,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg with Adagrad on the server; rate is η, adaptivity τ."""
    return _fedopt("fedadagrad", server_adagrad(rate=rate, adaptivity=adaptivity), norm, objective, optimiser)


__all__ = ["fedadagrad", "fedadam", "fedavgm", "fedyogi"]
