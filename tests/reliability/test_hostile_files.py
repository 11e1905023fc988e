"""Files from strangers: nothing is written outside a run folder, nothing small unpacks to all memory, and every mistake
is one line with exit code 2."""

import bz2
import gzip
import hashlib
import html
import io
import json
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from small_run import GIVEN, start

import hardy
from hardy.cli import main
from hardy.core.files import append, disk, write_atomic
from hardy.core.json_files import read_json, read_sealed, sealed, write_sealed
from hardy.data import readers
from hardy.data.table_reader import table_columns
from hardy.deploy import OnnxPredictor
from hardy.deploy.onnx_file import open_onnx
from hardy.deploy.onnx_runtime import _names_other_files
from hardy.errors import HardyError
from hardy.report.run_page import write_report

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    start(folder)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


LINKED = ("metrics.jsonl", ".lock", "report.html", "summary.json", "clients.json", ".evaluation.lock", "config.toml")


@pytest.mark.parametrize("name", [*LINKED, "pictures/attack x.png"])
def test_no_link_is_followed_out_of_a_run_folder(run, tmp_path, name):
    outside = tmp_path / "precious"
    content = (run / name).read_bytes() if (run / name).exists() else b"precious"
    outside.write_bytes(content)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside)
    before = sorted(tmp_path.iterdir())
    for call in (hardy.resume, lambda folder, **given: hardy.evaluate(hardy.load(folder, **GIVEN), "fgsm")):
        with pytest.raises(HardyError, match=r"is a link; a run folder holds plain files"):
            call(run, **GIVEN, quiet=True)
    assert outside.read_bytes() == content and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["checkpoint", "best", "pictures", "tensorboard"])
def test_no_folder_that_is_a_link_is_written_to(run, tmp_path, name):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "attack me.png").write_bytes(b"mine")
    if (run / name).exists():
        shutil.rmtree(run / name)
    (run / name).symlink_to(tmp_path / "outside")
    with pytest.raises(HardyError, match="is a link"):
        hardy.resume(run, **GIVEN, quiet=True)
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["attack me.png"]


@pytest.mark.parametrize("kind", ["seeds", "sweep"])
def test_no_folder_of_runs_leads_outside(tmp_path, kind, capsys):
    """A run that was not begun would be written where the link leads."""
    many, outside = tmp_path / "many", tmp_path / "outside"
    many.mkdir()
    outside.mkdir()
    name = {"seeds": "seed-0", "sweep": "setting-1"}[kind]
    (many / name).symlink_to(outside)
    (many / "experiment.toml").write_text("rounds = 1\n")
    settings = {"seeds": [0]} if kind == "seeds" else {"seeds": 1, "settings": [{"folder": name, "overrides": ["a=1"]}]}
    write_sealed(many / f"{kind}.json", settings)
    assert main(["resume", str(many), "--quiet"]) == 2
    assert f"{name} is a link; a run folder holds plain files" in capsys.readouterr().err
    assert not list(outside.iterdir())


def test_a_pipe_is_not_waited_for(run):
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(HardyError, match="is no plain file"):
        hardy.resume(run, **GIVEN, quiet=True)


def test_files_are_not_written_through_links(tmp_path):
    (tmp_path / "outside").write_bytes(b"precious")
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(HardyError, match="It is a link"), disk("link"):
        append(tmp_path / "link", b"x")
    write_atomic(tmp_path / "link", b"new")  # takes the place of the link
    assert (tmp_path / "outside").read_bytes() == b"precious" and (tmp_path / "link").read_bytes() == b"new"


@pytest.mark.parametrize("name", ["../../x", "..", "a/b", "a\\\\b", "", "a\\u001b[2Jb", "x" * 101])
def test_names_cannot_leave_the_folder_of_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text(f'name = "{name}"\n')
    assert main(["run", "bad.toml"]) == 2
    said = capsys.readouterr().err
    assert "it names a folder in runs/" in said and "\x1b" not in said and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bad.toml"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[data]\nclients = 1000000000", "data.clients is 1000000000; it must be at most 1,000,000"),
        ('[engine]\nname = "flower"\n[network]\nclients = 1000000000', "network.clients is 1000000000"),
        (f"x = {DEEP}", "is not valid TOML"),
        ('name = "\x00"', "is not valid TOML"),
        ("rounds = 1e400", "rounds is inf"),
        (f"rounds = {'9' * 5000}", "not valid TOML"),
        (f"rounds = '{'9' * 100_000}'", "rounds is '999"),
    ],
)
def test_hostile_experiments_are_one_line(tmp_path, capsys, text, told):
    (tmp_path / "bad.toml").write_text(text)
    assert main(["run", str(tmp_path / "bad.toml"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1 and not (tmp_path / "out").exists()
    assert len(said) < 5000


def bomb(path: Path, packed: bytes) -> Path:
    path.write_bytes(packed)
    assert len(packed) < 2_000_000
    return path


def zeros_gz(size: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([packer.compress(bytes(2**20)) for _ in range(size // 2**20)]) + packer.flush()


def zeros_bz2(size: int) -> bytes:
    packer = bz2.BZ2Compressor()
    return b"".join([packer.compress(bytes(2**20)) for _ in range(size // 2**20)]) + packer.flush()


def zeros_npz(size: int) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in readers.SPLITS:
            head = io.BytesIO()
            np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (size // 4,)})
            with archive.open(f"{name}.npy", "w") as entry:
                entry.write(head.getvalue())
                for _ in range(size // 4 // 2**20):
                    entry.write(bytes(2**20))
    return held.getvalue()


def zeros_mat(size: int) -> bytes:
    packed = zlib.compress(bytes(size), 9)
    return b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM" + struct.pack("<II", 15, len(packed)) + packed


@pytest.mark.parametrize(
    ("name", "packed", "read"),
    [
        ("labels.gz", zeros_gz(2**27), readers.idx),
        ("labels.bz2", zeros_bz2(2**27), readers.idx),
        ("usps.bz2", zeros_bz2(2**27), readers.usps_libsvm),
        ("data.npz", zeros_npz(2**27), readers.npz_splits),
        ("train.mat", zeros_mat(2**27), readers.svhn_matlab),
    ],
)
def test_small_files_do_not_unpack_to_all_memory(tmp_path, name, packed, read):
    with pytest.raises(HardyError, match=r"its [\d,]+ bytes unpack to more than 67,108,864"):
        read(bomb(tmp_path / name, packed))


def test_small_tables_do_not_unpack_to_all_memory(tmp_path):
    """A column of a table is as wide as its longest cell, and a Parquet file tells how often a value comes once."""
    wide = tmp_path / "wide.csv"
    wide.write_text("label,a\n" + "0,1\n" * 20_000 + "1," + "1" * 100_000 + "\n")
    long = tmp_path / "long.parquet"
    if parquet := _parquet():
        pyarrow, write = parquet
        write(pyarrow.table({"label": np.zeros(10**7, np.int64), "a": np.zeros(10**7)}), long)
    for path in (wide, *([long] if parquet else [])):
        assert path.stat().st_size < 500_000
        with pytest.raises(HardyError, match=r"its [\d,]+ bytes unpack to more than 67,108,864"):
            table_columns(path)
    (tmp_path / "plain.csv").write_text("label,a\n" + "0,1\n" * 20_000)
    assert table_columns(tmp_path / "plain.csv")["a"].shape == (20_000,)


def _parquet():
    """pyarrow and what writes a table, where they are installed."""
    try:
        import pyarrow
        from pyarrow.parquet import write_table
    except ImportError:
        return None
    return pyarrow, write_table


def test_what_is_packed_as_data_are_is_read(tmp_path):
    labels = np.arange(200, dtype=np.uint8)
    content = b"\0\0\x08\x01" + struct.pack(">I", 200) + labels.tobytes()
    (tmp_path / "a.gz").write_bytes(gzip.compress(content))
    (tmp_path / "b.bz2").write_bytes(bz2.compress(content))
    assert all((readers.idx(tmp_path / name) == labels).all() for name in ("a.gz", "b.bz2"))


def test_a_pickle_cannot_ask_for_all_memory(tmp_path):
    (tmp_path / "batch").write_bytes(b"\x80\x02Nr" + struct.pack("<I", 2**31) + b".")
    with pytest.raises(HardyError, match="slots of memory"):
        readers.cifar_python(tmp_path / "batch", b"labels")
    (tmp_path / "batch").write_bytes(pickle.dumps(os.system))
    with pytest.raises(HardyError, match="do not trust it"):
        readers.cifar_python(tmp_path / "batch", b"labels")


@pytest.mark.parametrize("text", [DEEP, "{", "[]", "\xff", '{"a": ' + "9" * 5000 + "}", '{"a": NaN'])
def test_malformed_json_is_one_line(tmp_path, text):
    (tmp_path / "a.json").write_text(text, "latin-1")
    with pytest.raises(HardyError) as error:
        read_json(tmp_path / "a.json", dict, "Remove it.")
    assert str(error.value).endswith("Remove it.") and "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize(
    "summary",
    [
        {"rounds": "many"},
        {"standard_accuracy": 5},
        {"standard_accuracy": {"by_domain": [1], "by_client": {"a": 1}}},
        {"robust_accuracy": "x", "best": [1]},
        {"versions": [1], "seconds": {}},
        {"name": None, "files_sha256": 3},
    ],
)
def test_figures_that_no_run_writes_are_one_line(run, summary, capsys):
    whole = json.loads((run / "summary.json").read_text())
    write_sealed(run / "summary.json", {**{k: v for k, v in whole.items() if k != "sha256"}, **summary})
    assert main(["compare", str(run), "--out", str(run / "c.html")]) in (0, 2)
    said = capsys.readouterr().err
    assert said.count("\n") <= 1
    try:
        write_report(run)
    except HardyError as error:
        assert ("no run writes" in str(error) or "was changed" in str(error)) and "\n" not in str(error)


def test_rounds_that_would_fill_the_memory_are_refused(run):
    (run / "metrics.jsonl").write_text('{"round": 1}\n{"round": 1000000000000}\n')
    whole = json.loads((run / "summary.json").read_text())
    write_sealed(run / "summary.json", {"name": whole["name"], "rounds": 10**12})
    with pytest.raises(HardyError, match="2 lines, but rounds from 1 to 1000000000000"):
        write_report(run)


NASTY = "<img src=x onerror=alert(1)>\x1b]0;owned\x07\x1b[2J"


def test_words_from_files_reach_neither_the_page_nor_the_terminal_as_code(run, capsys):
    whole = {k: v for k, v in json.loads((run / "summary.json").read_text()).items() if k != "sha256"}
    figures = {**whole["standard_accuracy"], "by_domain": {NASTY: 0.5}}
    whole |= {"name": NASTY, "method": NASTY, "engine": NASTY, "standard_accuracy": figures}
    write_sealed(run / "summary.json", {**whole, "robust_accuracy": {NASTY: figures}, "versions": {NASTY: NASTY}})
    flag = dict.fromkeys(("name", "client", "message", "advice"), NASTY)
    write_sealed(run / "evaluation.json", {"provenance": {"round": 3}, "flags": [flag], "robust_accuracy": {NASTY: {}}})
    page = write_report(run).read_text("utf-8")
    assert "<img src=x" not in page and page.count(html.escape("<img src=x")) >= 8 and "\x1b" not in page
    assert main(["compare", str(run), "--out", str(run / "c.html")]) == 0
    assert "\x1b" not in capsys.readouterr().out and "<img src=x" not in (run / "c.html").read_text()


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


TENSOR = message(13, message(1, b"location") + message(2, b"/etc/passwd")) + b"\x70\x01"
WAYS = {
    "initialiser": message(7, message(5, TENSOR)),
    "constant": message(7, message(1, message(5, message(5, TENSOR)))),
    "list in an attribute": message(7, message(1, message(5, message(10, TENSOR)))),
    "branch of an if": message(7, message(1, message(5, message(6, message(5, TENSOR))))),
    "sparse": message(7, message(15, message(1, TENSOR))),
    "function": message(25, message(7, message(5, message(5, TENSOR)))),
    "location alone": message(7, message(5, b"\x70\x01")),
}


@pytest.mark.parametrize("way", WAYS)
def test_onnx_files_that_take_tensors_from_other_files_are_refused(tmp_path, way):
    content = WAYS[way]
    (tmp_path / "m.base1.onnx").write_bytes(content)
    base = {"file": "m.base1.onnx", "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {"format": 1, "classes": ["a"], "robustness": None, "widths": [1.0], "widest": 1.0, "bases": [base]}
    (tmp_path / "m.json").write_text(json.dumps(manifest))
    with pytest.raises(HardyError, match=r"takes tensors from other files \(external data\)"):
        OnnxPredictor(tmp_path / "m.json")


@pytest.mark.parametrize("way", WAYS)
def test_nor_are_those_that_come_without_a_manifest(tmp_path, way, capsys):
    """`hardy evaluate model.onnx --data x.npz` takes files from anywhere."""
    (tmp_path / "m.onnx").write_bytes(WAYS[way])
    with pytest.raises(HardyError, match=r"m\.onnx takes tensors from other files \(external data\)"):
        open_onnx(tmp_path / "m.onnx")
    (tmp_path / "m.onnx").write_bytes(b"\x07" + b"\x1b[2J" * 9)
    with pytest.raises(HardyError, match=r"m\.onnx is no ONNX file") as error:
        open_onnx(tmp_path / "m.onnx")
    assert "\x1b" not in str(error.value)


def test_onnx_files_of_their_own_are_not_refused():
    inside = message(7, message(5, message(9, b"1234") + b"\x70\x00"))
    assert not _names_other_files(inside)
    with pytest.raises(ValueError, match="cut short"):
        _names_other_files(inside[:-3])


@pytest.mark.parametrize(
    "manifest",
    [
        DEEP,
        "[]",
        '{"format": 1}',
        '{"format": [1]}',
        '{"format": 1, "classes": 3, "robustness": 0, "widths": [], "widest": "x", "bases": []}',
        '{"format": 1, "classes": [], "robustness": 0, "widths": [1], "widest": 1, "bases": [{"file": "../x"}]}',
        '{"format": 1, "classes": [], "robustness": 0, "widths": [1], "widest": 1, "bases": []}',
    ],
)
def test_malformed_manifests_are_one_line(tmp_path, manifest):
    (tmp_path / "m.json").write_text(manifest)
    with pytest.raises(HardyError) as error:
        OnnxPredictor(tmp_path / "m.json")
    assert "\n" not in str(error.value) and "m.json" in str(error.value)


LIMITED = """
import resource, sys
from hardy.cli import main
import hardy.runs.api, hardy.cli.tables
resource.setrlimit(resource.{limit}, ({value}, {value}))
words = ["rounds=1", "data.limit=20", "evaluation.every=1", *{more!r}]
sys.exit(main(["run", "demo", "--alone", *words, "--out", {out!r}]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "value", "more", "told"),
    [
        ("RLIMIT_NOFILE", 5, [], "Too many open files"),
        ("RLIMIT_FSIZE", 2000, [], "File too large"),
        ("RLIMIT_AS", 6 * 10**9, ["model.width=400"], "memory"),
    ],
)
def test_limits_end_in_one_line(tmp_path, limit, value, more, told):
    code = LIMITED.format(limit=limit, value=value, more=more, out=str(tmp_path / "out"))
    code = f"import signal; signal.signal({int(signal.SIGXFSZ)}, signal.SIG_IGN)\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert told in done.stderr.splitlines()[-1], done.stderr[-2000:]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "hardy: out of memory."),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "hardy: out of memory"),
        (OSError(24, "Too many open files", "x.png"), "hardy: x.png: Too many open files. Raise the limit"),
        (OSError(28, "No space left on device", "x.png"), "hardy: x.png: No space left on device. Free space"),
    ],
)
def test_what_the_machine_lacks_is_one_line(monkeypatch, capsys, error, told):
    def lacking(*_, **__):
        raise error

    monkeypatch.setattr("hardy.data.sources.describe", lacking)
    assert main(["data"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(told) and said.count("\n") == 1


def test_sealed_files_can_be_written_in_another_form(tmp_path):
    (tmp_path / "a.json").write_bytes(sealed({"a": [1, 2.5], "b": {"c": None}}))
    again = json.dumps(json.loads((tmp_path / "a.json").read_text()), indent=8)
    (tmp_path / "a.json").write_text(again)
    assert read_sealed(tmp_path / "a.json", "") == {"a": [1, 2.5], "b": {"c": None}}
