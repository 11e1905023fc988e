"""What a release is made of: the wheel, its metadata, pins, the Dockerfile, notebooks, completion."""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from hardy.cli import main
from hardy.version import VERSION

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())


def canonical(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


@pytest.mark.skipif(
    not (importlib.util.find_spec("build") and importlib.util.find_spec("hatchling")), reason="build is not installed"
)
def test_the_wheel_installs_and_runs(tmp_path):
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,), (source,) = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")
    assert wheel.name == f"hardy_fl-{VERSION}-py3-none-any.whl" and source.name == f"hardy_fl-{VERSION}.tar.gz"
    names = zipfile.ZipFile(wheel).namelist()
    assert {"hardy/py.typed", "hardy/bundled/demo.toml", "hardy/__main__.py"} <= set(names)
    metadata = zipfile.ZipFile(wheel).read(f"hardy_fl-{VERSION}.dist-info/METADATA").decode()
    core = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert sorted(core) == [f"Requires-Dist: {name}" for name in ("numpy>=1.26", "safetensors>=0.4", "torch>=2.6")]
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(installed)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    code = "import hardy, runpy, sys; print(hardy.__file__); sys.argv[1:] = ['--help']; runpy.run_module('hardy')"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={"PYTHONPATH": str(installed)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"{installed}/hardy/__init__.py") and "usage: hardy " in done.stdout


def test_the_name_is_one_everywhere():
    assert PROJECT["name"] == "hardy-fl"
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py"), *ROOT.glob("examples/**/*.*")]
    for page in pages:
        for name in re.findall(r"pip install (?:-\S+ )*'?\"?([\w-]+)", page.read_text("utf-8")):
            assert name != "hardy", f"{page}: the package is hardy-fl"


def test_metadata_caps_neither_torch_nor_numpy():
    assert not [need for need in PROJECT["dependencies"] if "<" in need or "==" in need]


def test_everything_the_development_environment_needs_is_pinned():
    """The pins hold for what is installed, and whatever a pinned package needs is pinned too."""
    wanted = [canonical(need) for need in PROJECT["dependencies"]]
    wanted += [
        canonical(need)
        for extra in ("dev", "images", "parquet", "flower", "export", "completion", "docs")
        for need in PROJECT["optional-dependencies"][extra]
    ]
    assert not {*wanted} - {"hardy-fl"} - PINS.keys()
    assert PINS["torch"] == "2.13.0"
    from packaging.requirements import Requirement

    for name, version in PINS.items():
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a leaner environment
        if found.version.partition("+")[0] != version:
            continue  # another set of versions: nothing to compare
        for text in found.requires or ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                present = importlib.util.find_spec(need.name.replace("-", "_")) is not None
                assert canonical(need.name) in PINS or not present, f"{name} needs {need.name}, which is not pinned"


def test_the_dockerfile_names_files_that_exist():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert {"src", "pyproject.toml", "constraints.txt"} <= set(copied)
    assert all((ROOT / word).exists() for word in copied)
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) <= allowed  # else it is not in the build's context
    needed = {PROJECT["readme"], *PROJECT["license-files"]}
    assert all(any(file == word or file.startswith(f"{word}/") for word in copied) for file in needed)
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", "\n".join(lines))
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert "USER hardy" in lines and 'ENTRYPOINT ["hardy"]' in lines


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    cells = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        assert cell["outputs"] == [] and cell["execution_count"] is None  # kept without outputs
        exec(compile("".join(cell["source"]), str(path), "exec"), names)
    shown = capsys.readouterr().out
    assert "%" in shown and not list(tmp_path.iterdir())


def test_completion_is_a_script_of_the_shell(tmp_path, capsys, monkeypatch):
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "hardy.bash").write_text(capsys.readouterr().out)
    typed = "COMP_WORDS=(hardy ev); COMP_CWORD=1; _shtab_hardy hardy ev hardy; echo ${COMPREPLY[@]}"
    code = f"source {tmp_path}/hardy.bash; {typed}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "evaluate"
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "zsh"]) == 2
    assert "completion needs shtab: pip install 'hardy-fl[completion]'" in capsys.readouterr().err
