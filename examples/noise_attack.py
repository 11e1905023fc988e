"""An attack of one's own: the worst of some random corners of the ball. It can train a network, and test one."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

import hardy
from hardy.attacks.base import Attack
from hardy.attacks.threats import Threat
from hardy.core import random
from hardy.parts.adversarial import adversarial


@dataclass(frozen=True, kw_only=True)
class RandomCorners(Attack):
    """Of so many draws x ± ε, the one with the largest loss."""

    epsilon: float = 8 / 255
    draws: int = 8

    @torch.no_grad()
    def perturb(self, forward, x, y, key):
        best, worst = x, F.cross_entropy(forward(x), y, reduction="none")
        for number in range(self.draws):
            signs = torch.where(random.uniform(random.fold(key, number), x.shape, x.dtype) < 0.5, -1.0, 1.0)
            tried = (x + self.epsilon * signs.to(x)).clamp(0.0, 1.0)
            loss = F.cross_entropy(forward(tried), y, reduction="none")
            best = torch.where((loss > worst).view(-1, 1, 1, 1), tried, best)
            worst = worst.maximum(loss)
        return best


if __name__ == "__main__":
    method = hardy.papers.fedbn(objective=adversarial(attack=RandomCorners(draws=2)))
    run = hardy.fit(hardy.read("demo", ["rounds=2"]), method=method)
    threat = Threat(name="random corners", attack=RandomCorners())
    print(hardy.evaluate(run, [threat], limit=20)["robust_accuracy"]["random corners"]["mean"])
