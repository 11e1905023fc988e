import dataclasses, json, sys, time, os

sys.path.insert(0, "tests")
sys.path.insert(0, "src")
os.environ.setdefault("PYTEST_VERSION", "x")
import types

# conftest imports pytest; stub if missing
try:
    import pytest
except ImportError:
    m = types.ModuleType("pytest")
    m.fixture = lambda *a, **k: lambda f: f
    sys.modules["pytest"] = m
import torch
import hardy
from hardy import papers
from hardy.engines import EngineChoice
from hardy.registry import PARTS
import conftest
from conftest import federation, everything, with_momentum, shortened, net, experiment
from hardy.parts.optimisers import adam, adamw, chain, clip, sgd
from hardy.parts.aggregators.base import pipeline
from hardy.parts.aggregators.server_updates import weight_average
from hardy.core.server import Server, Cohort

print(torch.__version__, torch.cuda.get_device_name())
tf = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
methods = {n: shortened(f()) for n, f in PARTS["method"].items()}
methods["fedavg adam"] = papers.fedavg(optimiser=adam())
methods["fedbn adamw kept clip"] = papers.fedbn(optimiser=chain(clip(norm=1.0), adamw(kept=True)))
methods["fedavg nesterov kept"] = papers.fedavg(optimiser=sgd(momentum=0.9, nesterov=True, kept=True))
methods["fatavg ema"] = shortened(papers.fatavg()).replace(aggregator=pipeline(post=(weight_average(),)))
bad = []
for name, m in methods.items():
    try:
        m = with_momentum(m)
        runs = []
        for engine, device in (("sequential", "cpu"), ("sequential", "cuda"), ("vectorised", "cuda")):
            e = experiment(
                rounds=3,
                engine=EngineChoice(name=engine, device=device, precision="float64"),
                cohort=Cohort(fraction=0.75),
            )
            runs.append(hardy.fit(e, method=m, model=net, data=federation(), quiet=True))
        ref = everything(runs[0])
        errs = [
            max(float((everything(r)[n].cpu().double() - t.double()).abs().max()) for n, t in ref.items())
            for r in runs[1:]
        ]
        print(f"{name:28s} cuda seq {errs[0]:.1e}  cuda vec {errs[1]:.1e}  {type(runs[1].server).__name__}", flush=True)
        if max(errs) > 1e-7:
            bad.append(name)
    except Exception as x:
        print(name, "FAILED", type(x).__name__, str(x)[:300], flush=True)
        bad.append(name)
print("bad:", bad)
assert tf == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32), "TF32 left changed"
