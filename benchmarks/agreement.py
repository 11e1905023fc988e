"""Whether the engines agree on this machine: python benchmarks/agreement.py [--large | --smoke] [METHOD ...]

Every registered method on six clients of unlike sizes, capacities and kinds, not all asked in a round; four rounds on
the sequential and on the vectorised engine, with steps captured where there is a GPU. Prints the largest difference of
all tensors: in float64, where rounding must be all of it, and in float32 after one round, where steps are fused. There
the least of three seeds counts: a mistake shows with all of them, while rounding that turns a sign of an attack's
gradient, and with it a pixel, shows with some.

With --large (GPU only) fifty clients and the digits CNN, which meet other kernels: the vectorised engine without and
with captured steps, three rounds; with two seeds in one process, since what an earlier run leaves behind must not reach
a later one. Both run the same kernels, deterministic ones of cuDNN, so that nothing may differ.
"""

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

import hardy
from engines import SMOKE, federation, provenance
from hardy.attacks.gradient import pgd
from hardy.core.cohort import Cohort
from hardy.core.method import Method
from hardy.core.protocols import Optimiser
from hardy.core.training import Training
from hardy.data.capacity import exponential, with_capacity
from hardy.engines import EngineChoice, lane
from hardy.models import digits_cnn, tiny_cnn
from hardy.parts.optimisers import chain, sgd
from hardy.registry import PARTS


@dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int]
    sizes: tuple[int, ...]
    """rows of each client"""
    attacking: int
    """the clients that hold so many train adversarially"""
    model: Callable
    cohort: Cohort
    training: Training
    checks: dict[str, tuple[int, int, float]]
    """by precision: rounds, seeds, and the largest difference that is fine"""
    optimiser: Optimiser = sgd()
    """in place of plain SGD"""
    lanes: tuple[int | None, ...] = (None,)
    """most slots at once, by seed: in lanes of 16 several groups of clients share one set of captured steps"""


SMALL = Case(
    shape=(1, 12, 12),
    sizes=(40, 28, 48, 40, 20, 40),
    attacking=40,
    model=lambda norm, width=0.25: tiny_cnn(norm=norm, shape=(1, 12, 12), classes=10, width=width),
    cohort=Cohort(fraction=0.8),
    training=Training(rate=0.05, batch=8, epochs=2),
    optimiser=sgd(momentum=0.5, weight_decay=1e-3),
    checks={"float64": (1 if SMOKE else 4, 1, 1e-9)} | ({} if SMOKE else {"float32": (1, 3, 1e-5)}),
)
LARGE = Case(
    shape=(3, 28, 28),
    sizes=(128,) * 10 + (96,) * 40,
    attacking=128,
    model=lambda norm: digits_cnn(norm=norm),
    cohort=Cohort(),
    training=Training(rate=0.01, batch=32, epochs=1),
    checks={"float32": (3, 2, 0.0), "bfloat16": (3, 2, 0.0)},
    lanes=(None, 16),
)


FEW = ("fedavg", "fatscaffold", "fedrbn", "split_mix")


class Uncaptured:
    """In place of a captured step: the step."""

    def __init__(self, step: Callable[..., torch.Tensor], *_: object) -> None:
        self.replay = lambda inputs: step(*inputs)


@contextmanager
def capturing(wanted: bool) -> Iterator[None]:
    graph = lane._Graph
    lane._Graph = graph if wanted else Uncaptured
    try:
        yield
    finally:
        lane._Graph = graph


def clients(case: Case, method: Method):
    """The federation, with the kinds and capacities that the method looks at."""
    looked_at = {fact for part in method.parts() for fact in part.consumes}
    data = federation(len(case.sizes), max(case.sizes), case.shape)
    kinds = ("AT", "ST") if "kind" in looked_at else ("", "")
    own = (
        replace(c, train=c.train[:n], kind=kinds[n != case.attacking])
        for c, n in zip(data.clients, case.sizes, strict=True)
    )
    data = replace(data, clients=tuple(own))
    return with_capacity(data, exponential(), seed=0) if "capacity" in looked_at else data


def difference(case: Case, name: str, precision: str, rounds: int, seed: int) -> float:
    """The largest one between the two ways, as a share of the largest value of a tensor where that is above 1."""
    make, found = PARTS["method"][name], []
    options = {"attack": pgd(steps=2)} if "attack" in inspect.signature(make).parameters else {}
    method = make(**options)
    *links, last = method.optimiser.links
    if last == sgd():
        method = method.replace(optimiser=chain(*links, case.optimiser))
    for captured in (False, True):
        engine = "vectorised" if captured or case is LARGE else "sequential"
        chosen = hardy.Experiment(
            rounds=rounds,
            seed=seed,
            cohort=case.cohort,
            training=case.training,
            engine=EngineChoice(name=engine, precision=precision, lane=case.lanes[seed % len(case.lanes)]),
        )
        with capturing(captured):
            run = hardy.fit(chosen, method=method, model=case.model, data=clients(case, method), quiet=True)
        held = {"s": run.state.shared, "r": run.state.reported, "m": run.state.memory, "p": run.engine.store}
        found.append({(place, n): t.double().cpu() for place, own in held.items() for n, t in own.items()})
    one, many = found
    apart = [(one[n] - many[n]).abs().max() / one[n].abs().max().clamp_min(1.0) for n in one if one[n].numel()]
    return torch.stack(apart).max().item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", help="all, if none is named (with --smoke a few)")
    parser.add_argument("--large", action="store_true", help="fifty clients and the digits CNN, on a GPU")
    parser.add_argument("--smoke", action="store_true", help="one round, float64, on the CPU")
    options = parser.parse_args()
    print(provenance())
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = options.large
    case, counting = (LARGE, torch.max) if options.large else (SMALL, torch.min)  # both keep what is no number
    if case is LARGE and not torch.cuda.is_available():
        print("--large compares captured steps with others, and only a GPU captures them; there is none here.")
        return 2
    apart = []
    for name in options.methods or (FEW if SMOKE else sorted(PARTS["method"])):
        found = {
            precision: counting(
                torch.tensor([difference(case, name, precision, rounds, seed) for seed in range(seeds)])
            ).item()
            for precision, (rounds, seeds, _) in case.checks.items()
        }
        fine = all(found[precision] <= limit for precision, (_, _, limit) in case.checks.items())
        apart += [] if fine else [name]
        print(f"{name:24} {'  '.join(f'{p} {d:.1e}' for p, d in found.items())}{'' if fine else '  APART'}", flush=True)
    print("all agree" if not apart else f"apart: {', '.join(apart)}")
    return len(apart)


if __name__ == "__main__":
    sys.exit(main())
