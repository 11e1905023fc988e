"""Draws rows of a results file over the rounds: python experiments/curves.py RESULTS.json OUT.svg ROW [ROW ...]

A row may be given as "its name=the words for the picture". Accuracy in %, each curve named at its end.
"""

import argparse
import json
from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, BELOW = 760, 320, 40, 230, 40
FEW = 8
"""points that are marked one by one"""
COLOURS = ("#1f4e8c", "#c4510d", "#3c7a2e", "#8a2d6b", "#6b6b6b", "#0f8a8a", "#a07a00", "#444")


def picture(
    curves: dict[str, list[tuple[float, float]]], *, ticks: list[float], step: int = 10, x_name: str = "round"
) -> str:
    """Curves of (x, share) between the first and the last tick; a line across every `step` points of accuracy."""
    values = [100 * point[1] for curve in curves.values() for point in curve]
    low, high = step * int(min(values) // step), step * (int(max(values) // step) + 1)
    first, last = ticks[0], ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first)
        return LEFT + (WIDTH - LEFT - RIGHT) * across, 10 + (HEIGHT - BELOW - 10) * (high - y) / (high - low)

    body = []
    for y in range(low, high + 1, step):
        (x0, height), (x1, _) = place(first, y), place(last, y)
        body.append(f'<path d="M{x0:.0f} {height:.1f}H{x1:.0f}" stroke="#ddd"/>')
        body.append(f'<text x="{x0 - 8:.0f}" y="{height + 4:.1f}" text-anchor="end">{y}</text>')
    for x in ticks:
        body.append(f'<text x="{place(x, 0)[0]:.0f}" y="{HEIGHT - 18}" text-anchor="middle">{x:g}</text>')
    middle = place((first + last) / 2, 0)[0]
    body.append(f'<text x="{middle:.0f}" y="{HEIGHT - 3}" text-anchor="middle">{escape(x_name)}</text>')
    ends = sorted((place(*(curve[-1][0], 100 * curve[-1][1]))[1], label) for label, curve in curves.items())
    tops: dict[str, float] = {}
    for end, label in ends:  # names from the top down, none upon another
        tops[label] = max(end + 4, max(tops.values(), default=0) + 15)
    for (label, curve), colour in zip(curves.items(), COLOURS, strict=False):
        path = "L".join("{:.1f} {:.1f}".format(*place(x, 100 * y)) for x, y in curve)
        name = f"{label} {100 * curve[-1][1]:.1f}"
        body.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(curve) <= FEW:
            dots = (place(x, 100 * y) for x, y in curve)
            body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in dots]
        body.append(f'<text x="{WIDTH - RIGHT + 8}" y="{tops[label]:.1f}" fill="{colour}">{escape(name)}</text>')
    context = (
        f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13"'
    )
    return f'<svg {context} fill="#333"><rect width="100%" height="100%" fill="#fff"/>{"".join(body)}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("rows", nargs="+")
    options = parser.parse_args()
    found = json.loads(options.results.read_text())
    found = found.get("rows", found)
    named = [row.partition("=") for row in options.rows]
    curves = {words or name: found[name]["curve"] for name, _, words in named}
    rounds = max(point[0] for curve in curves.values() for point in curve)
    options.out.write_text(picture(curves, ticks=[0, rounds // 3, 2 * rounds // 3, rounds]))


if __name__ == "__main__":
    main()
