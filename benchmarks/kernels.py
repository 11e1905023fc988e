"""Training steps with the fused kernels and without them: python benchmarks/kernels.py OUT.json [--smoke] [--quick]

1. Every kernel against float64 on random shapes, in TF32 and bfloat16.
2. Standard and adversarial steps (PGD-7, then clean and attacked loss) of the digits CNN, 50 clients, batch 32, with
   `engine.kernels` true and false in the same process; 200 clients; other networks.
3. Where the time of a step goes, kernel by kernel.

`--quick` takes only the 50 clients, bfloat16 and the fused kernels.
"""

import gc
import json
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch.nn import functional as F

import hardy
from engines import CUDA, digits, federation, milliseconds, output, provenance, train_only, work_of
from hardy.attacks.gradient import pgd
from hardy.core.training import Training
from hardy.engines import EngineChoice
from hardy.models import fbn_cnn, nin, preresnet18, small_cnn
from hardy.runs.prepare import prepare

QUICK = "--quick" in sys.argv
if QUICK:
    sys.argv.remove("--quick")


def relative(found, wanted) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def agreement(cases) -> list[dict]:
    """Relative errors of convolutions and their gradients."""
    from hardy.kernels import convolution, weight_gradient

    rows = []
    generator = torch.Generator("cuda").manual_seed(0)
    for slots, images, entering, leaving, side, kernel, stride, padding in cases:
        draw = partial(torch.randn, generator=generator, device="cuda")
        x, w = draw(slots, images, entering, side, side), draw(slots, leaving, entering, kernel, kernel)
        how = convolution.Geometry(kernel, kernel, stride, padding)
        for dtype, precision in ((torch.float32, "tf32"), (torch.bfloat16, "tf32")):
            a, b = x.to(dtype), w.to(dtype)
            double, turned = a.double().requires_grad_(), b.double().requires_grad_()
            wanted = torch.stack([F.conv2d(i, k, None, stride, padding) for i, k in zip(double, turned, strict=True)])
            slope = torch.randn_like(wanted).to(dtype)
            to_x, to_w = torch.autograd.grad(wanted, (double, turned), slope.double())
            errors = {
                "forward": relative(convolution.convolve(a, b, how, precision=precision)[0], wanted.detach()),
                "to_input": relative(convolution.to_input(slope, b, how, (side, side), precision), to_x),
                "to_weight": relative(weight_gradient.to_weight(a, slope, how, precision), to_w),
            }
            limit = 1e-3 if dtype is torch.float32 else 1e-2
            assert all(error < limit for error in errors.values()), (how, entering, leaving, dtype, precision, errors)
            rows.append({"how": list(how), "shape": list(x.shape), "leaving": leaving, "dtype": str(dtype), **errors})
    return rows


def rounds_agree() -> dict:
    """What two adversarial clients and two others have learnt after three steps of FedRBN in bfloat16: the largest
    relative distance from TF32 with torch's layers, over all weights of products; and whether a second run has the same
    bits."""
    data = federation(4, 128)
    kinds = tuple(replace(c, kind=kind) for c, kind in zip(data.clients, ("AT", "ST", "AT", "ST"), strict=True))
    data, moved = replace(data, clients=kinds), {}
    runs = {"fused": True, "again": True, "torch": False, "tf32": False}
    for name, kernels in runs.items():
        precision = "tf32" if name == "tf32" else "bfloat16"
        choice = EngineChoice(name="vectorised", precision=precision, kernels=kernels)
        run = prepare(
            hardy.Experiment(training=Training(batch=32, steps=3, rate=0.01), engine=choice),
            method=hardy.papers.fedrbn(attack=pgd(steps=2)),
            model=digits,
            data=data,
        )
        work = work_of(run)
        start = {n: t.clone() for n, t in work.shared.items()}
        moved[name] = [{n: v - start[n] for n, v in u.shared.items()} for u in run.engine.train(work)]

    def distance(name: str) -> float:
        pairs = [(a[n], w) for a, b in zip(moved[name], moved["tf32"], strict=True) for n, w in b.items()]
        return max(relative(found, wanted.double()) for found, wanted in pairs if wanted.dim() > 2)

    same = all(torch.equal(v, b[n]) for a, b in zip(moved["fused"], moved["again"], strict=True) for n, v in a.items())
    return {"fused": distance("fused"), "torch": distance("torch"), "same_bits_again": same}


def step(model, data, method, precision, kernels, steps=4, repeats=10, batch=32):
    """Milliseconds of a step, in a round of a few."""
    choice = EngineChoice(name="vectorised", precision=precision, kernels=kernels)
    training = Training(batch=batch, steps=steps)
    run = prepare(hardy.Experiment(training=training, engine=choice), method=method, model=model, data=data)
    work = work_of(run)
    took = milliseconds(partial(train_only, run, work), repeats, warm=3) / steps
    peak = torch.cuda.max_memory_allocated() / 2**30
    profile = whereabouts(run, work) if kernels and precision == "bfloat16" else None
    del run
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return took, peak, profile


def whereabouts(run, work, most=40) -> list[dict]:
    """Milliseconds and launches by kernel in a round."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        train_only(run, work)
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda e: -e.device_time_total)
    return [{"kernel": e.key[:200], "ms": e.device_time_total / 1e3, "launches": e.count} for e in events[:most]]


SHAPES = [
    (3, 4, 3, 64, 28, 5, 1, 2),
    (3, 4, 64, 64, 14, 5, 1, 2),
    (2, 3, 96, 196, 9, 3, 1, 1),
    (2, 3, 64, 80, 16, 3, 2, 1),
]
"""slots, images, channels in, channels out, side, kernel, stride, padding"""
NETS = {"fbn_cnn": fbn_cnn, "small_cnn": small_cnn, "nin": nin, "preresnet18": preresnet18}
KINDS = {"standard": hardy.papers.fedbn(), "adversarial": hardy.papers.fatbn(attack=pgd(steps=7))}


def main(out: Path) -> None:
    if not CUDA:
        print("no GPU: nothing to measure")
        return
    result = {**provenance(), "agreement": agreement(SHAPES)}
    result["rounds"] = rounds_agree()
    print("kernels agree; rounds:", result["rounds"], flush=True)
    result["steps"], result["networks"] = [], []

    def keep(row: dict) -> None:
        print({name: value for name, value in row.items() if name != "profile"}, flush=True)
        for line in row.get("profile") or ():
            print("   ", f"{line['ms']:8.2f} ms {line['launches']:5d}  {line['kernel']}")
        out.write_text(json.dumps(result, indent=1) + "\n")

    data = federation(50, 128)
    for precision, kernels in product(
        ("bfloat16",) if QUICK else ("bfloat16", "tf32"), (True,) if QUICK else (True, False)
    ):
        for name, method in KINDS.items():
            took, peak, profile = step(digits, data, method, precision, kernels)
            row = {"step": name, "precision": precision, "kernels": kernels, "ms": took, "peak_GiB": peak}
            result["steps"].append({**row, "clients": 50, "profile": profile})
            keep(result["steps"][-1])
    if QUICK:
        return
    for kernels in (True, False):
        took, peak, _ = step(digits, federation(200, 128), KINDS["adversarial"], "bfloat16", kernels, repeats=3)
        result["steps"].append(
            {
                "step": "adversarial",
                "precision": "bfloat16",
                "kernels": kernels,
                "clients": 200,
                "ms": took,
                "peak_GiB": peak,
            }
        )
        keep(result["steps"][-1])
    data = federation(10, 128, (3, 32, 32))
    for (name, net), (kind, method) in product(NETS.items(), KINDS.items()):
        fused, before = (
            step(lambda norm, net=net: net(norm=norm), data, method, "bfloat16", kernels, repeats=3)[0]
            for kernels in (True, False)
        )
        result["networks"].append({"network": name, "step": kind, "fused_ms": fused, "before_ms": before})
        keep(result["networks"][-1])


if __name__ == "__main__":
    main(output(__doc__))
