"""Clients that train with AdamW behind a clipped gradient, in any method: here FedBN."""

import hardy
from hardy.parts.optimisers import adamw, chain, clip

optimiser = chain(clip(norm=1.0), adamw(weight_decay=0.01))
method = hardy.papers.fedbn(optimiser=optimiser)
# the same in TOML: optimiser = { name = "chain", links = [{ name = "clip", norm = 1.0 }, { name = "adamw" }] }

if __name__ == "__main__":
    run = hardy.fit(hardy.read("demo", ["rounds=3", "training.rate=0.003"]), method=method)
    print(f"{run.summary()['standard_accuracy']['mean']:.1%}")
