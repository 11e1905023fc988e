"""Tables on privacy name each row's ε: it is the account's, and dp-accounting's within one per cent."""

import os
import re
import runpy
from math import inf
from pathlib import Path

import pytest

import hardy
from hardy.core.account import ORDERS, Mechanism
from hardy.core.spending import privacy_spent
from hardy.reproduce.definition import find_table, read_table, table_files
from hardy.reproduce.row_runs import RowJob, row_experiment
from hardy.runs.prepare import prepare

FOLDER = Path(__file__).parents[2] / "experiments"
NAMED = re.compile(r"ε = ([\d,.]+|∞)")
ROWS = [
    (table.path, row)
    for table in map(read_table, table_files(FOLDER, "private"))
    for row in table.rows
    if NAMED.search(row)
]


def spent(path, row):
    """What the account says of a row at its end, one unit alone being protected."""
    table = find_table(FOLDER, path)
    if table.program:
        base = runpy.run_path(str(table.folder / table.program))["BASE"]
        chosen = hardy.read("demo", [*base, *table.rows[row].options["set"]])
    else:
        chosen, _, _ = row_experiment(table, RowJob(folder=FOLDER, table=path, row=row, seed=0, out=Path("unused")))
    if chosen.data.source == "digits" and not os.environ.get("HARDY_DATA"):
        pytest.skip("no digits (HARDY_DATA)")
    (found,) = privacy_spent(prepare(chosen).server, chosen.rounds)
    return found


def named(row):
    (text,) = NAMED.findall(row)
    return inf if text == "∞" else float(text.replace(",", ""))


def checked(found):
    """The same by dp-accounting."""
    event = pytest.importorskip("dp_accounting.dp_event", reason="dp-accounting is not installed")
    from dp_accounting.privacy_accountant import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    mechanisms = [Mechanism(unit=found["unit"], **one) for one in found["mechanisms"]]
    added = all(one.sampling == "poisson" for one in mechanisms)
    whole = added or all(one.share == 1 for one in mechanisms)
    orders = ORDERS if whole else [order for order in ORDERS if order >= 2 and order == int(order)]
    theirs = RdpAccountant(list(orders), NeighboringRelation["ADD_OR_REMOVE_ONE" if added else "REPLACE_ONE"])
    for one in mechanisms:
        summed = event.GaussianDpEvent(one.noise)
        if one.share < 1 and added:
            summed = event.PoissonSampledDpEvent(one.share, summed)
        elif one.share < 1:
            summed = event.SampledWithoutReplacementDpEvent(9000, round(9000 * one.share), summed)
        theirs.compose(summed, one.times)
    return theirs.get_epsilon(found["delta"])


def test_there_are_such_rows():
    assert len(ROWS) > 10


@pytest.mark.parametrize(("path", "row"), ROWS, ids=[f"{path}: {row}" for path, row in ROWS])
def test_a_row_is_worth_the_epsilon_of_its_name(path, row):
    found = spent(path, row)
    if named(row) == inf:
        assert found["epsilon"] is None
        return
    assert found["epsilon"] == pytest.approx(named(row), rel=0.01)


@pytest.mark.parametrize(("path", "row"), ROWS, ids=[f"{path}: {row}" for path, row in ROWS])
def test_dp_accounting_finds_the_same_epsilon(path, row):
    if named(row) < inf:
        assert checked(found := spent(path, row)) == pytest.approx(found["epsilon"], rel=0.01)
