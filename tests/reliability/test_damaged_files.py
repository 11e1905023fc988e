"""A damaged file is refused or named; it never gives other figures without a word."""

import json
import random
import shutil
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
from damage import damage_everything, damaged, node_state, reader, totals
from small_run import GIVEN, METHOD, OPTIONS, go_on, lines, outcome, same, start

import hardy
from conftest import federation, fit, net
from hardy import papers
from hardy.cli import main
from hardy.core.json_files import write_sealed
from hardy.core.state import ServerState
from hardy.errors import HardyError
from hardy.flower.memory import Memory
from hardy.runs import evaluate as evaluating
from hardy.runs.checkpoint import Checkpoint, load_checkpoint, rounds_in, save_checkpoint
from hardy.runs.profiles import Profile, remember, remembered


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    start(folder)
    hardy.evaluate(hardy.load(folder, **GIVEN), "fgsm@0.1", checks=False, quiet=True)
    return folder


@pytest.fixture
def run(run_folder, tmp_path):
    """A copy to damage."""
    return shutil.copytree(run_folder, tmp_path / "run")


def test_no_damaged_file_is_taken_for_whole(run_folder, tmp_path):
    counted = damage_everything(run_folder, tmp_path / "copy", 25)
    assert totals(counted)["silent"] == 0, counted
    assert {"config.toml", "metrics.jsonl", "summary.json", "evaluation.json", "clients.json"} <= counted.keys()
    assert sum(name.endswith("record.json") for name in counted) == 2  # of the newest checkpoint and of the best round
    assert totals(counted)["refused"] > 0.9 * sum(totals(counted).values())


def test_no_damaged_private_tensors_of_a_node_are_used(tmp_path):
    counted = damage_everything(node_state(tmp_path / "state"), tmp_path / "copy", 150)
    assert len(counted) == 2 and totals(counted)["silent"] == 0, counted


def test_another_way_to_write_a_record_is_no_other_content(run_folder, tmp_path):
    """Or the counts of damage would name harmless files silent ones."""
    run = shutil.copytree(run_folder, tmp_path / "run")
    path = max((run / "checkpoint").glob("round-*")) / "record.json"
    read, whole = reader(path), path.read_bytes()
    expected = repr(read(path))
    path.write_bytes(whole.replace(b": ", b":  ", 1))
    assert all(repr(read(path)) == expected for _ in range(5))


@pytest.mark.slow
def test_ten_thousand_damaged_files(run_folder, tmp_path):
    counted = damage_everything(run_folder, tmp_path / "copy", 1000, seed=1)
    assert sum(totals(counted).values()) >= 10_000 and totals(counted)["silent"] == 0, counted


def test_a_node_falls_back_to_the_round_before_and_says_so(tmp_path, caplog):
    node_state(tmp_path)
    memory = Memory(str(tmp_path), "abc", 0)
    newest = rounds_in(memory.folder)[2]
    (newest / "tensors.safetensors").write_bytes(b"")
    with caplog.at_level("WARNING", "flwr"):
        assert memory.before(9)["bn.mean"][0] == 1
    assert "client 0, private tensors: checkpoint round-000002 is torn or corrupted" in caplog.text
    for path in rounds_in(memory.folder).values():
        (path / "record.json").unlink()
    with pytest.raises(HardyError, match=r"all private tensors of client 0 .* are damaged; it does not start anew"):
        memory.before(9)


def test_a_node_does_not_take_the_tensors_of_another(tmp_path):
    node_state(tmp_path)
    (tmp_path / "abc" / "client-0").rename(tmp_path / "abc" / "client-1")
    with pytest.raises(HardyError, match=r"private tensors of .*'client': 0.*, not of .*'client': 1"):
        Memory(str(tmp_path), "abc", 1).before(3)


def test_no_damaged_list_of_nodes_is_used(tmp_path):
    profile = Profile(
        client=0, domain="a", kind="", capacity=1.0, train=5, validation=1, test=1, shape=(1, 8, 8), classes=("0", "1")
    )
    remember(tmp_path, "abc123", [profile])
    path, rng = tmp_path / "network.json", random.Random(0)
    whole = path.read_bytes()
    for _ in range(200):
        path.write_bytes(damaged(whole, rng)[1])
        with suppress(HardyError):
            assert remembered(tmp_path) == ("abc123", [profile])


def checkpoint(round: int, value: float = 0.0) -> Checkpoint:
    server = ServerState(round=round, shared={"w": torch.full((1, 2), value)}, reported={}, memory={})
    return Checkpoint(server=server, store={"c_i": torch.full((2,), value)}, figures={})


def test_rounds_sort_as_numbers(tmp_path):
    for round in (999_998, 999_999, 1_000_000, 1_000_001):
        save_checkpoint(tmp_path, checkpoint(round))
    assert list(rounds_in(tmp_path)) == [1_000_000, 1_000_001]
    assert load_checkpoint(tmp_path)[0].server.round == 1_000_001


@pytest.mark.parametrize(("group", "whose"), [("shared", ""), ("private", " of client 0")])
def test_a_state_that_is_not_finite_is_neither_saved_nor_loaded(tmp_path, group, whose):
    save_checkpoint(tmp_path, checkpoint(1))
    bad = checkpoint(2)
    (bad.server.shared["w"] if group == "shared" else bad.store["c_i"])[..., 0] = torch.nan
    with pytest.raises(
        HardyError, match=rf"round 2 left {group}/.*{whose} with .* not finite; it is not saved.*checkpoint is intact"
    ):
        save_checkpoint(tmp_path, bad)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hardy.runs.checkpoint._finite", lambda value: True)
        save_checkpoint(tmp_path, bad)
    found, remarks = load_checkpoint(tmp_path)
    assert found.server.round == 1 and "holds numbers that are not finite" in remarks[0]


def test_intact_is_said_only_where_there_is_a_checkpoint(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(HardyError, match=r"No space left on device.*There is no earlier checkpoint"):
        save_checkpoint(tmp_path / "new", checkpoint(1))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("rate = 0.1", "rate = 0.2", "training.rate was 0.1, is 0.2"),
        ("seed = 0", "seed = 1", "seed was 0, is 1"),
        ("rounds = 3", "rounds = 2", "rounds was 3, is 2"),
        ("[admission]", "[faults2]", "unknown key"),
        ("fraction = 0.5", "fraction = 1.0", "cohort.fraction was 0.5, is 1.0"),
    ],
)
def test_a_changed_configuration_is_refused_with_its_keys(run, old, new, told):
    path = run / "config.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(HardyError, match=told):
        hardy.resume(run, **GIVEN, quiet=True)


def test_an_emptied_configuration_is_refused_and_a_change_can_be_allowed(run):
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text("")
    with pytest.raises(HardyError, match=r"is not the experiment of its checkpoint: .* more keys\. Put back"):
        hardy.resume(run, **GIVEN, quiet=True)
    with pytest.raises(HardyError, match="is not the experiment"):
        hardy.load(run, **GIVEN)
    (run / "config.toml").write_text(text.replace("rounds = 3", "rounds = 4").replace("rate = 0.1", "rate = 0.2"))
    assert hardy.resume(run, **GIVEN, quiet=True, allow_change=True).state.round == 4
    assert hardy.load(run, **GIVEN).experiment.training.rate == 0.2  # the new checkpoint is of the new experiment


def test_missing_lines_are_named(run):
    path, whole = run / "metrics.jsonl", outcome(run)
    first, *_, last = path.read_text().splitlines(keepends=True)
    path.write_text(first + last)
    with pytest.raises(HardyError, match=r"metrics.jsonl was changed or damaged since the run finished"):
        hardy.evaluate(hardy.load(run, **GIVEN), "fgsm@0.1", checks=False, quiet=True)
    said = go_on(run)
    assert any("metrics.jsonl lacks 1 of 3 rounds: 2. They cannot be brought back" in line for line in said)
    assert [line["round"] for line in lines(run)] == [1, 3]
    path.write_text(first.replace('"round": 1', '"round": 1 ') + last)
    assert not same(whole, outcome(run))


def test_a_damaged_list_of_clients_is_written_anew(run):
    whole = (run / "clients.json").read_bytes()
    (run / "clients.json").write_bytes(whole.replace(b"even", b"evil"))
    assert "clients.json was missing, changed or damaged; it is written anew." in go_on(run)
    assert (run / "clients.json").read_bytes() == whole


def test_a_run_without_its_checkpoints_is_not_taken_for_a_trained_one(run):
    whole = outcome(run)
    shutil.rmtree(run / "checkpoint")
    with pytest.raises(HardyError, match="has no checkpoint, so its networks are untrained"):
        hardy.load(run, **GIVEN)
    assert any("has no checkpoint" in line for line in go_on(run))
    # the figures under attack were measured by hand, and are gone
    assert same({**whole, "summary": 0}, {**outcome(run), "summary": 0})


def test_a_checkpoint_of_another_run_is_refused(run, tmp_path):
    fit(METHOD, out=tmp_path / "other", **{**OPTIONS, "seed": 5})
    shutil.rmtree(run / "checkpoint")
    shutil.copytree(tmp_path / "other" / "checkpoint", run / "checkpoint")
    with pytest.raises(HardyError, match="seed was 5, is 0"):
        hardy.resume(run, **GIVEN, quiet=True)


def test_figures_that_were_changed_are_refused(run):
    summary = json.loads((run / "summary.json").read_text())
    summary["standard_accuracy"]["mean"] = 1.0
    (run / "summary.json").write_text(json.dumps(summary))
    assert main(["compare", str(run), "--out", str(run / "c.html")]) == 2
    said = []
    hardy.resume(run, **GIVEN, quiet=True, remark=said.append)
    assert any("summary.json was changed or damaged" in line for line in said)
    assert main(["compare", str(run), "--out", str(run / "c.html")]) == 0
    write_sealed(run / "summary.json", {"standard_accuracy": ["x"], "robust_accuracy": 5, "macs": "many"})
    assert main(["compare", str(run), "--out", str(run / "c.html")]) == 2


def test_evaluations_at_the_same_time_merge(tmp_path):
    given = {"method": papers.fedavg(), "model": net, "data": federation()}
    fit(papers.fedavg(), rounds=1, out=tmp_path / "run")
    first, second = (hardy.load(tmp_path / "run", **given) for _ in range(2))
    attacked = evaluating.ServedClients.attacked

    def meanwhile(self, *rest, **how):
        """While the first attack runs, another process finishes an evaluation of its own."""
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(evaluating.ServedClients, "attacked", attacked)
            hardy.evaluate(second, "pgd-2@0.1", checks=False, quiet=True)
        return attacked(self, *rest, **how)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(evaluating.ServedClients, "attacked", meanwhile)
        hardy.evaluate(first, "fgsm@0.1", checks=False, quiet=True)
    for name in ("evaluation.json", "summary.json"):
        stored = json.loads((tmp_path / "run" / name).read_text())["robust_accuracy"]
        assert set(stored) == {"fgsm@0.1", "pgd-2@0.1"}, name


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 2])
def test_four_processes_evaluate_at_the_same_time(tmp_path, seeds):
    few = ["rounds=1", "data.clients=1", "data.limit=20", "training.steps=1", "engine.device=cpu"]
    few += ["evaluation.threats=[]", "evaluation.checks=true"]
    assert main(["run", "demo", *few, "--seeds", str(seeds), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    threats = ("fgsm@0.01", "fgsm@0.02", "fgsm@0.03", "fgsm@0.04")
    words = [sys.executable, "-m", "hardy", "evaluate", str(tmp_path / "run"), "--no-checks", "--quiet", "--threats"]
    running = [subprocess.Popen([*words, threat], stdout=subprocess.DEVNULL) for threat in threats]
    assert [process.wait() for process in running] == [0] * 4
    for name in ("evaluation.json", "summary.json"):
        assert set(threats) == set(json.loads((tmp_path / "run" / name).read_text())["robust_accuracy"]), name
