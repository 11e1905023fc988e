"""One tiny seeded run of six methods on both engines, compared with what it gave when it was recorded.

A change that only moves or renames code keeps every bit. One that changes numbers records them anew
(`python tests/golden/test_golden.py`) and says so in its commit. Bits depend on the processor and on torch:
elsewhere the norms are compared.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch

import hardy
from conftest import everything, federation, fit
from hardy import papers
from hardy.attacks.gradient import pgd
from hardy.engines import EngineChoice

FILE = Path(__file__).with_name("hashes.json")
METHODS = {
    "fedavg": papers.fedavg,
    "fedrbn": lambda: papers.fedrbn(attack=pgd(steps=2)),
    "fedrobust": papers.fedrobust,
    "split_mix_dat": lambda: papers.split_mix_dat(width=0.25, attack=pgd(steps=2)),
    "sfat_scaffold": papers.sfat_scaffold,
    "fbn": papers.fbn,
}
ENGINES = ("sequential", "vectorised")


def kinds(data):
    """The first two clients train adversarially."""
    from dataclasses import replace

    clients = (replace(c, kind="AT" if number < 2 else "ST") for number, c in enumerate(data.clients))
    return replace(data, clients=tuple(clients))


def record(name: str, engine: str) -> dict:
    run = fit(
        METHODS[name](),
        data=kinds(federation()) if name == "fedrbn" else federation(),
        rounds=2,
        engine=EngineChoice(name=engine, device="cpu", precision="float64"),
    )
    groups: dict[str, list[torch.Tensor]] = {}
    for path, tensor in sorted(everything(run).items()):
        if path.endswith(".batches"):
            continue  # counters came after the first recording
        groups.setdefault(path.partition("/")[0], []).append(tensor.double().flatten())
    flat = {group: torch.cat(parts) for group, parts in groups.items()}
    accuracy = json.dumps(run.summary()["standard_accuracy"]["by_client"]).encode()
    return {
        "bits": {group: hashlib.sha256(t.numpy().tobytes()).hexdigest()[:16] for group, t in flat.items()},
        "accuracy": hashlib.sha256(accuracy).hexdigest()[:16],
        "norms": {group: float(t.norm()) for group, t in flat.items()},
    }


def machine() -> dict:
    info = Path("/proc/cpuinfo")
    models = (
        {line for line in info.read_text().splitlines() if line.startswith("model name")} if info.exists() else set()
    )
    kind = hashlib.sha256("".join(sorted(models)).encode()).hexdigest()[:16]
    return {"torch": torch.__version__, "vector units": torch.backends.cpu.get_cpu_capability(), "processor": kind}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", METHODS)
def test_golden_run(name, engine):
    known, found = json.loads(FILE.read_text()), record(name, engine)
    expected = known["runs"][f"{name}, {engine}"]
    if known["machine"] == machine():
        assert found["bits"] == expected["bits"]
        assert found["accuracy"] == expected["accuracy"]
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)


if __name__ == "__main__":
    runs = {f"{name}, {engine}": record(name, engine) for name in METHODS for engine in ENGINES}
    FILE.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")
    print(f"recorded {len(runs)} runs with hardy {hardy.__version__}")
