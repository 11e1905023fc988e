"""Finished runs as the command line prints them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardy.callbacks.trackers import write_tensorboard
from hardy.core.flatten import flat_row
from hardy.core.json_files import read_sealed
from hardy.core.metric import Metric
from hardy.registry import PARTS
from hardy.report.compare import accuracy_cell, aligned, compare, write_comparison
from hardy.report.differences import unlike
from hardy.report.stored_run import read_run
from hardy.runs.arms import arm_folders, has_arms, look_of, resume_arms
from hardy.runs.progress import clock
from hardy.runs.run import Run
from hardy.runs.seeds import resume_seeds
from hardy.runs.sweep import rank, read_sweep, resume_sweep


def finish(run: Run, options: Any) -> None:
    """Prints a run of this machine."""
    assert run.folder is not None
    if options.tensorboard:
        write_tensorboard(run.folder, run.history).close()
    summary = run.summary()
    print(summary_table(summary) + threat_table(run.robust) + metrics_table(summary))
    print(f"\nreport: {run.folder / 'report.html'}")


def finish_seeds(folder: Path, options: Any) -> None:
    """Goes on with a folder of seeds: a line for each when it is finished, and the table of them all."""
    allowed = getattr(options, "allow_change", False)  # `hardy run` has no such option
    for run in resume_seeds(folder, data_folder=options.data, quiet=options.quiet, remark=remark, allow_change=allowed):
        if options.tensorboard and run.folder is not None:
            write_tensorboard(run.folder, run.history).close()
        print(seed_line(run, run.summary()))
    print(f"\n{compare([folder])}\n\nwritten: {folder / 'summary.json'}")


def finish_arms(folder: Path, options: Any) -> None:
    """Goes on with the arms of an experiment, if it has some; then all of them side by side."""
    if not has_arms(folder):
        return
    for where in resume_arms(folder, data_folder=options.data, quiet=options.quiet, remark=remark):
        print(f"arm {where.name}: {where}", flush=True)
    print(f"\n{arms_table(arm_folders(folder))}")
    if look := look_of(folder):
        print(f"\nLook at: {look}")
    print(f"\nwritten: {write_comparison(arm_folders(folder), folder / 'comparison.html')}")


def arms_table(folders: Sequence[Path]) -> str:
    """Accuracy of every arm, clean and under attack, then the differences."""
    compared = compare(folders)
    rows = [["accuracy in %", *(column.title.removesuffix(" %") for column in compared.accuracies)]]
    rows += [[row.title, *(accuracy_cell(row, column.keys) for column in compared.accuracies)] for row in compared.rows]
    several = len(compared.rows[0].runs) > 1
    note = "±: standard error over the seeds." if several else "±: standard error of the test images, one seed."
    differences = compared.difference_cells()
    table = aligned(differences, words=2) if differences else ""
    marked = "*: a difference beyond chance (95 %), pair by pair." if "*" in table else ""
    blocks = [aligned(rows, words=1), note, table, marked, "\n".join(unlike(compared.rows))]
    return "\n\n".join(block for block in blocks if block)


def finish_sweep(folder: Path, options: Any) -> None:
    """Goes on with a sweep: a line for each setting, then all of them in order."""
    for row in resume_sweep(folder, data_folder=options.data, quiet=options.quiet, remark=remark):
        found = row["failed"] if "failed" in row else f"validation {row['validation_accuracy']:.1%}"
        print(f"{row['folder']}: {' '.join(row['overrides'])}: {found}", flush=True)
    record = read_sweep(folder)
    print("\n" + sweep_table(record))
    chosen = record["chosen"]
    print(f"\nchosen on validation rows: {' '.join(chosen['overrides'])} ({folder / chosen['folder']})")
    print(f"test accuracy there: {chosen['test_accuracy']:.1%}; written: {folder / 'sweep.json'}")


def sweep_table(record: dict[str, Any]) -> str:
    """Settings, the best on validation rows first; the test accuracy of the chosen one alone."""
    rows = rank(record["settings"])
    keys = [override.partition("=")[0] for override in rows[0]["overrides"]]
    lines = [["validation %", "test %", *keys, "folder"]]
    for row in rows:
        test = f"{100 * record['chosen']['test_accuracy']:.1f}" if row["folder"] == record["chosen"]["folder"] else ""
        values = [override.partition("=")[2] for override in row["overrides"]]
        lines.append([f"{100 * row['validation_accuracy']:.1f}", test, *values, row["folder"]])
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, wide, strict=True)) for line in lines)


def seed_line(run: Run, found: dict[str, Any]) -> str:
    """What a seed scores, on one line."""
    scores = {"accuracy": found["standard_accuracy"], **found["robust_accuracy"]}
    shown = [f"{name} {score['mean']:.1%}" for name, score in scores.items() if score["mean"] is not None]
    return f"seed {run.experiment.seed}: {', '.join(shown)} ({run.folder})"


def remark(line: str) -> None:
    print(f"hardy: {line}", file=sys.stderr)


def finish_far(folder: Path, options: Any) -> None:
    """Prints what a run over Flower left."""
    if options.tensorboard:
        write_tensorboard(folder, map(flat_row, read_run(folder).rounds)).close()
    summary = read_sealed(folder / "summary.json", f"`hardy resume {folder}` writes it anew.")
    print(summary_table(summary) + threat_table(summary["robust_accuracy"]) + metrics_table(summary))
    print(f"\nreport: {folder / 'report.html'}")


def privacy_line(spent: dict[str, Any]) -> str:
    """What a run has spent of a unit's privacy."""
    epsilon = "∞" if spent["epsilon"] is None else f"{spent['epsilon']:.2f}"
    return f"privacy: ε = {epsilon}, δ = {spent['delta']:g}, {spent['adjacency']}; covers {spent['covers']}"


def audit_table(found: dict[str, Any]) -> str:
    """What attacks on privacy found."""
    lines = [
        f"membership by {score}: advantage {one['advantage']:6.1%} ± {one['advantage_error']:.1%}, area under the "
        f"curve {one['auc']:.3f} ± {one['auc_error']:.3f} ({one['members']:,} members, {one['others']:,} others)"
        for score, one in found.get("membership", {}).items()
    ]
    lines += [
        f"inversion of the update as {view}: error {one['error']:.2f} ± {one['error_error']:.2f} of {one['images']} "
        "images (0 the image, 1 no better than the usual image)"
        for view, one in found.get("inversion", {}).items()
    ]
    return "\n".join(lines)


def classifier_table(found: dict[str, Any]) -> str:
    """What a classifier scores, with standard errors."""
    scores = {"standard accuracy": found["standard_accuracy"], **found["robust_accuracy"]}
    width = max(map(len, scores))
    lines = [
        f"{name:<{width}}  {score['mean']:6.1%} ± {score['standard_error']:.1%}  of {score['images']:,} images"
        for name, score in scores.items()
    ]
    notes = {note: None for score in found["robust_accuracy"].values() for note in score["notes"]}
    figures = dict(found.get("metrics", {}))
    for threat, metrics in found.get("robust_metrics", {}).items():
        figures |= {f"{name} {threat}": value for name, value in metrics.items()}
    width = max(map(len, figures), default=0)
    rows = [
        f"{name:<{width}}  {'no figure: undefined on these rows' if value is None else f'{value:.3f}'}"
        for name, value in figures.items()
    ]
    return "\n".join([*lines, *notes, *rows])


def summary_table(summary: dict[str, Any]) -> str:
    """A finished run in a few lines."""
    accuracy = summary["standard_accuracy"]
    some = f" ({accuracy['measured']:,} of {accuracy['clients']:,})" if "measured" in accuracy else ""
    rows = [
        *accuracy["by_domain"].items(),
        (f"mean of clients{some}", accuracy["mean"]),
        ("worst client", accuracy["worst_client"]),
        *((f"{domain} (held out)", share) for domain, share in accuracy.get("held_out", {}).items()),
    ]
    best = summary["best"]
    if best and best["round"] != summary["rounds"]:
        chosen = f", chosen by {best['metric']}" if best.get("metric") else ""
        chosen += f", chosen under {best['select']}" if best.get("select") else ""
        rows.append((f"mean at best validation (round {best['round']}{chosen})", best["standard_accuracy"]["mean"]))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value:6.1%}" for name, value in rows if value is not None]
    lines = [line + _error(accuracy) * line.startswith("mean of clients") for line in lines]
    where = f"{summary['engine']}, {summary['device']}"
    head = (
        f"{summary['name']}: {summary['method']}, {summary['rounds']} rounds in {clock(summary['seconds'])} ({where})"
    )
    up, down, work = summary["bytes_up"] / 1e6, summary["bytes_down"] / 1e6, summary["macs"] / 1e9
    traffic = f"{up:,.1f} MB up, {down:,.1f} MB down, {work:,.1f} GMACs"
    lost = ", ".join(f"{count} {kind}" for kind, count in summary["lost"].items())
    lines += [privacy_line(spent) for spent in summary.get("privacy", ())]
    if why := summary.get("stopped"):
        head += f"\nstopped early: {why}"
    return "\n".join([head, "", *lines, "", traffic + (f"; replies lost: {lost}" if lost else "")])


def _error(figures: dict[str, Any]) -> str:
    """The standard error of a mean, where it is known."""
    error = figures.get("standard_error")
    return "" if error is None else f" ± {error:.1%}"


def threat_table(threats: dict[str, Any]) -> str:
    """Robust accuracy, one line per threat."""
    width = max((len(name) for name in threats), default=0)
    lines = [
        f"{name:<{width}}  {found['mean']:6.1%} mean{_error(found)}  {found['worst_client']:6.1%} worst client"
        + "".join(f"  {share:6.1%} {domain} (held out)" for domain, share in found.get("held_out", {}).items())
        for name, found in threats.items()
        if found["mean"] is not None
    ]
    return "\n".join(["", "", *lines]) if lines else ""


def certificate_table(found: dict[str, Any]) -> str:
    """Certified accuracy at each radius, a line a certificate and radius."""
    lines = []
    for name, one in (found.get("certified_accuracy") or {}).items():
        if one["abstained"] is None:
            continue
        sure = f"confidence {1 - one['alpha']:g} a row, {one['abstained']:.1%} abstained"
        lines.append(f"certified by smoothing, {name} ({sure}; a radius is at most {one['largest_radius']:.2f})")
        lines += [
            f"  L2 radius {radius:<5}  {at['mean']:6.1%} mean{_error(at)}  {at['worst_client']:6.1%} worst client"
            for radius, at in one["radii"].items()
        ]
    return "\n".join(["", "", *lines]) if lines else ""


def metrics_table(found: dict[str, Any]) -> str:
    """The metrics of a summary or an evaluation, clean and under each threat; clients without a figure are named."""
    rows = {(name, ""): figures for name, figures in (found.get("metrics") or {}).items()}
    for threat, metrics in (found.get("robust_metrics") or {}).items():
        rows |= {(name, threat): figures for name, figures in metrics.items()}
    width = max((len(" ".join(row).strip()) for row in rows), default=0)
    lines = []
    for row, figures in rows.items():
        words = {"mean": "mean", "worst_client": "worst client"}
        scores = [f"{figures[key]:6.3f} {word}" for key, word in words.items() if figures[key] is not None]
        line = f"{' '.join(row).strip():<{width}}  {'  '.join(scores) or 'no figure'}"
        if missing := figures.get("missing"):
            line += f"  (none for client {', '.join(map(str, missing))}: {undefined_when(row[0])})"
        lines.append(line)
    return "\n".join(["", "", *lines]) if lines else ""


def undefined_when(metric: str) -> str:
    """Why a client may have no figure of a metric."""
    known = PARTS["metric"].get(metric)
    return f"{getattr(known, 'undefined_when', Metric.undefined_when)}, or it did not answer"


def settings_table(rows: Sequence[dict[str, Any]]) -> str:
    """Widths and robustness, with what they cost and score."""
    threats = list(rows[0]["robust_accuracy"])
    lines = ["width  robustness       MACs  parameters  accuracy  " + "  ".join(threats)]
    for row in rows:
        level = "" if row["robustness"] is None else f"{row['robustness']:g}"
        scores = [row["standard_accuracy"], *(row["robust_accuracy"][threat] for threat in threats)]
        shown = "  ".join(f"{score['mean']:8.1%}" for score in scores)
        lines.append(f"{row['width']:<5g}  {level:>10}  {row['macs']:>9,}  {row['parameters']:>10,}  {shown}")
    return "\n".join(lines)


def seeds_table(over: dict[str, Any]) -> str:
    """Mean ± sample standard deviation over seeds."""
    accuracies = {"accuracy": over["standard_accuracy"], **over["robust_accuracy"]}
    metrics = dict(over["metrics"])
    for threat, found in over["robust_metrics"].items():
        metrics |= {f"{name} {threat}": score for name, score in found.items()}
    width = max(map(len, [*accuracies, *metrics]))
    lines = [f"mean ± deviation over {over['runs']} seeds"]
    for scores, spread in ((accuracies, _percent_spread), (metrics, _metric_spread)):
        for name, score in scores.items():
            if "mean" in score:
                mean, worst = spread(score, "mean"), spread(score, "worst_client")
                lines.append(f"{name:<{width}}  {mean} mean  {worst} worst client")
    return "\n".join(lines)


def _percent_spread(score: dict[str, Any], key: str) -> str:
    return f"{100 * score[key]:5.1f} ± {100 * score[f'{key}_std']:.1f} %"


def _metric_spread(score: dict[str, Any], key: str) -> str:
    return f"{score[key]:5.3f} ± {score[f'{key}_std']:.3f}"
