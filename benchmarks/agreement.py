"""Whether the engines agree on this machine: python benchmarks/agreement.py [METHOD ...]

Every registered method on six clients of unlike sizes, capacities and kinds, not all asked in a round; four rounds on
the sequential and on the vectorised engine, with steps captured where there is a GPU. Prints the largest difference of
all tensors: in float64, where rounding must be all of it, and in float32 after one round, where steps are fused.
"""

import inspect
import sys
from dataclasses import replace

import torch

import hardy
from engines import federation, provenance
from hardy.client import Training
from hardy.engines import EngineChoice
from hardy.models import tiny_cnn
from hardy.parts.budget import exponential, with_capacity
from hardy.registry import PARTS
from hardy.robustness.attacks import pgd
from hardy.server import Cohort

SHAPE, SIZES = (1, 12, 12), (40, 28, 48, 40, 20, 40)
LIMITS = {"float64": 1e-9, "float32": 1e-2}
"""in float32 an attack that takes signs tells rounding apart"""


def clients():
    data = federation(len(SIZES), max(SIZES), SHAPE)
    own = (
        replace(c, train=c.train[:n], kind="AT" if n == 40 else "ST") for c, n in zip(data.clients, SIZES, strict=True)
    )
    return with_capacity(replace(data, clients=tuple(own)), exponential(), seed=0)


def difference(name: str, precision: str, rounds: int) -> float:
    """The largest one between the engines, as a share of the largest value of a tensor where that is above 1."""
    make, found = PARTS["method"][name], []
    options = {"attack": pgd(steps=2)} if "attack" in inspect.signature(make).parameters else {}
    for engine in ("sequential", "vectorised"):
        chosen = hardy.Experiment(
            rounds=rounds,
            cohort=Cohort(fraction=0.8),
            training=Training(rate=0.05, momentum=0.5, weight_decay=1e-3, batch=8, epochs=2),
            engine=EngineChoice(name=engine, precision=precision),
        )
        model = lambda norm: tiny_cnn(norm=norm, shape=SHAPE, classes=10, width=0.25)  # noqa: E731
        run = hardy.fit(chosen, method=make(**options), model=model, data=clients(), quiet=True)
        held = {"s": run.state.shared, "r": run.state.reported, "m": run.state.memory, "p": run.engine.store}
        found.append({(place, n): t.double() for place, own in held.items() for n, t in own.items()})
    one, many = found
    return max(
        ((one[n] - many[n]).abs().max() / one[n].abs().max().clamp_min(1.0)).item() for n in one if one[n].numel()
    )


def main() -> int:
    print(provenance())
    torch.set_num_threads(1)
    apart = []
    for name in sys.argv[1:] or sorted(PARTS["method"]):
        found = {p: difference(name, p, rounds) for p, rounds in (("float64", 4), ("float32", 1))}
        fine = all(found[p] <= limit for p, limit in LIMITS.items())
        apart += [] if fine else [name]
        print(f"{name:24} {'  '.join(f'{p} {d:.1e}' for p, d in found.items())}{'' if fine else '  APART'}", flush=True)
    print("all agree" if not apart else f"apart: {', '.join(apart)}")
    return len(apart)


if __name__ == "__main__":
    sys.exit(main())
