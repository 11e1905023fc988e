"""FedEnsemble: every client trains one of several models a round, and all of them answer together.

Shi et al., Fed-ensemble: Improving Generalization through Model Ensembling in Federated Learning, 2021, Algorithm 1.

K models · an age is K rounds
1. At the start of an age every client draws an order of the K models.
2. In a round it trains the next model of its order, so that it meets each of them once an age.
3. The server averages each model over the clients that trained it.
4. The mean of all models' logits answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hardy.core import random
from hardy.core.federation import Client
from hardy.core.messages import Slot
from hardy.core.method import Method
from hardy.core.protocols import Norm, Objective, Optimiser
from hardy.errors import HardyError
from hardy.parts.budgets import Mixed
from hardy.parts.norms import batch
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd
from hardy.registry import part


@part("budget")
@dataclass(frozen=True, kw_only=True)
class Turns(Mixed):
    """Each client trains one model per round, and every model once in as many rounds as there are models."""

    models: int = 4
    """K, networks that are trained in turn"""

    def __post_init__(self) -> None:
        if self.models < 1:
            raise HardyError(f"turns takes 1 model or more; it got {self.models}.")

    @property
    def unit(self) -> float:
        return 1 / self.models

    def assign(self, round_number: int, cohort: Sequence[int], clients: Sequence[Client], seed: int) -> list[Slot]:
        age, turn = divmod(round_number, self.models)
        orders = {client: random.stream(seed, age, client, "turns").permutation(self.models) for client in cohort}
        return [Slot(client, int(order[turn])) for client, order in orders.items()]


turns = Turns


@part("method")
def fed_ensemble(
    *,
    models: int = 4,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """Several models trained in turns, served by the mean of their logits; models is K."""
    budget = turns(models=models)
    return Method(name="fed_ensemble", norm=norm, objective=objective, optimiser=optimiser, budget=budget)


__all__ = ["fed_ensemble", "turns"]
