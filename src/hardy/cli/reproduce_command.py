"""`hardy reproduce`: published tables and figures, by name."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardy.cli.command import (
    Command,
    data_option,
    device_option,
    positive_count,
    positive_number,
    quiet_option,
    seeds_option,
)
from hardy.errors import HardyError


def _declare(parser: ArgumentParser) -> None:
    parser.add_argument("table", nargs="?", metavar="PAPER/TABLE", help="such as fedrbn/table_2; PAPER for all of it")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for all rows, such as rounds=10; or another PAPER/TABLE"
    )
    parser.add_argument("--list", action="store_true", help="every table and figure of the papers, with its state")
    parser.add_argument(
        "--rows", action="append", default=[], metavar="PATTERN", help="rows whose name is or matches this; repeatable"
    )
    seeds_option(parser)
    parser.add_argument("--quick", action="store_true", help="on the embedded digits: minutes on a CPU")
    parser.add_argument("--jobs", type=positive_count, default=1, metavar="N", help="rows at once; a GPU holds several")
    parser.add_argument(
        "--minutes",
        type=positive_number,
        metavar="N",
        help="stop then; the same command goes on with rows that were under way",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="choose every row's options on validation rows, by the table's [tuning]; writes results",
    )
    parser.add_argument("--write", action="store_true", help="put figures into the results, tables into the pages")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="folder of the run folders")
    parser.add_argument("--folder", type=Path, help="folder of tables (default: experiments, here or of the checkout)")
    device_option(parser)
    data_option(parser)
    quiet_option(parser)


def _reproduce(options: Any) -> None:
    from hardy.reproduce.definition import find_folder
    from hardy.reproduce.listing import listing, write_pages

    folder = find_folder(options.folder)
    words = [*filter(None, [options.table]), *options.overrides]
    overrides = [word for word in words if "=" in word]
    tables = [word for word in words if "=" not in word]
    if options.list:
        print("\n\n".join(listing(folder, name) for name in tables or [""]))
        return
    if tables:
        failed = _run(options, folder, tables, overrides)
    elif overrides or options.rows or not options.write:
        raise HardyError(
            "no table is named. `hardy reproduce --list` names them all; `--write` alone writes the pages."
        )
    else:
        failed = []
    if options.write:
        for path in write_pages(folder):
            print(f"written: {path}")
    if failed:
        raise HardyError(f"{len(failed)} rows could not be run: " + "; ".join(failed))


def _run(options: Any, folder: Path, names: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Runs the rows and prints their tables; what could not be run, in words."""
    from hardy.reproduce.published_pages import score, shown_score, table_markdown
    from hardy.reproduce.records import record_file, write_record
    from hardy.reproduce.row_jobs import run_jobs
    from hardy.reproduce.row_runs import plan_rows

    if options.tune:
        return _tune(options, folder, names, overrides)
    device = [f'engine.device="{options.device}"'] if options.device else []
    tables, jobs = plan_rows(
        folder,
        names,
        patterns=options.rows,
        seeds=options.seeds,
        quick=options.quick,
        out=options.out,
        overrides=(*overrides, *device),
        data=options.data,
    )
    found: dict[str, list[Any]] = {table.path: [] for table in tables}
    by_path, failed, left = {table.path: table for table in tables}, [], len(jobs)
    alone = options.jobs == 1 and options.minutes is None
    for job, record in run_jobs(jobs, options.jobs, quiet=options.quiet or not alone, minutes=options.minutes):
        table, left = by_path[job.table], left - 1
        if isinstance(record, str):
            failed.append(f"{job.table}, {job.row}: {record}")
            print(f"{job.table}: {job.row}: failed: {record}", flush=True)
            continue
        found[job.table].append(record)
        if options.write:
            write_record(record_file(table, record), record)
        columns = table.columns_of(quick=options.quick)
        scores = {column: shown_score(score([record], column), table.unit) for column in columns}
        words = ", ".join(f"{column} {value.removesuffix(' (1)')}" for column, value in scores.items() if value)
        print(f"{job.table}: {job.row}, seed {record['seed']}: {words}", flush=True)
    if left:
        print(f"\nNot finished in {options.minutes:g} minutes: {left} of {len(jobs)} rows. The same command goes on.")
    for table in tables:
        if found[table.path]:
            print(f"\n{table.title}\n\n{table_markdown(table, found[table.path], quick=options.quick)}")
    return failed


def _tune(options: Any, folder: Path, names: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Runs every setting of the rows and stores what is chosen; what could not be run, in words."""
    from hardy.reproduce.definition import find_table
    from hardy.reproduce.records import Record
    from hardy.reproduce.row_jobs import run_jobs
    from hardy.reproduce.row_runs import plan_rows
    from hardy.reproduce.row_tuning import choose_setting, row_settings, write_choice

    if overrides or options.seeds > 1:
        raise HardyError(
            "--tune takes the table as it is, on the seed of its [tuning]: leave out --seeds and key=value. Overrides "
            "for tuning alone belong into [tuning] set."
        )
    device = (f'engine.device="{options.device}"',) if options.device else ()
    _, jobs = plan_rows(
        folder,
        names,
        patterns=options.rows,
        seeds=1,
        quick=options.quick,
        out=options.out,
        overrides=device,
        data=options.data,
        tune=True,
    )
    found: dict[tuple[str, str], dict[tuple[str, ...], Record]] = {}
    failed, left = [], len(jobs)
    for job, record in run_jobs(jobs, options.jobs, quiet=options.quiet or options.jobs > 1, minutes=options.minutes):
        words, left = f"{job.table}: {job.row}, {', '.join(job.setting or ())}", left - 1
        if isinstance(record, str):
            failed.append(words)
            print(f"{words}: failed: {record}", flush=True)
            continue
        shown = ", ".join(f"{name} {100 * figure['mean']:.1f}" for name, figure in record["figures"].items())
        print(f"{words}: {f'{shown} on validation rows' if shown else record['failed']}", flush=True)
        table, own = find_table(folder, job.table), found.setdefault((job.table, job.row), {})
        own[job.setting or ()] = record
        settings = row_settings(table, job.row)
        if len(own) == len(settings):
            choice = choose_setting({setting: own[setting] for setting in settings}, quick=options.quick)
            print(f"{job.table}: {job.row}: {', '.join(choice['chosen'])}; {write_choice(table, choice)}", flush=True)
    if left:
        print(f"\nNot finished in {options.minutes:g} minutes: {left} of {len(jobs)} runs. The same command goes on.")
    return failed


COMMAND = Command(
    name="reproduce",
    words="repeat a published table or figure, with its noise beside it",
    declare=_declare,
    call=_reproduce,
)
