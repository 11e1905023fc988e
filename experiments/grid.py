"""Runs the rows of a table: python experiments/grid.py experiments/fbn/grid.toml --out results.json [--workers 3]

A grid names an experiment (a TOML beside it) and rows, each with its overrides, and may name seeds, with each of which
every row is run. Under [again] it may ask for further evaluations of the rows whose names match a pattern, with the
options of hardy.evaluate (best = true: of the networks as they were at the best round on validation rows; fine_tune:
after every client went on alone, with the options of Run.fine_tune). The results file is written after every row and
rows already in it are skipped, so that a grid that was stopped goes on where it was; with --runs it also goes on in the
middle of a row, and its networks stay. With --smoke the first two rows run for one round on some embedded digits.
"""

import argparse
import gc
import json
import multiprocessing
import re
import time
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import hardy

TINY = [
    "rounds=1",
    "data.source=mini_digits",
    "data.limit=200",
    "training.batch=8",
    "evaluation.threats=[]",
    "engine.device=cpu",
]


def every_row(grid: dict) -> list[tuple[str, list[str]]]:
    """Names and overrides, seed by seed."""
    if "seeds" not in grid:
        return list(grid["rows"].items())
    return [(f"{name}, seed {s}", [*own, f"seed={s}"]) for s in grid["seeds"] for name, own in grid["rows"].items()]


def run_row(
    experiment: Path, data: str | None, runs: Path | None, again: dict[str, dict], row: tuple[str, list[str]]
) -> tuple[str, dict]:
    """A row's name and figures."""
    name, overrides = row
    try:
        chosen = hardy.read(str(experiment), overrides)
        wanted = {title: how for title, how in again.items() if re.search(how["rows"], name)}
        with nullcontext(runs) if runs else TemporaryDirectory() as folder:
            place = Path(folder) / re.sub(r"[^\w.-]+", "_", name)
            return name, {"overrides": overrides, **figures(chosen, place, data, wanted)}
    except Exception as error:  # a row that fails must not take the others with it
        return name, {"overrides": overrides, "error": f"{type(error).__name__}: {error}"}
    finally:  # nor must its memory, which other workers may need
        gc.collect()
        torch.cuda.empty_cache()


def figures(chosen: hardy.Experiment, folder: Path, data: str | None, again: dict[str, dict]) -> dict:
    """The run's summary, standard accuracy over the rounds, and what it is evaluated by again."""
    run = fit_or_resume(chosen, folder, data)
    table = run.folder / "settings.json"
    settings = json.loads(table.read_text())["settings"] if table.exists() else None
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    more = {title: evaluate_again(run, data, **how) for title, how in again.items()}
    curve = [(n["round"], round(n["standard_accuracy"]["mean"], 4)) for n in lines if n.get("standard_accuracy")]
    return {"curve": curve, "settings": settings, "again": more, **run.summary()}


def fit_or_resume(chosen: hardy.Experiment, folder: Path, data: str | None) -> hardy.Run:
    if not (folder / "config.toml").exists():
        return hardy.fit(chosen, out=folder, data_folder=data, quiet=True)
    begun = hardy.read(str(folder / "config.toml"))
    if replace(begun, engine=chosen.engine) != chosen:  # "auto" is kept as the engine it chose
        raise hardy.HardyError(f"{folder} holds a run with other settings. Remove it, or name another folder.")
    return hardy.resume(folder, data_folder=data, quiet=True)


def evaluate_again(
    run: hardy.Run, data: str | None, *, rows: str, best: bool = False, fine_tune: dict | None = None, **options
) -> dict:
    chosen = hardy.load(run.folder, best=True, data_folder=data) if best else run
    if fine_tune:
        chosen = chosen.fine_tune(**fine_tune)
    return hardy.evaluate(chosen, **options, checks=False, quiet=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("grid", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1, help="rows at once; a GPU holds several small ones")
    parser.add_argument("--data", help="folder of data sets; default HARDY_DATA")
    parser.add_argument("--runs", type=Path, help="folder that keeps the rows' run folders")
    parser.add_argument("--only", default="", help="rows whose name matches this pattern")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after so many seconds")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only shows that it runs")
    parser.add_argument("overrides", nargs="*", help="for all rows, such as rounds=10")
    options = parser.parse_intermixed_args()
    grid = tomllib.loads(options.grid.read_text())
    done = json.loads(options.out.read_text()) if options.out.exists() else {}
    rows = [
        (name, [*(["model.width=0.125", *own, *TINY] if options.smoke else own), *options.overrides])
        for name, own in every_row(grid)[: 2 if options.smoke else None]
        if re.search(options.only, name) and "error" in done.get(name, {"error": ""})
    ]
    began = time.perf_counter()
    experiment = options.grid.parent / grid["experiment"]
    work = partial(run_row, experiment, options.data, options.runs, {} if options.smoke else grid.get("again", {}))
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        waiting, running = list(reversed(rows)), []
        while waiting or running:
            while waiting and len(running) < options.workers and time.perf_counter() - began < options.seconds:
                running.append(pool.apply_async(work, (waiting.pop(),)))
            if not running:
                print(f"out of time; {len(waiting)} rows left")
                break
            time.sleep(0.2)
            for result in [r for r in running if r.ready()]:
                running.remove(result)
                name, found = result.get()
                done[name] = found
                options.out.write_text(json.dumps(done, indent=1))
                print(name, found.get("error") or _short(found), flush=True)


def _short(found: dict) -> str:
    robust = " ".join(f"{threat} {value['mean']:.1%}" for threat, value in found["robust_accuracy"].items())
    return f"{found['standard_accuracy']['mean']:.1%} {robust} in {found['seconds']:.0f} s"


if __name__ == "__main__":
    main()
