"""Which differences `hardy compare` marks, and what it says of rows that are not alike."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from hardy.core.json_files import write_sealed
from hardy.report.compare import compare, write_comparison
from hardy.report.differences import difference, student


def stored(folder: Path, clients: list[float], *, seed: int = 0, data: str = "limit = 60", **summary: Any) -> Path:
    """A run folder with these accuracies of its clients."""
    folder.mkdir(parents=True)
    accuracy = {"mean": float(np.mean(clients)), "worst_client": min(clients), "by_domain": {}, "by_client": clients}
    whole = {"method": folder.name, "rounds": 2, "seed": seed, "seconds": 1.0, "bytes_up": 10, "macs": 10}
    write_sealed(folder / "summary.json", {**whole, "standard_accuracy": accuracy, **summary})
    (folder / "config.toml").write_text(f'[data]\nsource = "mini_digits"\n{data}\n')
    (folder / "clients.json").write_text(json.dumps([{"domain": "pen", "train": 9} for _ in clients]))
    return folder


def stored_seeds(folder: Path, means: list[float], **changes: Any) -> Path:
    for seed, mean in enumerate(means):
        stored(folder / f"seed-{seed}", [mean, mean], seed=seed, **changes)
    (folder / "seeds.json").write_text(json.dumps({"seeds": list(range(len(means)))}))
    return folder


def starred(folders: list[Path]) -> list[str]:
    """Names of the rows marked in the column of the mean."""
    return [row[0] for row in compare(folders).cells() if row[3].endswith("*")]


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 10, 11, 20, 49, 1000])
def test_quantiles_are_students(freedom):
    assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=0.01)


def test_the_verdict_is_that_of_a_paired_t_test(tmp_path):
    rng = np.random.default_rng(0)
    verdicts = set()
    for trial in range(40):
        a = rng.normal(0.7, 0.05, 6)
        b = a - rng.normal(0.02, 0.02, 6)
        folders = [stored(tmp_path / str(trial) / name, list(x)) for name, x in (("a", a), ("b", b))]
        found = difference(*compare(folders).rows, ("standard_accuracy", "mean"))
        known = stats.ttest_rel(a, b)
        assert found.mean == pytest.approx(np.mean(a - b)) and found.error == pytest.approx(stats.sem(a - b))
        assert found.beyond_chance == (known.pvalue < 0.05)
        verdicts.add((found.beyond_chance, tuple(map(bool, starred(folders)))))
    assert verdicts == {(True, (True,)), (False, ())}  # both happen; a mark only where the test says so


def test_one_run_each_is_paired_over_clients(tmp_path):
    clear = [stored(tmp_path / "a", [0.5, 0.6, 0.7, 0.8]), stored(tmp_path / "b", [0.6, 0.69, 0.81, 0.9])]
    assert starred(clear) == ["b"]
    shown = str(compare(clear)).splitlines()[4:]
    assert re.split(r"\s{2,}", shown[0]) == ["minus a", "pairs", "mean %", "worst client %"]
    assert re.split(r"\s{2,}", shown[1]) == ["b", "4 clients", "+10.0 ± 0.4 *", "–"]  # one worst client has no error
    noisy = [clear[0], stored(tmp_path / "c", [0.9, 0.3, 0.9, 0.9])]
    assert compare(noisy).rows and starred(noisy) == []  # 10 points more, within the noise


def test_seeds_are_paired_over_seeds(tmp_path):
    """Seeds vary by 20 points, the difference by half a point: pairing shows it, and deviations overlap."""
    a, b = stored_seeds(tmp_path / "a", [0.5, 0.6, 0.7]), stored_seeds(tmp_path / "b", [0.53, 0.635, 0.73])
    assert starred([a, b]) == ["b (3 seeds)"]
    assert "b (3 seeds)  3 seeds  +3.2 ± 0.2 *" in re.sub(r" {3,}", "  ", str(compare([a, b])))
    two = [stored_seeds(tmp_path / "two" / name, means) for name, means in (("a", [0.5, 0.6]), ("b", [0.6, 0.67]))]
    assert starred(two) == []  # 12.7 standard errors are asked of two seeds
    both = [*two, stored_seeds(tmp_path / "two" / "c", [0.1, 0.2])]
    assert starred(both) == ["a (2 seeds)", "b (2 seeds)"]  # c is worse; the other two cannot be told apart


def test_what_is_not_alike_is_said_and_not_marked(tmp_path):
    a = stored(tmp_path / "a", [0.1, 0.11, 0.1])
    for name, changes, line in (
        ("limit", {"data": "limit = 90"}, "not alike: data.limit: 60 (a); 90 (limit)"),
        (
            "split",
            {"data": 'limit = 60\nsplit = { name = "dirichlet" }'},
            "data.split.name: absent (a); dirichlet (split)",
        ),
        ("rounds", {"rounds": 3}, "not alike: rounds: 2 (a); 3 (rounds)"),
        ("seed", {"seed": 4}, "not alike: seeds: 0 (a); 4 (seed)"),
    ):
        other = stored(tmp_path / name, [0.9, 0.91, 0.9], **changes)
        assert line in str(compare([a, other]))
        assert starred([a, other]) == (["rounds"] if name == "rounds" else [])
        assert line.partition(": ")[2] in write_comparison([a, other], tmp_path / "c.html").read_text()
    other = stored(tmp_path / "python", [0.9, 0.91, 0.9])
    (other / "clients.json").write_text(json.dumps([{"domain": "pen", "train": 8}] * 3))
    assert "not alike: data: the rows of a (a); the rows of python (python)" in str(compare([a, other]))
    assert starred([a, other]) == []
    assert "not alike" not in str(compare([a, stored(tmp_path / "same", [0.2, 0.2, 0.2])]))


def test_unfinished_seeds_are_counted(tmp_path):
    folder = stored_seeds(tmp_path / "a", [0.5, 0.6, 0.7])
    (folder / "seed-1" / "summary.json").unlink()
    assert compare([folder]).cells()[0][0] == "a (2 of 3 seeds)"


def test_exact_counts_need_no_error(tmp_path):
    folders = [
        stored(tmp_path / name, [0.5, 0.5], bytes_up=size) for name, size in (("a", 1e6), ("b", 2e6), ("c", 1e6))
    ]
    assert [row[6] for row in compare(folders).cells()] == ["1.00 *", "2.00", "1.00 *"]
    assert [row[7] for row in compare(folders).cells()] == ["0.00", "0.00", "0.00"]  # equal for all is no news
