"""What the host does in a round besides its steps: python benchmarks/host.py OUT.json [--smoke]

A round of one local step on the vectorised engine, with networks so narrow that arithmetic vanishes, as it runs on a
GPU (the pipelined server, lanes that keep their tensors), but on the CPU. On a GPU a step is one replayed graph, so
what is left are operations that the host launches one by one, and moments when it waits for the device:

launches    operations on tensors outside of steps (views and allocations launch nothing)
sends       small tables of numbers that travel to the device
waits       numbers or rows that the host reads off a device, which ends what it has queued ahead
host_ms     median milliseconds of processor time of a round on this machine, without those of its steps
"""

import json
import statistics
import time
from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hardy
from engines import SMOKE, federation, output, provenance
from hardy.attacks.gradient import pgd
from hardy.core import tensors
from hardy.core.server import PipelinedServer
from hardy.core.training import Training
from hardy.engines import EngineChoice
from hardy.engines.lane import Lane
from hardy.engines.vectorised import Vectorised
from hardy.models import digits_cnn, fbn_cnn
from hardy.runs.prepare import prepare

READS = ("item", "tolist", "__bool__", "__float__", "__int__", "nonzero", "numpy")
CASES = {
    "FBN, fbn_cnn, 10 clients": (hardy.papers.fbn(), fbn_cnn, 10, (3, 32, 32)),
    "FedAvg, fbn_cnn, 10 clients": (hardy.papers.fedavg(), fbn_cnn, 10, (3, 32, 32)),
    "FedRBN, digits_cnn, 50 clients": (hardy.papers.fedrbn(attack=pgd(steps=1)), digits_cnn, 50, (3, 28, 28)),
}


class Launches(TorchDispatchMode):
    """Counts operations, but not those of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.found, self.waits, self.sends = False, Counter(), Counter(), 0
        self.on_host: set[int] = set()
        """tensors that lie there on a GPU's machine too"""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if not (self.inside or function.is_view or "empty" in str(function)):
            self.found[str(function)] += 1
        return function(*arguments, **(options or {}))


@contextmanager
def watching(launches: Launches):
    """Counts reads too."""

    def counting(name: str):
        original = getattr(Tensor, name)

        def read(tensor, *arguments):
            launches.waits[name] += not launches.inside and id(tensor) not in launches.on_host
            return original(tensor, *arguments)

        return patch.object(Tensor, name, read)

    def send(*arguments):
        launches.sends += 1
        return original_send(*arguments)

    original_send = tensors.send
    patches = [*map(counting, READS), patch.object(tensors, "send", send)]
    for each in patches:
        each.start()
    try:
        with launches:
            yield
    finally:
        for each in patches:
            each.stop()


class Steps:
    """The seconds of steps, and whether one is under way."""

    def __init__(self) -> None:
        self.seconds, self.launches, self.original = 0.0, Launches(), Lane.step

    def step(self, lane, *arguments, **options):
        began, self.launches.inside = time.process_time(), True
        try:
            return self.original(lane, *arguments, **options)
        finally:
            self.seconds += time.process_time() - began
            self.launches.inside = False


def measured(method, net, clients: int, shape, repeats: int) -> dict:
    """A round's launches, waits and host milliseconds."""
    steps, data = Steps(), federation(clients, 16, shape)
    if method.name == "fedrbn":
        from dataclasses import replace

        kinds = ("AT" if at % 5 == 0 else "ST" for at in range(clients))
        data = replace(data, clients=tuple(replace(c, kind=k) for c, k in zip(data.clients, kinds, strict=True)))
    choice = EngineChoice(name="vectorised", device="cpu", lane=clients)
    run = prepare(
        hardy.Experiment(training=Training(batch=8, steps=1), engine=choice),
        method=method,
        model=lambda norm: net(norm=norm, width=0.03),
        data=data,
    )
    server = PipelinedServer(**{name: getattr(run.server, name) for name in run.server.__dataclass_fields__})

    def one_round() -> float:
        steps.seconds, began = 0.0, time.process_time()
        run.state, _ = server.round(run.state, run.engine, 0.01)
        return (time.process_time() - began - steps.seconds) * 1e3

    def step(lane, *arguments, **options):
        return steps.step(lane, *arguments, **options)

    fixed = property(lambda engine: True)
    with patch.object(Lane, "step", step), patch.object(Vectorised, "fixed", fixed):
        times = [one_round() for _ in range(repeats + 3)][3:]
        steps.launches.on_host = {id(lengths) for lengths in run.state.lengths.values()}
        with watching(steps.launches):
            one_round()
    found = steps.launches
    return {
        "launches": found.found.total(),
        "sends": found.sends,
        "waits": found.waits.total(),
        "host_ms": round(statistics.median(times), 2),
        "host_ms_deviation": round(statistics.pstdev(times), 2),
        "most": dict(found.found.most_common(8)),
    }


def main() -> None:
    out, result = output(__doc__), provenance()
    for name, case in CASES.items():
        result[name] = measured(*case, repeats=3 if SMOKE else 60)
        print(name, result[name], flush=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
