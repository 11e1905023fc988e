"""Training steps with the fused kernels and without them: python benchmarks/kernels.py OUT.json [SECTION ...] [--smoke]

agreement   every kernel against float64, in TF32 and bfloat16; three rounds of both against TF32
steps       standard and adversarial steps (PGD-7, then clean and attacked loss) of the digits CNN, 50 clients, batch
            32, with `engine.kernels` true and false in the same process, and where their time goes, kernel by kernel
layers      what each kernel reaches on the layers of that network: TFLOP/s, and TB/s where bytes decide
many        200 clients, and 1,000 in lanes of 50
short       rounds of one step: Federated BatchNorm, and PGD training of FedRobust's small AlexNet
networks    other networks, 10 clients

Without sections all are measured.
"""

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch.nn import functional as F

import hardy
from engines import CUDA, SMOKE, digits, federation, milliseconds, one_round, provenance, train_only, work_of
from hardy.attacks.gradient import pgd
from hardy.core.training import Training
from hardy.engines import EngineChoice
from hardy.models import fbn_cnn, flra_alexnet, nin, preresnet18, small_cnn
from hardy.runs.prepare import prepare


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


def step(model, data, method, precision, kernels, steps=4, repeats=10, batch=32, lane=None):
    """Milliseconds of a step, in a round of a few."""
    choice = EngineChoice(name="vectorised", precision=precision, kernels=kernels, lane=lane)
    training = Training(batch=batch, steps=steps)
    run = prepare(hardy.Experiment(training=training, engine=choice), method=method, model=model, data=data)
    work = work_of(run)
    took = milliseconds(partial(train_only, run, work), repeats, warm=3 if CUDA else 0) / steps
    if not CUDA:
        return took, 0.0, None
    peak = torch.cuda.max_memory_allocated() / 2**30
    profile = whereabouts(partial(train_only, run, work)) if kernels and precision == "bfloat16" else None
    del run
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return took, peak, profile


def whereabouts(work, most=40) -> list[dict]:
    """Milliseconds and launches by kernel in a round."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
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
BALL = {"ball": "l2", "epsilon": 1.25, "step": 0.3125, "steps": 10}


def checked(keep) -> None:
    keep("agreement", {"kernels": agreement(SHAPES), "rounds": rounds_agree()})


def steps(keep) -> None:
    data = federation(50, 128)
    for precision, kernels in product(("bfloat16", "tf32"), (True, False)):
        for name, method in KINDS.items():
            took, peak, profile = step(digits, data, method, precision, kernels)
            row = {"step": name, "precision": precision, "kernels": kernels, "ms": took, "peak_GiB": peak}
            keep("steps", {**row, "clients": 50, "profile": profile})


def median_of(function: Callable[[], object], repeats: int = 7, launches: int = 10) -> float:
    """Milliseconds of a launch."""
    times = []
    for _ in range(repeats + 2):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(launches):
            function()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / launches)
    return statistics.median(times[2:])


def layers(keep, slots: int = 50, images: int = 32) -> None:
    """The digits CNN's layers in bfloat16; the first one's images are float32."""
    from hardy.kernels import convolution, descent, weight_gradient
    from hardy.kernels.convolution import Epilogue, packed
    from hardy.kernels.pooling import channels_last

    draw, how = partial(torch.randn, device="cuda"), convolution.Geometry(5, 5, 1, 2)
    for name, entering, leaving, side in (("conv1", 3, 64, 28), ("conv2", 64, 64, 14), ("conv3", 64, 128, 7)):
        x = draw(slots, images, entering, side, side)
        x = x if entering == 3 else channels_last(x.bfloat16())
        w = packed(draw(slots, leaving, entering, 5, 5).bfloat16())
        g = channels_last(draw(slots, images, leaving, side, side).bfloat16())
        line = draw(slots, leaving)
        after = Epilogue(line, line, pool=side % 2 == 0, relu=True, coded=True)
        found = {
            "forward": median_of(partial(convolution.convolve, x, w, how)),
            "forward with norm, pooling, ReLU": median_of(partial(convolution.convolve, x, w, how, after)),
            "to input": median_of(partial(convolution.to_input, g, w, how, (side, side))),
            "to weight": median_of(partial(weight_gradient.to_weight, x, g, how)),
        }
        flop = 2 * slots * images * side * side * 25 * entering * leaving
        keep("layers", {"layer": name, "ms": found, "TFLOP/s": {n: flop / ms / 1e9 for n, ms in found.items()}})
    entering, leaving = 6272, 2048
    x, g = draw(slots, images, entering).bfloat16(), draw(slots, images, leaving).bfloat16()
    w = draw(slots, leaving, entering)
    weights, gradient, rounded = {"w": w}, {"w": torch.randn_like(w)}, {"w": w.bfloat16()}
    sgd = partial(
        descent.descend_rounded, weights, gradient, torch.tensor(0.0, device="cuda"), rounded,
        decay=0.0, velocity=None, momentum=0.0, nesterov=False,
    )  # fmt: skip
    half, size = rounded["w"], w.numel()
    turned = g.transpose(1, 2)
    for name, run, moved in (
        ("fc1 forward", partial(torch.bmm, x, half.transpose(1, 2)), 2),
        ("fc1 to input", partial(torch.bmm, g, half), 2),
        ("fc1 to weight", partial(torch.bmm, turned, x, out_dtype=torch.float32), 4),
        ("SGD of fc1", partial(sgd, begin={}), 14),
        ("SGD of fc1, first step", partial(sgd, begin={"w": w[0].clone()}), 10),
    ):
        ms = median_of(run)
        keep("layers", {"layer": name, "ms": ms, "TB/s": moved * size / ms / 1e9})


def many(keep) -> None:
    for clients, kernels, lane in ((200, True, None), (200, False, None), (1000, True, 50)):
        took, peak, _ = step(
            digits, federation(clients, 128), KINDS["adversarial"], "bfloat16", kernels, repeats=2, lane=lane
        )
        row = {"step": "adversarial", "precision": "bfloat16", "kernels": kernels, "clients": clients, "lane": lane}
        keep("many", {**row, "ms": took, "peak_GiB": peak})


def short(keep) -> None:
    """Rounds of one local step: of all they hold, not of the step alone."""
    data = federation(10, 500, (3, 32, 32))
    trained = hardy.papers.fatavg(attack=pgd(**BALL), mix=1.0).replace(norm=hardy.parts.norms.absent())
    cases = {
        "Federated BatchNorm, fbn_cnn": (fbn_cnn, hardy.papers.fbn()),
        "PGD-10 training, flra_alexnet": (flra_alexnet, trained),
    }
    for (name, (net, method)), kernels in product(cases.items(), (True, False)):
        choice = EngineChoice(name="vectorised", precision="bfloat16", kernels=kernels)
        chosen = hardy.Experiment(training=Training(batch=50, steps=1), engine=choice)
        run = prepare(chosen, method=method, model=lambda norm, net=net: net(norm=norm), data=data)
        keep("short", {"round": name, "kernels": kernels, "ms": milliseconds(partial(one_round, run), 60, warm=5)})


def networks(keep) -> None:
    data = federation(10, 128, (3, 32, 32))
    for (name, net), (kind, method) in product(NETS.items(), KINDS.items()):
        fused, before = (
            step(lambda norm, net=net: net(norm=norm), data, method, "bfloat16", kernels, repeats=3)[0]
            for kernels in (True, False)
        )
        keep("networks", {"network": name, "step": kind, "fused_ms": fused, "before_ms": before})


SECTIONS = {
    "agreement": checked,
    "steps": steps,
    "layers": layers,
    "many": many,
    "short": short,
    "networks": networks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="result file (JSON)")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only shows that it runs")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section is named {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if not CUDA or SMOKE:
        print("no GPU: nothing to measure")
        return
    result = provenance()

    def keep(section: str, row: dict) -> None:
        result.setdefault(section, []).append(row)
        print(section, {name: value for name, value in row.items() if name not in ("profile", "kernels")}, flush=True)
        for line in row.get("profile") or ():
            print("   ", f"{line['ms']:8.2f} ms {line['launches']:5d}  {line['kernel'][:100]}")
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    for section in options.sections or SECTIONS:
        SECTIONS[section](keep)


if __name__ == "__main__":
    main()
