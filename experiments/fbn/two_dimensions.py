"""FBN's two-dimensional example: figures for figure_2.toml; python experiments/fbn/two_dimensions.py OUT.svg draws the
points of Figures 1 and 2.

Ten clients hold one class each, points around a place on a circle. What does each BatchNorm make of them after 100
rounds, and how far is it from one machine's, for clients that share more or less of their points? The norms and their
aggregation are Hardy's own.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

import hardy
from hardy.core.layers import forcing
from hardy.core.messages import Slot, Updates
from hardy.core.net import Net
from hardy.core.protocols import RoundContext
from hardy.papers.fbn import federated
from hardy.papers.fixbn import fixed
from hardy.parts.norms import batch

CLIENTS, POINTS, ROUNDS = 10, 30, 100
NORMS = {"Naive": batch(), "FixBN": fixed(after=ROUNDS // 2), "FBN": federated()}
GAMMAS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.0)
COLOURS = [f"hsl({36 * i} 65% 45%)" for i in range(CLIENTS)]


def draw(gamma: float, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of every client: a share gamma of any class, the rest of its own. Points [C, N, 2] and their classes."""
    angles = 2 * np.pi * np.arange(CLIENTS) / CLIENTS
    centres = 10 * np.stack([np.cos(angles), np.sin(angles)], 1)
    own = np.repeat(np.arange(CLIENTS)[:, None], POINTS, 1)
    label = np.where(rng.random(own.shape) < gamma, rng.integers(0, CLIENTS, own.shape), own)
    return torch.from_numpy(centres[label] + rng.normal(size=(*own.shape, 2))), torch.from_numpy(label)


def central(points: torch.Tensor) -> torch.Tensor:
    flat = points.flatten(0, 1)
    return (points - flat.mean(0)) / (flat.var(0, correction=0) + 1e-5).sqrt()


def rounds(norm, gamma: float, seed: int = 0):
    """(points, their classes, what clients make of them) of every round."""
    rng = np.random.default_rng(seed)
    plan = hardy.Method(norm=norm).bind(lambda make: torch.nn.Sequential(make(2), torch.nn.Flatten()), (2, 1, 1))
    shared = {name: value[None].double() for name, value in plan.start.items()}
    for t in range(ROUNDS):
        points, label = draw(gamma, rng)
        sent = {copy: shared[name][0] for copy, name in plan.sent.items()}
        outs, kept = [], []
        for x in points:
            now = {name: value[0] for name, value in shared.items()}
            trained = {name: now[name] for name in plan.trained}
            net = Net(plan.model, trained, {**{n: now[n] for n in plan.buffers}, **sent})
            with forcing("running" if norm.frozen(t) else None):
                outs.append(net(x, statistics="batch"))
            kept.append({**now, **{n: net.buffers[n] for n in plan.buffers}})
        ones = torch.ones(CLIENTS, dtype=torch.float64)
        slots = [Slot(i) for i in range(CLIENTS)]
        told = {name: torch.stack([row[name] for row in kept]) for name in shared}
        updates = Updates(slots=slots, shared=told, reported={}, weights=ones, steps=ones, loss=ones)
        context = RoundContext(shared=shared, roles=plan.roles, bases=1, clients=CLIENTS)
        shared, _ = plan.aggregator.finish(plan.aggregator.fold(None, updates, context), context, {})
        yield points, label, torch.stack(outs).detach()


def error(norm, gamma: float, seed: int) -> float:
    """The mean distance to the points as one machine normalises them, over all rounds."""
    found = [(made - central(points)).norm(dim=-1).mean() for points, _, made in rounds(norm, gamma, seed)]
    return float(np.mean(found))


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "middle") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def svg(width: int, height: int, body: list[str]) -> str:
    style = 'font-family="sans-serif" fill="#333"'
    context = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>'
    return "\n".join([context, f'<rect width="{width}" height="{height}" fill="#fff"/>', *body, "</svg>\n"])


def picture_of_points(last: dict) -> str:
    """One panel a norm: the points of the last round, coloured by class."""
    side, body = 230, []
    for number, (name, (made, label)) in enumerate(last.items()):
        left, reach = 10 + number * (side + 10), 3.2 if made.abs().max() < 4 else 1.1 * made.abs().max().item()
        scale = side / 2 / reach
        body.append(f'<rect x="{left}" y="24" width="{side}" height="{side}" fill="none" stroke="#ccc"/>')
        body.append(text(left + side / 2, 16, f"{name} (±{reach:.1f})"))
        for (x, y), kind in zip(made.flatten(0, 1).tolist(), label.flatten().tolist(), strict=True):
            cx, cy = left + side / 2 + scale * x, 24 + side / 2 - scale * y
            if left < cx < left + side and 24 < cy < 24 + side:
                body.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="2.2" fill="{COLOURS[kind]}"/>')
    return svg(20 + len(last) * (side + 10) - 10, side + 34, body)


def measure_row(options: dict, seed: int, quick: bool) -> dict[str, float]:
    """A row of figure_2.toml: the error for every γ."""
    gammas = (1.0, 0.0) if quick else GAMMAS
    return {f"γ = {gamma:g}": error(NORMS[options["norm"]], gamma, seed) for gamma in gammas}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the picture")
    parser.add_argument("--smoke", action="store_true", help="one norm: only shows that it runs")
    options = parser.parse_args()
    last = {}
    for name, norm in list(NORMS.items())[: 1 if options.smoke else None]:
        *_, (points, label, made) = rounds(norm, gamma=0.0)
        last.setdefault("one machine", (central(points), label))
        last[name] = (made, label)
    options.out.write_text(picture_of_points(last))


if __name__ == "__main__":
    main()
