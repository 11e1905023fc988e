"""Where clients' tensors lie changes no number: in memory, or in files of rows that a killed process leaves behind."""

import dataclasses
import shutil

import pytest
import torch

import hardy
from conftest import assert_close, everything, experiment, federation, fit, net, shortened, with_momentum
from hardy import papers
from hardy.config import CheckpointChoice
from hardy.core import disk_store
from hardy.core.cohort import Cohort
from hardy.core.disk_store import DiskStore
from hardy.core.partition import Placement
from hardy.core.store import MemoryStore, Slot
from hardy.errors import HardyError
from hardy.faults.injection import Faults
from hardy.runs.checkpoint import load_checkpoint
from hardy.runs.prepare import prepare

HALF = {"cohort": Cohort(fraction=0.5), "faults": Faults(dropped=0.1, crashed=0.1, late=0.1)}
ON_DISK = dataclasses.replace(experiment().engine, store="disk")
IN_MEMORY = dataclasses.replace(ON_DISK, store="memory")
KEEPING = with_momentum(papers.scaffold(norm=papers.fedbn().norm))


def kinds(sizes=(10, 7, 12, 5)):
    data = federation(sizes)
    clients = (dataclasses.replace(c, kind="ST" if n % 2 else "AT") for n, c in enumerate(data.clients))
    return dataclasses.replace(data, clients=tuple(clients))


FEDRBN = with_momentum(shortened(papers.fedrbn()))


def few(givers):
    """FedRBN in which so many AT clients give."""
    return with_momentum(shortened(papers.fedrbn(givers=givers)))


def own_tensors(method):
    plan = prepare(experiment(), method=method, model=net, data=federation()).engine.plan
    return plan.names(Placement.PRIVATE) + plan.names(Placement.REPORTED)


def test_on_disk_and_in_memory_agree(method):
    if not own_tensors(method):
        pytest.skip("clients keep nothing")
    memory, disk = (fit(method, rounds=2, engine=engine, **HALF) for engine in (IN_MEMORY, ON_DISK))
    assert isinstance(disk.engine.store, DiskStore) and isinstance(memory.engine.store, MemoryStore)
    assert memory.figures.latest == disk.figures.latest
    if method.norm.exchanges:  # a few rows at a time are other sums in another order
        assert_close(everything(memory), everything(disk), 1e-9)
    else:
        assert_close(everything(memory), everything(disk), 0)


def test_statistics_that_are_exchanged_when_they_are_read_are_the_same():
    memory, disk = (fit(FEDRBN, rounds=3, engine=engine, data=kinds(), **HALF) for engine in (IN_MEMORY, ON_DISK))
    assert_close(everything(memory), everything(disk), 1e-9)
    name = next(n for n in memory.state.reported if n.endswith("adversarial.mean"))
    poor = memory.state.reported[name][[1, 3]]
    assert not torch.equal(poor, torch.zeros_like(poor))  # somebody was given something


def test_at_most_so_many_give_and_those_heard_last():
    def reported(givers):
        return fit(few(givers), rounds=2, engine=ON_DISK, data=kinds((6, 6, 6, 6, 6, 6))).state.reported

    one, all_three = reported(1), reported(3)
    name = next(n for n in one if n.endswith("adversarial.mean"))
    poor = [Slot(1), Slot(3), Slot(5)]
    given = one.read(poor)[name]
    assert (given == one.read([Slot(4)])[name]).all()  # the AT client that answered last
    assert not torch.equal(given, all_three.read(poor)[name])


def test_how_many_give_is_refused_in_memory():
    with pytest.raises(HardyError, match=r"engine\.store"):
        fit(few(1), rounds=1, data=kinds())


def test_disk_is_refused_where_clients_keep_nothing():
    with pytest.raises(HardyError, match="keep nothing"):
        fit(papers.fedavg(), rounds=1, engine=ON_DISK)


@pytest.mark.parametrize("method", [KEEPING, FEDRBN], ids=["scaffold", "fedrbn"])
def test_resume_from_rows_on_disk_is_exact(method, tmp_path, monkeypatch):
    """Stopped after two rounds, with rows of a third on disk that no checkpoint knows; and compacted on the way."""
    monkeypatch.setattr(disk_store, "_SPARE", -4)
    data = kinds() if method is FEDRBN else federation()
    options = {"data": data, "engine": ON_DISK, "checkpoint": CheckpointChoice(every=1), **HALF}
    whole = fit(method, rounds=5, out=tmp_path / "whole", **options)
    fit(method, rounds=2, out=tmp_path / "broken", **options)
    for file in (tmp_path / "broken" / "clients").rglob("*.rows"):
        with file.open("ab") as rows:
            rows.write(b"torn")
    config = tmp_path / "broken" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 5"))
    again = hardy.resume(tmp_path / "broken", method=method, model=net, data=data, quiet=True)
    assert_close(everything(whole), everything(again), 0)
    assert whole.figures.latest == again.figures.latest
    loaded = hardy.load(tmp_path / "broken", method=method, model=net, data=data)
    assert_close(everything(whole), everything(loaded), 0)
    assert whole.engine.store.file.number > 1  # it was compacted
    files = list((tmp_path / "whole" / "clients" / "private").iterdir())
    assert len(files) <= 3  # of two checkpoints and the best round


def rows_of(folder):
    (file,) = (folder / "clients" / "private").glob("*.rows")
    return file


def test_damaged_rows_are_refused_or_the_checkpoint_before_is_used(tmp_path):
    folder = tmp_path / "run"
    fit(KEEPING, rounds=3, out=folder, engine=ON_DISK, checkpoint=CheckpointChoice(every=1), **HALF)
    good, _ = load_checkpoint(folder / "checkpoint")
    content = rows_of(folder).read_bytes()
    for at, said in ((len(content) - 1, "using the one before it"), (3, "no usable checkpoint")):
        copy = shutil.copytree(folder, tmp_path / f"copy-{at}")
        damaged = bytearray(content)
        damaged[at] ^= 1
        rows_of(copy).write_bytes(damaged)
        if at > 3:
            found, remarks = load_checkpoint(copy / "checkpoint")
            assert said in remarks[0] and "checksum of 000001.rows" in remarks[0]
            assert found.server.round == good.server.round - 1
        else:
            with pytest.raises(HardyError, match=said):
                load_checkpoint(copy / "checkpoint")


def test_rows_that_no_checkpoint_knows_are_not_read(tmp_path):
    """Of a run that died before its first checkpoint, and of one whose checkpoint names none yet."""
    (tmp_path / "000001.rows").write_bytes(b"torn")
    rows = {"mean": torch.ones(1, 4), "count": torch.tensor([2])}
    fresh = store()
    fresh.place(tmp_path)
    first, told = store().saved()
    opened = DiskStore.opened(tmp_path, first, told)
    for held in (fresh, opened):
        held.write([Slot(7)], rows)
        assert held.read([Slot(7)])["count"].item() == 2


def test_rows_of_a_temporary_file_go_where_a_run_keeps_them(tmp_path):
    (tmp_path / "000004.rows").write_bytes(b"of an earlier checkpoint")
    held = store()
    held.write([Slot(7)], {"mean": torch.ones(1, 4), "count": torch.tensor([2])})
    held.place(tmp_path)
    held.write([Slot(3)], {"mean": torch.ones(1, 4), "count": torch.tensor([5])})
    assert held.read([Slot(7), Slot(3)])["count"].tolist() == [2, 5]
    assert held.saved()[1]["number"] == 5 and (tmp_path / "000005.rows").stat().st_size == 2 * 32


def test_cut_rows_are_refused(tmp_path):
    folder = tmp_path / "run"
    fit(KEEPING, rounds=1, out=folder, engine=ON_DISK)
    rows_of(folder).write_bytes(rows_of(folder).read_bytes()[:-1])
    with pytest.raises(HardyError, match="bytes, "):
        load_checkpoint(folder / "checkpoint")


def store(clients=10**6):
    return DiskStore({"mean": torch.zeros(1, 4), "count": torch.ones(1, dtype=torch.int64)}, clients)


def test_clients_that_never_took_part_occupy_nothing(tmp_path):
    held = store()
    held.place(tmp_path)
    held.write([Slot(7), Slot(999_999)], {"mean": torch.ones(2, 4), "count": torch.tensor([2, 3])})
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) == 2 * (8 + 16 + 8)
    rows = held.read([Slot(999_999), Slot(500_000), Slot(7)])
    assert rows["count"].tolist() == [3, 1, 2] and rows["mean"].sum(1).tolist() == [4, 0, 4]


def test_a_version_stays_as_it_is_until_another_one_is_written_from_it():
    first = store(3)
    first.write([Slot(0)], {"mean": torch.ones(1, 4), "count": torch.tensor([5])})
    second = first.written([Slot(0), Slot(1)], {"mean": torch.full((2, 4), 2.0), "count": torch.tensor([6, 6])})
    assert first["count"].flatten().tolist() == [5, 1, 1] and second["count"].flatten().tolist() == [6, 6, 1]
    third = first.written([Slot(2)], {"mean": torch.full((1, 4), 3.0), "count": torch.tensor([7])})
    assert third["count"].flatten().tolist() == [5, 1, 7] and first["count"].flatten().tolist() == [5, 1, 1]


def test_tensors_of_all_clients_that_are_too_large_for_memory_are_refused(monkeypatch):
    monkeypatch.setattr(disk_store, "_LARGEST", 2**20)
    with pytest.raises(HardyError, match="1,000,000 clients"):
        store()["mean"]
