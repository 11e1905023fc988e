"""FedGKD: the averaged network teaches each client's while it trains.

Yao et al., FedGKD: Toward Heterogeneous Federated Learning via Global Knowledge Distillation, IEEE Transactions on
Computers 2024 (arXiv:2107.00051), with a buffer of one global model.

f_g the network as it was sent · f the client's · γ weight of the teacher
1. The server sends w.
2. A client steps on ℓ + γ/2 · KL(f_g(x) ‖ f(x)).
3. The server takes the mean.
"""

from hardy.core.method import Method
from hardy.core.protocols import Norm, Objective, Optimiser
from hardy.papers.fedavg import fedavg
from hardy.parts.norms import batch
from hardy.parts.objectives import cross_entropy, distilled
from hardy.parts.optimisers import sgd
from hardy.registry import part


@part("method")
def fedgkd(
    *,
    strength: float = 0.2,
    temperature: float = 1.0,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg whose clients also learn from the network they were sent.

    strength: γ, weight of the teacher; the divergence counts γ/2
    temperature: T, by which both logits are divided
    """
    taught = distilled(inner=objective, strength=strength / 2, temperature=temperature)
    return fedavg(norm=norm, objective=taught, optimiser=optimiser).replace(name="fedgkd")


__all__ = ["fedgkd"]
