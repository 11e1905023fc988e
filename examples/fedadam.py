"""FedAdam, written as a user would: the server steps along the round's change with Adam (Reddi et al., ICLR 2021)."""

from dataclasses import dataclass

import torch

import hardy
from hardy.parts.aggregators.base import ServerUpdate, pipeline


@dataclass(frozen=True, kw_only=True)
class MyAdam(ServerUpdate):
    """m ← β₁ m + (1 − β₁) Δ, v ← β₂ v + (1 − β₂) Δ², x ← x + η m / (√v + τ). It sees no BatchNorm statistics."""

    rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    adaptivity: float = 1e-3

    def memory(self, shared):
        return {f"{moment}.{n}": torch.zeros_like(x) for moment in "mv" for n, x in shared.items()}

    def apply(self, before, after, memory):
        shared, kept = {}, {}
        for n, x in before.items():
            delta = after[n] - x
            m = kept[f"m.{n}"] = self.beta1 * memory[f"m.{n}"] + (1 - self.beta1) * delta
            v = kept[f"v.{n}"] = self.beta2 * memory[f"v.{n}"] + (1 - self.beta2) * delta**2
            shared[n] = x + self.rate * m / (v.sqrt() + self.adaptivity)
        return shared, kept


method = hardy.papers.fedavg().replace(name="my fedadam", aggregator=pipeline(post=(MyAdam(),)))

if __name__ == "__main__":
    run = hardy.fit(hardy.read("demo", ["rounds=3"]), method=method)
    print(f"{run.summary()['standard_accuracy']['mean']:.1%}")
