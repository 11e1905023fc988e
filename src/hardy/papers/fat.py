"""Federated adversarial training: classic methods whose clients attack their own batches. The baselines of robust FL.

Zizzo et al., FAT: Federated Adversarial Training, arXiv 2020 (FATAvg).
Hong et al., Federated Robustness Propagation, AAAI 2023, §5 (FATProx, FATBN, FATAvg+DBN, FATMeta, Free AT).
Zhu et al., Combating Exacerbated Heterogeneity for Robust Models in Federated Learning, ICLR 2023 (FAT on Scaffold).

q share of the attacked images in the loss · x̃ the attacked x
1. The server sends w, as the method underneath does.
2. A client attacks each batch with its own weights and steps on (1 − q) CE(x) + q CE(x̃), with the method's own terms.
   One that cannot afford it (kind ST, where `data.adversarial` says who can) steps on CE(x).
3. The server aggregates as the method underneath does.
"""

from hardy.attacks.base import Attack
from hardy.attacks.gradient import pgd
from hardy.core.method import Method
from hardy.core.protocols import Norm, Objective, Optimiser
from hardy.papers.fedavg import fedavg, fedprox
from hardy.papers.fedbn import fedbn
from hardy.papers.per_fedavg import per_fedavg
from hardy.papers.scaffold import scaffold
from hardy.parts.adversarial import adversarial, by_kind, free
from hardy.parts.norms import batch, dual
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd
from hardy.registry import part


def where_affordable(attacking: Objective) -> Objective:
    """The objective for those who can afford it; standard training for the others."""
    return by_kind(AT=attacking, ST=cross_entropy())


@part("method")
def fatavg(*, attack: Attack = pgd(), mix: float = 0.5, optimiser: Optimiser = sgd()) -> Method:
    """FedAvg of adversarially trained clients; mix is q."""
    return fedavg(objective=where_affordable(adversarial(attack=attack, mix=mix)), optimiser=optimiser).replace(
        name="fatavg"
    )


@part("method")
def fatprox(
    *, strength: float = 0.01, attack: Attack = pgd(), mix: float = 0.5, optimiser: Optimiser = sgd()
) -> Method:
    """FedProx of adversarially trained clients; strength is μ."""
    objective = where_affordable(adversarial(attack=attack, mix=mix))
    return fedprox(strength=strength, objective=objective, optimiser=optimiser).replace(name="fatprox")


@part("method")
def fatbn(*, attack: Attack = pgd(), mix: float = 0.5, optimiser: Optimiser = sgd()) -> Method:
    """FedBN of adversarially trained clients: clean and attacked images share a client's BatchNorm."""
    return fedbn(objective=where_affordable(adversarial(attack=attack, mix=mix)), optimiser=optimiser).replace(
        name="fatbn"
    )


@part("method")
def fatscaffold(*, attack: Attack = pgd(), mix: float = 0.5, optimiser: Optimiser = sgd()) -> Method:
    """SCAFFOLD of adversarially trained clients."""
    return scaffold(objective=where_affordable(adversarial(attack=attack, mix=mix)), optimiser=optimiser).replace(
        name="fatscaffold"
    )


@part("method")
def fatmeta(*, rate: float = 0.02, attack: Attack = pgd(), mix: float = 0.5, optimiser: Optimiser = sgd()) -> Method:
    """First-order Per-FedAvg of adversarially trained clients; rate is α of the virtual step."""
    objective = where_affordable(adversarial(attack=attack, mix=mix))
    return per_fedavg(rate=rate, objective=objective, optimiser=optimiser).replace(name="fatmeta")


@part("method")
def fatavg_dbn(*, attack: Attack = pgd(), mix: float = 0.5, optimiser: Optimiser = sgd()) -> Method:
    """FATAvg with a dual BatchNorm: attacked images have statistics of their own, averaged like the clean ones."""
    objective = where_affordable(adversarial(attack=attack, mix=mix, branch="adversarial"))
    return fedavg(norm=dual(), objective=objective, optimiser=optimiser).replace(name="fatavg_dbn")


@part("method")
def fatfree(*, epsilon: float = 8 / 255, norm: Norm = batch(), optimiser: Optimiser = sgd()) -> Method:
    """FedAvg of clients that train by free adversarial training (norm local: FedBN); take it with training.replays."""
    return fedavg(norm=norm, objective=where_affordable(free(epsilon=epsilon)), optimiser=optimiser).replace(
        name="fatfree"
    )


__all__ = ["fatavg", "fatavg_dbn", "fatbn", "fatfree", "fatmeta", "fatprox", "fatscaffold", "where_affordable"]
