"""MOON: a client's representation is pulled to that of the global network, and pushed from that of its own last one.

Li et al., Model-Contrastive Federated Learning, CVPR 2021, Algorithm 1.

z, z_g, z_p what stands before the classifier for an image: in the client's network, in the one it was sent, in the one
it had at the end of its last round · sim cosine · T temperature · μ strength
1. The server sends w.
2. A client steps on ℓ + μ ℓ_con with
   ℓ_con = −log [exp(sim(z, z_g)/T) / (exp(sim(z, z_g)/T) + exp(sim(z, z_p)/T))].                   (Eq. 3)
3. It keeps its network for the next round; in its first round there is no ℓ_con.
4. The server takes the mean.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hardy.core import random
from hardy.core.method import Method
from hardy.core.net import Net
from hardy.core.protocols import Batch, Norm, Objective, Optimiser
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.papers.fedavg import fedavg
from hardy.parts.norms import batch
from hardy.parts.objectives import Compared, cross_entropy
from hardy.parts.optimisers import sgd
from hardy.registry import part

_ROUNDS = "contrast.rounds"
"""private: how often the client has finished a round"""


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Contrastive(Compared):
    """Adds the model-contrastive loss on the client's images; the loss reported is without it. All three networks
    answer by running statistics."""

    strength: float = 1.0
    """μ, weight of the contrastive loss"""
    temperature: float = 0.5
    """T, by which likenesses are divided"""

    def __post_init__(self) -> None:
        if not self.strength >= 0 or not self.temperature > 0:
            raise HardyError(
                f"contrastive takes a strength (μ) of 0 or more and a temperature above 0; it got {self.strength} and "
                f"{self.temperature}."
            )

    def alone(self) -> Objective:
        return self.inner.alone()

    def kept(self, model: Tensors) -> Tensors:
        first = next(iter(model.values()))
        last = {f"previous.{name}": value.clone() for name, value in model.items()}
        return {**self.inner.kept(model), **last, _ROUNDS: first.new_zeros((), dtype=torch.int64)}

    def finish(self, private: Tensors, model: Tensors) -> Tensors:
        last = {name: model[name.removeprefix("previous.")] for name in private if name.startswith("previous.")}
        return {**self.inner.finish(private, model), **last, _ROUNDS: private[_ROUNDS] + 1}

    def apart(self, own: Net, sent: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        """ℓ_con (line 2)."""
        trained, buffers = (
            {n: private.get(f"previous.{n}", t) for n, t in held.items()} for held in (own.trained, own.buffers)
        )
        z = own.features(batch.x, branch=self.branch, key=random.fold(key, "contrast"))
        others = (one.features(batch.x, branch=self.branch) for one in (sent, own.on(trained, buffers)))
        likeness = torch.stack([F.cosine_similarity(z, other, -1) for other in others], -1)
        pulled = -(likeness / self.temperature).log_softmax(-1)[:, 0].mean()
        return pulled * (private[_ROUNDS] > 0)


contrastive = Contrastive


@part("method")
def moon(
    *,
    strength: float = 1.0,
    temperature: float = 0.5,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg with the model-contrastive loss.

    strength: μ, weight of the contrastive loss
    temperature: T, by which likenesses are divided
    """
    contrasted = contrastive(inner=objective, strength=strength, temperature=temperature)
    return fedavg(norm=norm, objective=contrasted, optimiser=optimiser).replace(name="moon")


__all__ = ["contrastive", "moon"]
