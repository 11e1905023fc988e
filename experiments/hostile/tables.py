"""The tables of README.md from a grid's results: python experiments/hostile/tables.py results/weights.json ...

With --keep OUT.json the figures that the tables need are kept, without the rest of each summary.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev

KEPT = ("standard_accuracy", "metrics", "seconds", "seed", "device", "versions", "cohort_odds")


def small(row: dict) -> dict:
    """What a table needs of a row, and where it comes from."""
    found = {key: row[key] for key in KEPT if key in row}
    for figures in (found["standard_accuracy"], *found["metrics"].values()):
        for name in ("by_client", "by_domain", "missing"):
            figures.pop(name, None)
    return {"overrides": row["overrides"], **found}


def cell(values: list[float]) -> str:
    """Mean ± sample standard deviation in %, and the seeds if they are not three."""
    if not values:
        return ""
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.1f}{spread}" + (f" (n = {len(values)})" if len(values) != 3 else "")


def table(rows: dict[str, dict], *places: str) -> Iterable[str]:
    """Of rows named "rule | setting, seed N" the figure at `places`: a line a rule, a column a setting."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, row in rows.items():
        rule, _, setting = name.rpartition(", seed")[0].partition(" | ")
        figure = row
        for place in places:
            figure = (figure or {}).get(place)
        if figure is not None:
            found.setdefault(rule, {}).setdefault(setting, []).append(figure)
    settings = list(dict.fromkeys(setting for each in found.values() for setting in each))
    yield f"| rule | {' | '.join(settings)} |"
    yield f"|---|{'---|' * len(settings)}"
    for rule, each in found.items():
        yield f"| {rule} | {' | '.join(cell(each.get(setting, [])) for setting in settings)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    rows = {k: v for path in options.results for k, v in json.loads(path.read_text()).items() if "error" not in v}
    if options.keep:
        rows = {name: small(row) for name, row in rows.items()}
        options.keep.write_text(json.dumps(rows, indent=1))
    for title, places in (
        ("accuracy", ("standard_accuracy", "mean")),
        ("backdoor success", ("metrics", "backdoor_success", "mean")),
    ):
        lines = list(table(rows, *places))
        if len(lines) > 2:
            print(f"{title}, %\n", *lines, "", sep="\n")


if __name__ == "__main__":
    main()
